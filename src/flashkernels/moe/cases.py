"""Named sizes of the mixture of experts. Benchmarks and tests take them from here: a name means one size everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from flashkernels.moe.problem import LayerProblem, RouteProblem

if TYPE_CHECKING:
    import torch

ROUTES = ((32768, 64, 2), (32768, 128, 8), (4096, 256, 8), (128, 128, 8), (1, 128, 8))  # tokens, experts, k
MODELS = {  # experts, k, hidden, inner
    "mixtral-8x7b": (8, 2, 4096, 14336),
    "qwen3-30b-a3b": (128, 8, 2048, 768),
}
TOKENS = (1, 16, 64, 256, 1024, 4096, 16384)
WEIGHTS = {"bf16": "", "fp8": "fp8", "int8": "int8", "int4": "w4"}  # name in the results, format
ZIPF = 1.2  # of skewed logits: expert e is chosen about as often as (e + 1) ** -ZIPF


@dataclass(frozen=True)
class Case:
    """One named problem, how it is launched, and whether experts are equally liked."""

    name: str
    problem: RouteProblem | LayerProblem
    launch: str
    model: str = ""
    weights: str = "bf16"
    skewed: bool = False

    def flops(self) -> int:
        return self.problem.flops()

    @property
    def params(self) -> dict[str, Any]:
        """What changes the figure."""
        p = self.problem
        if isinstance(p, RouteProblem):
            found: dict[str, Any] = {"tokens": p.tokens, "experts": p.experts, "k": p.k, "dtype": p.dtype}
        else:
            found = {"model": self.model, "tokens": p.tokens, "weights": self.weights}
        return found | {"logits": "zipf" if self.skewed else "normal", "launch": self.launch}


def _route() -> Iterator[Case]:
    for tokens, experts, k in ROUTES:
        problem = RouteProblem(tokens, experts, k, "fp32", "cuda")
        name = f"t{tokens}-e{experts}-k{k}"
        for launch in ("graph", "eager"):
            yield Case(f"{name}-{launch}", problem, launch)
        yield Case(f"{name}-zipf", problem, "graph", skewed=True)
        yield Case(f"{name}-topk", replace(problem, planned=False), "graph")


def _layer() -> Iterator[Case]:
    for model, (experts, k, hidden, inner) in MODELS.items():
        for weights, format in WEIGHTS.items():
            for tokens in TOKENS:
                problem = LayerProblem(tokens, hidden, inner, experts, k, "bf16", "cuda", format)
                yield Case(f"{model}-t{tokens}-{weights}", problem, "graph", model, weights)
                if weights == "bf16" and tokens >= 1024:
                    yield Case(f"{model}-t{tokens}-zipf", problem, "graph", model, weights, skewed=True)


SUITES = {"route": _route, "layer": _layer}
QUICK_ON_GPU = {
    "route": ("t32768-e64-k2-graph", "t128-e128-k8-graph"),
    "layer": ("mixtral-8x7b-t64-bf16", "qwen3-30b-a3b-t1024-bf16", "qwen3-30b-a3b-t64-int4"),
}


def suite(name: str, *, device: str = "cuda", quick: bool = False) -> tuple[Case, ...]:
    """The cases of a suite. A quick run takes a few of them on a GPU, and all of them at tiny sizes on the CPU.

    >>> [case.name for case in suite("route")][:4]
    ['t32768-e64-k2-graph', 't32768-e64-k2-eager', 't32768-e64-k2-zipf', 't32768-e64-k2-topk']
    """
    if name not in SUITES:
        raise ValueError(f"suite={name!r} is not one of {', '.join(map(repr, SUITES))}")
    cases: Iterator[Case] = SUITES[name]()
    if quick and device == "cpu":
        cases = map(_tiny, cases)
    elif quick:
        cases = (case for case in cases if case.name in QUICK_ON_GPU[name])
    return tuple(replace(case, problem=replace(case.problem, device=device)) for case in cases)


def _tiny(case: Case) -> Case:
    """The same features at a size that a CPU does in no time."""
    p = case.problem
    if isinstance(p, RouteProblem):
        return replace(case, problem=replace(p, tokens=min(p.tokens, 40), experts=16, k=2), launch="eager")
    tiny = replace(p, tokens=min(p.tokens, 12), hidden=128, inner=128, experts=4, k=2, dtype="fp32")
    return replace(case, problem=tiny, launch="eager")


def logits_of(case: Case, random: torch.Generator, device: Any) -> torch.Tensor:
    """(T, E) fp32: standard normal, and for skewed cases less for each expert than for the one before."""
    import torch

    p = case.problem
    logits = torch.randn(p.tokens, p.experts, generator=random, device=device)
    if case.skewed:
        logits -= ZIPF * torch.log(torch.arange(1, p.experts + 1, device=device))
    return logits


def inputs(case: Case, *, device: str | torch.device, seed: int = 0) -> tuple[Any, ...]:
    """Random arguments: (logits,) of a routing; (x, logits, w_gate_up, w_down) of a layer, whose weights are not yet in
    the case's format.

    The layer's logits are given, not made by a router, so that the load is what the case says.
    """
    import torch

    random = torch.Generator(device).manual_seed(seed)
    logits = logits_of(case, random, device)
    p = case.problem
    if isinstance(p, RouteProblem):
        return (logits,)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[p.dtype]

    def normal(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device=device, dtype=dtype).normal_(generator=random)

    w_gate_up = normal(p.experts, 2 * p.inner, p.hidden).mul_(p.hidden**-0.5)
    w_down = normal(p.experts, p.hidden, p.inner).mul_(p.inner**-0.5)
    return normal(p.tokens, p.hidden), logits.to(dtype), w_gate_up, w_down
