"""Says which implementation serves a call, on which tile, why, and what the hardware would allow."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from flashkernels import hardware
from flashkernels.attention.hopper import cost, tiles as hopper_tiles
from flashkernels.attention.hopper.source import HopperTile, Variant
from flashkernels.attention.problem import AttentionProblem
from flashkernels.attention.triton import tiles
from flashkernels.dispatch import Explanation as Base, select, verdicts
from flashkernels.hardware import Gpu
from flashkernels.tiling import Choice, override, waste

RAGGED = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")  # that follow q, k and v
WORDS = {  # for the flags of a HopperTile
    "pingpong": "warpgroups take turns on the tensor cores",
    "q_in_registers": "Q in registers",
    "wide_v": "V in 64-column chunks",
    "wide_k": "K in 64-column chunks",
}


@dataclass(frozen=True)
class HopperLaunch:
    """What the Hopper kernel makes of one problem."""

    variant: Variant
    tiles: int  # of a ragged batch at most as many: the lengths are on the device
    cut: int  # of them, along their keys,
    shares: int  # and the blocks that share those
    sent: int  # columns of the outputs that the copy engine writes, but for what a block makes last
    waves: float  # tiles of each multiprocessor
    seconds: float  # predicted

    @property
    def tile(self) -> HopperTile:
        return self.variant.tile

    @property
    def computed(self) -> tuple[int, int]:
        """Columns that the instructions compute of a head: of Q·Kᵀ in steps of 16 (FP8: 32), of P·V in steps of 8 (wide
        heads: of 8 in each half)."""
        depth, depth_v = 32 if self.variant.fp8 else 16, 16 if self.variant.wide else 8
        return -(-self.variant.head_dim // depth) * depth, -(-self.variant.head_dim_v // depth_v) * depth_v

    @property
    def waste(self) -> float:
        """Share of the computed columns that is padding."""
        return 1 - (self.variant.head_dim + self.variant.head_dim_v) / sum(self.computed)


@dataclass(frozen=True)
class Explanation(Base):
    """Everything that decides one attention call. `print` it, or read the fields.

    `choices` (the Triton kernel's, one per tiling strategy) and the roofline fields are empty without a GPU; `hopper`
    is None unless the Hopper kernel serves.
    """

    problem: AttentionProblem
    choices: tuple[Choice, ...] = ()
    hopper: HopperLaunch | None = None
    inner: Explanation | None = None  # of what serves the copies, where `aligned` makes some

    @property
    def chosen(self) -> Choice | None:
        """The strategy whose tile the Triton kernel runs, where that one serves."""
        served = [(c.best.cost, i) for i, c in enumerate(self.choices) if c.best]
        return self.choices[min(served)[1]] if served and self.impl == "triton" else None

    @property
    def predicted(self) -> float | None:
        """Seconds by the cost model of the kernel that serves, and not below the roofline; None where it has none."""
        if self.inner:
            return with_copies(self.inner.predicted, self)
        if self.problem.narrow and self.impl == "triton":
            return None  # timings have no such rows
        if self.hopper:
            return max(self.hopper.seconds, self.floor or 0)
        return max(self.chosen.best.cost, self.floor or 0) if self.chosen and self.chosen.best else None

    def title(self) -> str:
        return title_of(self.problem)

    def tiling(self) -> list[str]:
        if self.inner:
            return through_copies(self.problem, self.inner)
        compared = [_line(choice, self.problem, choice is self.chosen, self.floor or 0) for choice in self.choices]
        if self.hopper:
            own = [f"tile: {self.hopper.tile.name}", *_lines(self.hopper, self.problem)]
            return [*own, "strategies of the Triton kernel:", *compared] if compared else own
        if self.impl != "triton" or not self.choices:
            return []
        name = self.chosen.best.tile.name if self.chosen and self.chosen.best else "none, the call would raise"
        slow = f"{self.problem.narrow}, so read 2 bytes at a time, which no prediction knows; `aligned` copies them"
        return [f"tile: {name}", "strategies:", *compared, *([slow] if self.problem.narrow else [])]

    def notes(self) -> list[str]:
        if self.predicted is None:
            return []
        rate, share = self.problem.flops() / self.predicted / 1e12, (self.floor or 0) / self.predicted
        return [f"predicted: {self.predicted * 1e6:.1f} µs, {rate:.0f} TFLOPS, {share:.0%} of the roofline"]


def explain(op: str, *tensors: Any, gpu: str | Gpu | None = None, **arguments: Any) -> Explanation:
    """Why a call would run as it would, without running it.

    Args:
        op: "attention" or "attention_varlen".
        tensors: q, k, v of the call (of a ragged batch also both cu_seqlens and the lengths), with the call's other
            arguments as keywords; or none, and the keyword `problem`, an `AttentionProblem`.
        gpu: a GPU or its short name ("h200"), present or not; default: the one the tensors are on, else this
            machine's.

    >>> import flashkernels as fk
    >>> from flashkernels.attention.problem import AttentionProblem
    >>> problem = AttentionProblem(batch=4, seq_q=4096, seq_k=4096, heads=28, kv_heads=28, head_dim=72, causal=True)
    >>> why = fk.explain("attention", problem=problem, gpu="h200")
    >>> why.impl, why.hopper.computed, why.bound
    ('hopper', (80, 72), 'compute')
    >>> portable = fk.explain("attention", problem=problem, gpu="h200", impl="triton")
    >>> portable.chosen.best.tile.parts
    (64, 16)
    """
    if op not in ("attention", "attention_varlen"):
        raise ValueError(f"op={op!r} is not one of 'attention', 'attention_varlen'")
    from flashkernels.attention.api import IMPLS, problem_of  # the table needs torch, the rest of this file does not

    impl = arguments.pop("impl", "auto")
    problem = arguments.pop("problem", None)
    if problem is None:
        given = tensors
        if op == "attention_varlen":
            given, ragged = tensors[:3], dict(zip(RAGGED, tensors[3:], strict=False)) | arguments
            missing = [name for name in RAGGED if name not in ragged]
            if missing or len(tensors) > 3 + len(RAGGED) or "mask" in ragged:
                about = f"without {', '.join(missing)}" if missing else "with more than it takes"
                raise TypeError(f"attention_varlen {about}: it takes q, k, v, {', '.join(RAGGED)}, and no mask")
            arguments = ragged
        problem = problem_of(*given, **arguments)
    elif tensors or arguments:
        raise ValueError("explain takes either tensors with their arguments or a problem")
    if not isinstance(problem, AttentionProblem):
        raise TypeError(f"problem must be an AttentionProblem, got {type(problem).__name__}")
    if gpu is not None and not isinstance(gpu, (str, Gpu)):
        raise TypeError(f"gpu={gpu!r} must be the name of a GPU or a Gpu")
    if gpu is not None:
        gpu = hardware.lookup(gpu) if isinstance(gpu, str) else gpu
        problem = replace(problem, device="cuda") if tensors else problem
    elif problem.device == "cuda":
        gpu = hardware.detect(tensors[0].device if tensors else None)
    chosen = select(IMPLS, problem, gpu, impl).name
    choices: tuple[Choice, ...] = ()
    launch = _launch(problem, gpu) if gpu is not None and chosen == "hopper" else None
    if gpu is not None and problem.device == "cuda" and problem.dtype != "fp8":  # which the Triton kernel has not
        tma = not (problem.head_dim % 8 or problem.head_dim_v % 8)  # rows of contiguous tensors that TMA can address
        choices = tiles.compare(problem, gpu, tma)
        forced = override()
        if isinstance(forced, str):
            choices = tuple(
                c if c.strategy == forced else Choice(c.strategy, None, f"use_tile asks for {forced}") for c in choices
            )
    inner = explain(op, problem=problem.widened(), gpu=gpu) if chosen == "aligned" else None
    answers = verdicts(IMPLS, problem, gpu)
    return Explanation(
        "attention", problem, gpu, chosen, impl != "auto", answers, choices=choices, hopper=launch, inner=inner
    )


def through_copies(problem: AttentionProblem, inner: Base) -> list[str]:
    """What `aligned` does, in lines: copies, and what serves them."""
    wide = problem.widened()
    dims = " and ".join(map(str, dict.fromkeys((wide.head_dim, wide.head_dim_v))))
    first = f"copies: {problem.narrow}; to {dims} columns, filled up with zeros, and back"
    return [first, f"then {inner.impl}", *inner.tiling()]


def with_copies(seconds: float | None, why: Base) -> float | None:
    """The time of what serves the copies, and that of the least traffic twice more: read, and written."""
    return seconds and why.memory and seconds + 2 * why.memory


def _launch(problem: AttentionProblem, gpu: Gpu) -> HopperLaunch:
    choice = hopper_tiles.choose(problem, gpu.sms, override())
    size = choice.variant.tile.cluster
    count, cut, shares = (size * n for n in (choice.tiles, choice.cut, choice.shares))
    seconds = cost.seconds(problem, choice, gpu)
    return HopperLaunch(choice.variant, count, cut, shares, choice.sent(gpu.sms), count / gpu.sms, seconds)


def title_of(p: AttentionProblem) -> str:
    """The problem in a line."""
    heads = f"{p.heads} heads" if p.heads == p.kv_heads else f"{p.heads}/{p.kv_heads} heads"
    dims = f"head_dim {p.head_dim}" if p.head_dim == p.head_dim_v else f"head_dim {p.head_dim}/{p.head_dim_v}"
    seqs = f"S={p.seq_q}" if p.seq_q == p.seq_k else f"S={p.seq_q}/{p.seq_k}"
    flags = [name for name in ("causal", "softcap", "alibi", "sinks", "varlen") if getattr(p, name)]
    flags += [f"window {p.window}"] if p.window != (-1, -1) else []
    flags += [f"{p.mask} mask"] if p.mask else []
    flags += [f"dropout {p.dropout_p:g}"] if p.dropout_p else []
    flags += [f"pages of {p.page_size}"] if p.page_size else []
    return ", ".join([f"attention {p.dtype} B={p.batch} {seqs}", heads, dims, *flags])


def _lines(launch: HopperLaunch, problem: AttentionProblem) -> list[str]:
    """The Hopper kernel's tile in words."""
    tile, pack = launch.tile, launch.variant.pack
    shape = f"{64 * tile.groups} rows x {tile.block_n} keys, {tile.stages} stages"
    if launch.variant.wide:
        shape += " of 128 columns of K or 32 keys of V"
    flags = [words for name, words in WORDS.items() if getattr(tile, name)]
    flags += [f"Q in {tile.q_stages} stages"] if tile.q_stages > 1 else []
    flags += [f"{tile.cluster} blocks share their loads"] if tile.cluster > 1 else []
    flags += [f"one set of P for {tile.late} steps"] if tile.late else []
    heads = f"{pack} query heads share a row block" if pack > 1 else "one query head a row block"
    which = "all" if launch.cut == launch.tiles else f"the last {launch.cut}"
    parts = f"{which} tiles cut by keys for {launch.shares} blocks" if launch.cut else "no tile cut by keys"
    dim, dim_v = problem.head_dim, problem.head_dim_v
    qk, pv = launch.computed
    written = f"; {launch.sent} of {dim_v} written by the copy engine" if launch.sent else ""
    most = "at most " if problem.varlen else ""
    return [
        f"  {', '.join([shape, *flags])}",
        f"  {heads}, {parts}",
        f"  columns: {qk} for {dim} in Q·Kᵀ, {pv} for {dim_v} in P·V, waste {launch.waste:.2%}{written}",
        f"  {launch.variant.shared / 1024:.0f} KiB shared, {most}{launch.tiles} tiles, {launch.waves:.2f} waves",
    ]


def _line(choice: Choice, problem: AttentionProblem, chosen: bool, floor: float) -> str:
    if choice.best is None:
        return f"    {choice.strategy:9} {choice.reason}"
    tile, need = choice.best.tile, choice.best.footprint
    lost = (waste(problem.head_dim, tile.parts) + waste(problem.head_dim_v, tile.parts_v)) / 2
    parts = "+".join(map(str, tile.parts))
    return (
        f"  {'>' if chosen else ' '} {choice.strategy:9} {parts:9} {tile.block_m}x{tile.block_n}  waste {lost:.2%}"
        f"  {need.shared / 1024:.0f} KiB shared  ~{need.registers} registers  {need.blocks_per_sm} blocks/SM"
        f"  {max(choice.best.cost, floor) * 1e6:.0f} µs"
    )
