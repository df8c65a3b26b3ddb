"""Says on which tile a call over a cache runs, what that tile means, and what the cache's format costs."""

from __future__ import annotations

from dataclasses import dataclass

from flashkernels.decode import cost
from flashkernels.decode.hopper import tiles as hopper_tiles
from flashkernels.decode.hopper.source import HopperDecodeTile, stored_bytes
from flashkernels.decode.problem import DecodeProblem
from flashkernels.decode.triton import tiles
from flashkernels.decode.triton.tiles import CHUNK, DecodeTile
from flashkernels.dispatch import Explanation
from flashkernels.hardware import Gpu
from flashkernels.tiling import override


@dataclass(frozen=True)
class DecodeExplanation(Explanation):
    """Everything that decides one call over a cache. Work is counted with every sequence as long as it can be."""

    problem: DecodeProblem
    tile: HopperDecodeTile | DecodeTile | None = None

    @property
    def token_bytes(self) -> float:
        """Of the cache, for one token: keys, values and scales of all heads."""
        return self.problem.kv_heads * self.problem.row_bits / 8

    @property
    def predicted(self) -> float | None:
        """Seconds that the kernel is expected to take; None where nothing like it was measured."""
        return cost.seconds(self.problem, self.impl, self.gpu) if self.gpu else None

    def title(self) -> str:
        p = self.problem
        heads = f"{p.heads} heads" if p.heads == p.kv_heads else f"{p.heads}/{p.kv_heads} heads"
        dims = f"head_dim {p.head_dim}" if p.head_dim == p.head_dim_v else f"head_dim {p.head_dim}/{p.head_dim_v}"
        tokens = f"T={p.total} ragged" if p.ragged else f"T={p.tokens}"
        flags = [name for name in ("softcap", "alibi", "sinks", "tree", "batch_invariant") if getattr(p, name)]
        flags += [] if p.causal or p.tree else ["not causal"]
        flags += [f"window {p.window}"] if p.window != (-1, -1) else []
        pages = f"{p.format} pages of {p.page_size}"
        return ", ".join([f"{self.op} {p.dtype} B={p.batch} {tokens} context {p.context}", heads, dims, pages, *flags])

    def notes(self) -> list[str]:
        scales = {"token": ", scales of each token included", "head": ", one scale for each head beside"}
        kept = f"cache: {self.problem.format}, {self.token_bytes:g} bytes a token{scales.get(self.problem.scales, '')}"
        if self.predicted and self.floor:
            share = self.floor / self.predicted
            expected = [f"predicted: {self.predicted * 1e6:.1f} µs, {share:.0%} of the roofline"]
        else:
            expected = []
        return [*super().notes(), *expected, f"{kept}; {self.problem.cache_bytes() / 1e6:.4g} MB of it are read"]


def _hopper(problem: DecodeProblem, gpu: Gpu) -> tuple[HopperDecodeTile, tuple[str, ...]]:
    slots = (problem.kv_heads * stored_bytes(problem.format, d) for d in (problem.head_dim, problem.head_dim_v))
    variant = hopper_tiles.variant_of(problem, *slots)
    tile, pieces = variant.tile, variant.tile.pieces(gpu.sms, problem.kv_heads)
    return tile, (
        f"{tile.warps} warps a block, each with {16 * tile.sub} keys a step and {_count(tile.stages, 'stage')}",
        _copies(problem, tile),
        f"{gpu.sms * tile.per_sm} blocks take the keys in up to {pieces} pieces, cut on the device by the lengths",
        f"{variant.shared / 1024:.0f} KiB shared, {_count(tile.per_sm, 'block')} an SM",
    )


def _copies(problem: DecodeProblem, tile: HopperDecodeTile) -> str:
    """Which of the two kernels, and why."""
    forced = override() is tile
    if tile.heads:
        why = "as use_tile says" if forced else f"a full cache is {problem.cache_bytes() / 1e6:.4g} MB"
        return f"rows.cu, {why}: one more warp copies rows of {tile.heads} heads together, where they lie side by side"
    why = "as use_tile says" if forced else hopper_tiles.apart(problem) or "nothing else fits into shared memory"
    return f"decode.cu, {why}: every warp copies for itself"


def _triton(problem: DecodeProblem, gpu: Gpu) -> tuple[DecodeTile, tuple[str, ...]]:
    tile = tiles.choose(problem, gpu)
    share = f"pieces of {CHUNK} keys, the same in any batch" if problem.batch_invariant else "equal shares of all keys"
    return tile, (
        f"{tile.block_m} query rows x {tile.block_n} keys a step, {tile.warps} warps, {_count(tile.stages, 'stage')}",
        f"{tiles.programs(tile, gpu)} programs, {tile.per_sm} an SM, take {share}, cut on the device by the lengths",
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


CUTS = {"hopper": _hopper, "triton": _triton}  # the tile of a kernel, and what it means
