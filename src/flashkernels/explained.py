"""`explain` of every op: the call itself is asked, up to where it would choose an implementation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, overload

from flashkernels import hardware
from flashkernels.attention import backward_explain as gradients, explain as attention
from flashkernels.decode import api as decode
from flashkernels.decode.explain import CUTS, DecodeExplanation
from flashkernels.decode.problem import DecodeProblem
from flashkernels.dispatch import ASKING, Asked, Explanation, Impl, select, verdicts
from flashkernels.fused import activation, norm, rope, sampling, softmax, speculative
from flashkernels.fused.cross_entropy import IMPLS as LOSS_IMPLS, cross_entropy, linear_cross_entropy
from flashkernels.fused.explain import FusedExplanation
from flashkernels.fused.linear import IMPLS as LINEAR_IMPLS, NORM_IMPLS, linear, norm_linear
from flashkernels.fused.problem import LinearProblem, LossProblem
from flashkernels.fused.rows import RowProblem
from flashkernels.fused.triton.linear_tiles import cut
from flashkernels.hardware import Gpu


@dataclass(frozen=True)
class Op:
    """The public function, its table, what its calls are described as, and the tiles of implementations that choose."""

    function: Callable[..., Any]
    impls: Sequence[Impl]
    problem: type[Any] = RowProblem
    cuts: Mapping[str, Callable[..., tuple[Any, tuple[str, ...]]]] = field(default_factory=dict)
    explanation: type[Explanation] = FusedExplanation


OPS = {
    "decode": Op(decode.decode, decode.IMPLS, DecodeProblem, CUTS, DecodeExplanation),
    "attention_paged": Op(decode.attention_paged, decode.IMPLS, DecodeProblem, CUTS, DecodeExplanation),
    "rms_norm": Op(norm.rms_norm, norm.IMPLS),
    "layer_norm": Op(norm.layer_norm, norm.IMPLS),
    "swiglu": Op(activation.swiglu, activation.IMPLS),
    "geglu": Op(activation.geglu, activation.IMPLS),
    "relu2_glu": Op(activation.relu2_glu, activation.IMPLS),
    "gelu": Op(activation.gelu, activation.IMPLS),
    "rope": Op(rope.rope, rope.IMPLS),
    "softmax": Op(softmax.softmax, softmax.IMPLS),
    "log_softmax": Op(softmax.log_softmax, softmax.IMPLS),
    "linear": Op(linear, LINEAR_IMPLS, LinearProblem, {"triton": cut}, Explanation),
    "norm_linear": Op(norm_linear, NORM_IMPLS, LinearProblem, {"triton": cut}, Explanation),
    "cross_entropy": Op(cross_entropy, LOSS_IMPLS, LossProblem),
    "linear_cross_entropy": Op(linear_cross_entropy, LOSS_IMPLS, LossProblem),
    "sample": Op(sampling.sample, sampling.IMPLS),
    "speculative_accept": Op(speculative.speculative_accept, speculative.IMPLS),
}


@overload
def explain(
    op: Literal["attention", "attention_varlen"], *tensors: Any, gpu: str | Gpu | None = None, **arguments: Any
) -> attention.Explanation: ...


@overload
def explain(
    op: Literal["attention_backward"], *tensors: Any, gpu: str | Gpu | None = None, **arguments: Any
) -> gradients.BackwardExplanation: ...


@overload
def explain(
    op: Literal["decode", "attention_paged"], *tensors: Any, gpu: str | Gpu | None = None, **arguments: Any
) -> DecodeExplanation: ...


@overload
def explain(op: str, *tensors: Any, gpu: str | Gpu | None = None, **arguments: Any) -> Explanation: ...


def explain(op: str, *tensors: Any, gpu: str | Gpu | None = None, **arguments: Any) -> Explanation:
    """Why a call would run as it would, without running it.

    Args:
        op: the name of a function: "attention", "attention_varlen", "decode", "attention_paged", "rms_norm",
            "layer_norm", "swiglu", "geglu", "relu2_glu", "gelu", "rope", "softmax", "log_softmax", "linear",
            "norm_linear", "cross_entropy", "linear_cross_entropy", "sample" or "speculative_accept".
            "attention_backward" is what makes the gradients of an attention call, whose arguments it takes, with
            `wanted`: names of the tensors to differentiate by. Experts have `moe.explain`.
        tensors, arguments: those of the call; values of tensors do not matter. Or none of them but the keywords
            `problem`, the op's description of a call, and `impl`.
        gpu: a GPU or its short name ("h200"), present or not: the answer is for tensors on it, wherever these are.
            Default: the one that the tensors are on; for a problem, this machine's.

    Returns:
        What serves and why not the others, the work, and the least time that it takes on the GPU; of attention,
        its gradients, decode and linear layers also the tile; of all but linear layers `predicted`, the seconds that
        are expected, or None where nothing like it was measured. Where tensors need gradients, it is the forward pass
        of training. Wrong arguments raise what the call would raise.

    >>> import torch, flashkernels as fk
    >>> x, weight = torch.empty(8192, 4096, dtype=torch.bfloat16), torch.empty(4096, dtype=torch.bfloat16)
    >>> print(fk.explain("rms_norm", x, weight, gpu="h200"))
    rms_norm bf16 rows=8192 width=4096 on NVIDIA H200
    <BLANKLINE>
    implementation: triton
      not torch: could serve, but a better one does
    <BLANKLINE>
    work: 134.2 MB at least
    roofline: memory bound, at least 28.0 µs
    predicted: 36.4 µs, 77% of the roofline
    >>> from flashkernels.decode.problem import DecodeProblem
    >>> sizes = {"batch": 64, "tokens": 1, "heads": 32, "kv_heads": 8, "head_dim": 128, "context": 4096}
    >>> why = fk.explain("decode", problem=DecodeProblem(page_size=16, row_bits=4096, **sizes), gpu="h200")
    >>> why.impl, why.bound, why.token_bytes
    ('hopper', 'memory', 4096.0)
    """
    if op in ("attention", "attention_varlen"):
        return attention.explain(op, *tensors, gpu=gpu, **arguments)
    if op == "attention_backward":
        return gradients.explain(*tensors, gpu=gpu, **arguments)
    if not isinstance(op, str) or op not in OPS:
        own = ("attention", "attention_varlen", "attention_backward")
        raise ValueError(f"op={op!r} is not one of {', '.join(map(repr, (*own, *OPS)))}; for experts fk.moe.explain")
    if not isinstance(gpu, (str, Gpu, type(None))):
        raise TypeError(f"gpu={gpu!r} must be a Gpu or the short name of one, got {type(gpu).__name__}")
    row, impl, problem = OPS[op], arguments.pop("impl", "auto"), arguments.pop("problem", None)
    here = hardware.lookup(gpu) if isinstance(gpu, str) else gpu
    if problem is None:
        problem, found = _asked(op, tensors, arguments)
    elif tensors or arguments:
        raise ValueError("explain takes either tensors with their arguments or a problem")
    elif not isinstance(problem, row.problem):
        raise TypeError(f"problem={problem!r} of op={op!r} must be a {row.problem.__name__}")
    else:
        found = hardware.detect() if here is None and problem.device == "cuda" else None
    if here is None:
        here = found
    else:
        problem = replace(problem, device="cuda")
    chosen = select(row.impls, problem, here, impl).name
    answers = verdicts(row.impls, problem, here)
    tile, words = row.cuts[chosen](problem, here) if here and chosen in row.cuts else (None, ())
    return row.explanation(op, problem, here, chosen, impl != "auto", answers, tile, words)


def _asked(op: str, tensors: tuple[Any, ...], arguments: dict[str, Any]) -> tuple[Any, Gpu | None]:
    """The problem that a call poses, after its own checks, and the GPU that it would run on."""
    function = OPS[op].function
    if "seeds" in inspect.signature(function).parameters and arguments.get("seeds") is None:
        arguments = {**arguments, "seeds": 0}  # else torch's generator would be drawn from
    try:
        function(*tensors, **arguments, impl=ASKING)
    except Asked as asked:
        return asked.problem, asked.gpu
    raise ValueError(f"op={op!r} chose nothing: its tensors are traced or have no memory (device 'meta')")
