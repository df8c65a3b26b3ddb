"""Says which implementation makes the gradients of a call, on which tile, why, and what the hardware would allow."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from flashkernels import hardware
from flashkernels.attention.explain import through_copies, title_of, with_copies
from flashkernels.attention.hopper import backward_cost, backward_tiles, backward_wide_source as wide
from flashkernels.attention.hopper.backward_source import BackwardVariant
from flashkernels.attention.problem import AttentionProblem, BackwardProblem
from flashkernels.attention.triton import backward_cost as triton_cost, backward_tiles as triton_tiles
from flashkernels.attention.triton.backward_tiles import BackwardTiles
from flashkernels.dispatch import Explanation as Base, UnsupportedError, select, verdicts
from flashkernels.hardware import Gpu

WANTED = ("q", "k", "v")
WORDS = {  # for the flags of a BackwardTile
    "k_in_registers": "K in registers",
    "v_in_registers": "V in registers",
    "separate": "P and dS in registers of their own",
    "sends": "dK and dV written by the copy engine",
    "skips": "a first block that shows nothing passed over",
}


@dataclass(frozen=True)
class BackwardExplanation(Base):
    """Everything that decides the gradients of one attention call. `print` it, or read the fields."""

    problem: BackwardProblem
    hopper: BackwardVariant | None = None  # where the Hopper kernels serve
    triton: BackwardTiles | None = None  # where the Triton kernels do
    inner: BackwardExplanation | None = None  # of what serves the copies, where `aligned` makes some

    @property
    def repeatable(self) -> bool:
        """Whether all gradients have the same bits in every run: those of q have not where they are added in memory."""
        if self.inner:
            return self.inner.repeatable
        if self.hopper:
            return not self.hopper.adds_dq
        return self.triton is None or self.triton.dq is not None

    @property
    def predicted(self) -> float | None:
        """Seconds by the cost model of the kernels that serve; None where they have none."""
        if self.gpu is None:
            return None
        if self.inner:
            return with_copies(self.inner.predicted, self)
        if self.hopper:
            return backward_cost.seconds(self.problem, self.hopper, self.gpu)
        return triton_cost.seconds(self.problem, self.triton, self.gpu) if self.triton else None

    def title(self) -> str:
        how = ", the same bits in every run" if self.problem.deterministic else ""
        return f"gradients of {', '.join(self.problem.wanted)}{how}: {title_of(self.problem.call)}"

    def tiling(self) -> list[str]:
        if self.inner:
            return through_copies(self.problem.call, self.inner)
        if self.hopper:
            lines = [f"tile: {self.hopper.tile.name}", *_hopper_lines(self.hopper, self.problem)]
        elif self.triton:
            first = "dK and dV" if self.triton.dq else "dK and dQ" if self.triton.dv else "one pass"
            passes = [(first, self.triton.dkdv), ("dQ", self.triton.dq), ("dV", self.triton.dv)]
            passes.append(("mask", self.triton.dmask))
            lines = ["tiles:", *(f"  {name}: {tile.name}" for name, tile in passes if tile)]
        else:
            return []
        varies = "dQ is added up in memory: its last bits vary from run to run, unless deterministic=True"
        return [*lines, *([] if self.repeatable else [f"  {varies}"])]

    def notes(self) -> list[str]:
        if not self.predicted:
            return []
        rate, share = self.problem.flops() / self.predicted / 1e12, (self.floor or 0) / self.predicted
        return [f"predicted: {self.predicted * 1e6:.1f} µs, {rate:.0f} TFLOPS, {share:.0%} of the roofline"]


def explain(*tensors: Any, gpu: str | Gpu | None = None, **arguments: Any) -> BackwardExplanation:
    """Why the gradients of a call would be made as they would, without making them.

    Args:
        tensors: q, k, v of the call, with the call's other arguments as keywords, and `wanted`, names of those that
            gradients are wanted of: by default the ones that require them, or q, k and v. Or none of all this but
            the keyword `problem`, a `BackwardProblem`.
        gpu: as in `fk.explain`.

    >>> import flashkernels as fk
    >>> from flashkernels.attention.problem import AttentionProblem, BackwardProblem
    >>> call = AttentionProblem(batch=4, seq_q=4096, seq_k=4096, heads=28, kv_heads=28, head_dim=72, causal=True)
    >>> why = fk.explain("attention_backward", problem=BackwardProblem(call, ("q", "k", "v")), gpu="h200")
    >>> why.impl, why.hopper.tile.name, why.repeatable
    ('hopper', 'split-q3-register-staged-sends', False)
    >>> masked = BackwardProblem(AttentionProblem(**{**vars(call), "mask": "float"}), ("q", "k", "v", "mask"))
    >>> fk.explain("attention_backward", problem=masked, gpu="h200").impl
    'triton'
    """
    from flashkernels.attention.api import BACKWARD_IMPLS, IMPLS  # the tables need torch, the rest of this file not

    problem = arguments.pop("problem", None)
    if problem is None:
        problem = _asked(tensors, arguments)
    elif tensors or arguments:
        raise ValueError("explain takes either tensors with their arguments or a problem")
    elif not isinstance(problem, BackwardProblem):
        raise TypeError(f"problem={problem!r} of op='attention_backward' must be a BackwardProblem")
    call = problem.call
    if call.page_size or call.dtype == "fp8":
        raise UnsupportedError("FP8 and the pages of a cache have no gradients")
    if gpu is not None:
        here: Gpu | None = hardware.lookup(gpu) if isinstance(gpu, str) else gpu
        problem = replace(problem, call=replace(call, device="cuda")) if tensors else problem
    else:
        here = hardware.detect(tensors[0].device if tensors else None) if call.device == "cuda" else None
    tma = not (call.unaddressable or call.head_dim % 8 or call.head_dim_v % 8)  # rows that it can address
    select(IMPLS, problem.call, here, problem.impl)  # raises where the call itself would
    chosen = select(BACKWARD_IMPLS, problem, here).name
    inner = explain(problem=problem.widened(), gpu=here) if chosen == "aligned" else None
    return BackwardExplanation(
        "attention_backward", problem, here, chosen, False, verdicts(BACKWARD_IMPLS, problem, here),
        hopper=backward_tiles.choose(problem) if chosen == "hopper" else None,
        triton=triton_tiles.choose(problem, here, tma) if here and chosen == "triton" else None, inner=inner,
    )  # fmt: skip


def _asked(tensors: tuple[Any, ...], arguments: dict[str, Any]) -> BackwardProblem:
    """The problem that the call's arguments pose."""
    from flashkernels.attention.api import problem_of

    given = {**dict(zip(WANTED, tensors, strict=False)), **arguments}
    names = (*WANTED, "alibi_slopes", "sinks", "mask")
    needed = tuple(name for name in names if getattr(given.get(name), "requires_grad", False))
    wanted = tuple(arguments.pop("wanted", None) or needed or WANTED)
    if unknown := [name for name in wanted if given.get(name) is None]:
        raise ValueError(f"wanted={wanted!r}: the call has no {unknown[0]}")
    impl, deterministic = arguments.pop("impl", "auto"), bool(arguments.pop("deterministic", False))
    call = replace(problem_of(*tensors, **arguments), need_lse=True)
    return BackwardProblem(call, wanted, impl, saved=impl != "torch", deterministic=deterministic)


def _hopper_lines(variant: BackwardVariant, problem: BackwardProblem) -> list[str]:
    """The Hopper kernels' tile in words."""
    tile, call = variant.tile, problem.call
    if tile.wide:
        return _wide_lines(variant, call)
    flags = [words for name, words in WORDS.items() if getattr(tile, name)]
    flags += ["each warpgroup half of dQ's columns"] if tile.halves and variant.adds_dq else []
    flags += ["two blocks share their loads"] if tile.cluster > 1 else []
    keys = "two warpgroups on the same 64 keys" if tile.paired else "64 keys for each of two warpgroups"
    if not variant.want_q:
        dq = "no dQ"
    elif variant.own_dq:
        dq = "dQ by a kernel of its own, which makes S and dP once more: 7 products for 5"
    else:
        dq = f"dQ added by {'the copy engine' if tile.staged else 'the warps themselves'}"
    deep, deep_v = (-(-dim // 16) * 16 for dim in (call.head_dim, call.head_dim_v))
    most, tiles = "at most " if call.varlen else "", backward_tiles.most_tiles(call, variant)
    return [
        f"  {', '.join([f'{tile.queries} queries a step', keys, f'Q in {tile.q_stages} stages', *flags])}",
        f"  {dq}",
        f"  columns: {deep} for {call.head_dim} in Q·Kᵀ, {deep_v} for {call.head_dim_v} in dO·Vᵀ, "
        "their own number in dQ, dK and dV",
        f"  {variant.shared / 1024:.0f} KiB shared, {most}{tiles} {'pairs of ' if tile.cluster > 1 else ''}tiles",
    ]


def _wide_lines(variant: BackwardVariant, call: AttentionProblem) -> list[str]:
    wanted = [name for name in WANTED if getattr(variant, f"want_{name}")]
    products = {"q": 3, "k": 3, "v": 2}
    made = ", ".join(f"d{name.upper()} {products[name]}" for name in wanted)
    deep, deep_v = (-(-dim // 16) * 16 for dim in (call.head_dim, call.head_dim_v))
    rings = {name: wide.rings(variant, name) for name in wanted}
    return [
        f"  {wide.ROWS} rows of a gradient a block, {wide.QUERIES} of the other side a step, "
        "two blocks share their loads",
        f"  each gradient by blocks of its own; products of each: {made}, for 5 in all that are counted",
        f"  columns: {deep} for {call.head_dim} in Q·Kᵀ, {deep_v} for {call.head_dim_v} in dO·Vᵀ, "
        "half of their own number, in eights, for each warpgroup in dQ, dK and dV",
        f"  {', '.join(f'd{name.upper()} {ring.shared / 1024:.0f}' for name, ring in rings.items())} KiB shared",
    ]
