"""Named sizes of the row-wise ops, sampling and the losses. Benchmarks and tests take them from here: a name means one
size everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from flashkernels.fused.problem import BYTES, LossProblem
from flashkernels.fused.rope import rope_tables
from flashkernels.fused.rows import RowProblem

HEADS = (32, 8)  # of q and of k
LOSSES = ("cross_entropy", "linear_cross_entropy")
SPREAD = 3.0  # standard deviation of the logits that tokens are drawn from


@dataclass(frozen=True)
class Case:
    """One named call. `streams` says how many tensors of rows x width the op has to read and write, at least; losses
    count their own traffic."""

    name: str
    op: str
    rows: int
    width: int  # of a row: of a head, of gate and up together, of the vocabulary
    streams: float = 0
    residual: bool = False
    gradients: str = ""  # "backward": only the backward pass is timed; "step": the forward pass with it
    depth: int = 0  # of the product before the loss
    settings: Mapping[str, float] = field(default_factory=dict)  # keyword arguments
    launch: str = "graph"
    dtype: str = "bf16"
    device: str = "cuda"

    @property
    def problem(self) -> RowProblem | LossProblem:
        if self.op in LOSSES:
            return LossProblem(self.rows, self.width, self.depth, self.dtype, self.device, grads=True)
        moved = int(self.streams * self.rows * self.width) * BYTES[self.dtype]
        name = f"{self.op}_backward" if self.gradients else self.op
        return RowProblem(name, self.rows, self.width, self.dtype, self.device, moved)

    def flops(self) -> int:
        return self.problem.flops()

    @property
    def params(self) -> dict[str, Any]:
        """What changes the figure."""
        found: dict[str, Any] = {"rows": self.rows, "width": self.width}
        found |= {"heads": list(HEADS)} if self.op == "rope" else {}
        found |= {"depth": self.depth} if self.depth else {}
        found |= {"gradients": self.gradients} if self.gradients else {}
        return found | dict(self.settings) | {"dtype": self.dtype, "launch": self.launch}


ROWS = (
    Case("rms_norm", "rms_norm", 16384, 4096, 2),
    Case("rms_norm+residual", "rms_norm", 16384, 4096, 4, residual=True),
    Case("rms_norm-backward", "rms_norm", 16384, 4096, 3, gradients="backward"),
    Case("rms_norm+residual-backward", "rms_norm", 16384, 4096, 4, residual=True, gradients="backward"),
    Case("layer_norm", "layer_norm", 16384, 4096, 2),
    Case("layer_norm-backward", "layer_norm", 16384, 4096, 3, gradients="backward"),
    Case("rope", "rope", 16384, 128, 2 * sum(HEADS)),
    Case("swiglu", "swiglu", 16384, 2 * 14336, 1.5),
    Case("softmax", "softmax", 8192, 32768, 2),
    Case("sample", "sample", 256, 128256, 1, settings={"temperature": 0.8, "top_k": 50, "top_p": 0.9}),
    Case("greedy", "sample", 256, 128256, 1, settings={"temperature": 0.0}),
    # milliseconds of work need no graph, and some rivals read a number on the host
    Case("cross_entropy", "cross_entropy", 8192, 128256, gradients="step", launch="eager"),
    Case("linear_cross_entropy", "linear_cross_entropy", 8192, 128256, gradients="step", depth=4096, launch="eager"),
)
SUITES = {"rows": ROWS}
QUICK_ON_GPU = {"rows": ("rms_norm", "rms_norm-backward", "swiglu", "sample")}


def suite(name: str, *, device: str = "cuda", quick: bool = False) -> tuple[Case, ...]:
    """The cases of a suite. A quick run takes a few of them on a GPU, and all of them at tiny sizes on the CPU.

    >>> [case.name for case in suite("rows")][:2]
    ['rms_norm', 'rms_norm+residual']
    """
    if name not in SUITES:
        raise ValueError(f"suite={name!r} is not one of {', '.join(map(repr, SUITES))}")
    if device == "cpu":
        return tuple(tiny(case, device) if quick else replace(case, device=device) for case in SUITES[name])
    return tuple(case for case in SUITES[name] if not quick or case.name in QUICK_ON_GPU[name])


def tiny(case: Case, device: str) -> Case:
    """The same features at a size that costs next to nothing."""
    dtype, launch = ("fp32", "eager") if device == "cpu" else (case.dtype, case.launch)
    rows, width, depth = min(case.rows, 16), min(case.width, 256), min(case.depth, 64)
    return replace(case, rows=rows, width=width, depth=depth, dtype=dtype, launch=launch, device=device)


def inputs(case: Case, *, device: str | torch.device, seed: int = 0) -> tuple[tuple[Any, ...], dict[str, float]]:
    """Random arguments, and the settings as keywords.

    Of rms_norm (x, weight), with a residual (x, weight, residual); layer_norm (x, weight, bias); rope (q, k, cos, sin);
    cross_entropy (logits, targets); linear_cross_entropy (x, weight, targets); of the others one tensor.
    """
    random = torch.Generator(device).manual_seed(seed)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[case.dtype]

    def normal(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device=device, dtype=dtype).normal_(generator=random)

    rows, width = case.rows, case.width
    args: tuple[Any, ...] = ()
    if case.op == "rms_norm":
        args = normal(rows, width), normal(width), *((normal(rows, width),) if case.residual else ())
    elif case.op == "layer_norm":
        args = normal(rows, width), normal(width), normal(width)
    elif case.op == "rope":
        cos, sin = rope_tables(rows, width, device=device)
        args = *(normal(1, rows, heads, width) for heads in HEADS), cos, sin
    elif case.op in LOSSES:
        targets = torch.randint(width, (rows,), generator=random, device=device)
        linear = case.op == "linear_cross_entropy"
        sides = (normal(rows, case.depth), normal(width, case.depth).mul_(case.depth**-0.5)) if linear else ()
        args = *(sides or (normal(rows, width),)), targets
    else:
        args = (normal(rows, width).mul_(SPREAD if case.op == "sample" else 1.0),)
    return args, dict(case.settings)
