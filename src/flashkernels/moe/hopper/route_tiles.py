"""Which routings the Hopper kernel takes, and how it cuts them."""

from __future__ import annotations

from dataclasses import dataclass

from flashkernels.hardware import Gpu
from flashkernels.moe.problem import RouteProblem
from flashkernels.tiling import TilingError, override

SHARED_LIMIT = 232448  # bytes a block may have on sm_90
SM_SHARED = 233472  # bytes of a multiprocessor; each block takes 1024 of them for itself
FEW = 8192  # tokens that 16 warps of a block route sooner than 32 (H200, 2026-11-15: 4096 x 256 9.8 us for 10.3)
CLUSTER = 8  # blocks that may wait for one another without a cooperative launch
WAYS = ("cluster", "grid")


@dataclass(frozen=True)
class HopperRouteTile:
    """Warps of a block, blocks of a multiprocessor, tokens whose logits a warp loads at once, and how blocks wait for
    one another: as a cluster or as a cooperative grid.

    >>> HopperRouteTile(warps=32, per_sm=1, ahead=8, way="grid").name
    'hopper-w32-p1-a8-grid'
    """

    warps: int
    per_sm: int
    ahead: int
    way: str

    def __post_init__(self) -> None:
        for name in ("warps", "per_sm", "ahead"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise TilingError(f"{name}={value} is not a power of two")
        if self.warps * self.per_sm > 64 or self.warps > 32:
            raise TilingError(f"{self.per_sm} blocks of {self.warps} warps are more than a multiprocessor has")
        if self.way not in WAYS:
            raise TilingError(f"way={self.way!r} is not one of {', '.join(map(repr, WAYS))}")

    @property
    def name(self) -> str:
        return f"hopper-w{self.warps}-p{self.per_sm}-a{self.ahead}-{self.way}"


@dataclass(frozen=True)
class Cut:
    """A tile on a problem: the grid, and tokens of a warp."""

    tile: HopperRouteTile
    blocks: int
    of_warp: int
    columns: int  # of a row of counts
    k: int

    @property
    def way(self) -> str:
        """A few blocks of a grid are a cluster."""
        return "cluster" if self.tile.way == "grid" and self.blocks <= CLUSTER else self.tile.way

    @property
    def shared(self) -> int:
        """Bytes: counts of each warp, two rows of sums, and choices that wait for their places."""
        return 4 * (self.tile.warps + 2) * self.columns + 4 * self.tile.warps * self.of_warp * self.k

    @property
    def fault(self) -> str | None:
        """Why it cannot be launched, or None."""
        tile = self.tile
        shared = self.shared + 256 * tile.warps  # a group's choices have a place of their own
        if shared > SHARED_LIMIT or (shared + 1024) * tile.per_sm > SM_SHARED:
            return f"choices of {self.of_warp} tokens a warp take {shared} bytes of shared memory, over the limit"
        rows = -(-self.blocks // tile.warps)  # that a warp adds up, in 16 bits
        if tile.warps * self.of_warp * rows > 65535:
            return f"{tile.warps * self.of_warp} tokens a block are more than 16 bits count in {rows} rows"
        return None


def own_experts(experts: int) -> int:
    """Experts of a lane: a power of two.

    >>> [own_experts(n) for n in (1, 32, 33, 128, 129, 1024)]
    [1, 1, 2, 4, 8, 32]
    """
    return 1 << (-(-experts // 32) - 1).bit_length()


def cut(tile: HopperRouteTile, tokens: int, experts: int, k: int, sms: int) -> Cut:
    """The tokens in equal runs for as many warps as run at once; a cluster has at most 8 blocks.

    >>> cut(HopperRouteTile(32, 1, 8, "grid"), 32768, 64, 2, 132)  # doctest: +ELLIPSIS
    Cut(tile=..., blocks=128, of_warp=8, columns=64, k=2)
    """
    most = CLUSTER if tile.way == "cluster" else sms * tile.per_sm
    of_warp = max(1, -(-tokens // (most * tile.warps)))
    blocks = max(1, -(-tokens // (of_warp * tile.warps)))
    if blocks <= CLUSTER:  # of 1, 2, 4 or 8 blocks; the last may have no tokens
        blocks = 1 << (blocks - 1).bit_length()
    return Cut(tile, blocks, of_warp, 32 * own_experts(experts), k)


def forced_tile() -> HopperRouteTile | None:
    """The tile of a routing that `use_tile` has put in force."""
    forced = override()
    return forced if isinstance(forced, HopperRouteTile) else None


def tile_of(problem: RouteProblem) -> HopperRouteTile:
    """The best of those measured on an H200 at 32768 x 64 and x 128, 4096 x 256, 128 x 128 and 1 x 128 logits in fp32
    (2026-11-15); borders lie between these sizes. Of 16-bit logits there is one measurement: their 32 // OWN tokens in
    flight are predicted.

    A cluster as long as two tokens for each of its warps are enough.

    >>> [tile_of(RouteProblem(n, 128, 8, "fp32", "cuda")).name for n in (1, 128, 4096, 32768)]
    ['hopper-w4-p1-a2-cluster', 'hopper-w8-p1-a2-cluster', 'hopper-w16-p1-a2-grid', 'hopper-w32-p1-a2-grid']
    """
    own, tokens = own_experts(problem.experts), problem.tokens
    ahead = max(1, min(8, 32 // own))
    if problem.dtype == "fp32" and own > 2:
        ahead = 2 if own <= 8 else 1
    most = 32 if own <= 8 else 16  # sorting 16 or 32 keys takes more than 64 registers
    if tokens > CLUSTER * most:
        return HopperRouteTile(most if tokens > FEW else 16, 1, ahead, "grid")
    warps = 1 << (max(1, -(-tokens // (2 * CLUSTER))) - 1).bit_length()
    return HopperRouteTile(max(4, warps), 1, ahead, "cluster")


def rejects(problem: RouteProblem, gpu: Gpu | None) -> str | None:
    """Why the Hopper kernel cannot serve, or None."""
    if problem.device != "cuda" or gpu is None:
        return f"needs a Hopper GPU, the tensors are on {problem.device}"
    if gpu.capability != (9, 0):
        return f"needs compute capability 9.0, {gpu.name} has {gpu.capability[0]}.{gpu.capability[1]}"
    if problem.given:
        return "chooses from logits; these ids are given"
    if problem.dtype == "fp64":
        return "has no fp64 kernel"
    if problem.tokens * problem.k >= 1 << 31:
        return f"{problem.tokens * problem.k} items are more than 32 bits count"
    if problem.groups > 1:
        return f"chooses from all experts, not from the best of groups={problem.groups}"
    if not problem.planned:
        return None
    return cut(forced_tile() or tile_of(problem), problem.tokens, problem.experts, problem.k, gpu.sms).fault
