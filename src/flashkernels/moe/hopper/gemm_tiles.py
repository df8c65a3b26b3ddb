"""How the Hopper kernel cuts a grouped GEMM: what it serves, and how many rows a tile may have."""

from __future__ import annotations

from dataclasses import dataclass

from flashkernels.hardware import Gpu
from flashkernels.moe.hopper.rounding import WIDEST
from flashkernels.moe.problem import GemmProblem
from flashkernels.tiling import TilingError

GRANULE = 8  # rows: a tile has a multiple of them
WEIGHT_ROWS, ROW_BYTES = 256, 128  # of a tile, and of a stage: 64 columns of 16 bits, or 128 of 8
MOST_EXPERTS = 512  # of which the shared memory holds a table
STAGED = 224 << 10  # bytes of all stages; what is left of 227 KB has barriers and that table
KINDS = ("none", "swiglu")
WIDE, SMALL = ("fp16", "bf16"), ("fp8", "int8")  # of both operands; with scales for whole rows
# Rows an expert, on average (H200, 2026-11-15, bf16; 8 bits have the same borders). With fewer the weights are the
# traffic: 64 were the fewest timed, in Qwen3's layer 360 us for 370.
LEAST = 64
FEW = 128  # up to here rows are gathered by the loads: at 64 208 us for 229, at 256 1461 for 813; between the two
SIZES = (96, 192)  # rows of a tile at most; half of it at least is the most that the device may choose


@dataclass(frozen=True)
class HopperGemmTile:
    """256 rows of the weights by at most so many rows of x, and how many stages are loaded ahead.

    >>> HopperGemmTile(rows=192, stages=4).name
    'hopper-192x256-s4'
    """

    rows: int
    stages: int
    fused: bool = False  # rows are gathered by the loads, not by a copy before
    cluster: int = 1  # blocks with neighbouring features that share their loads of rows

    def __post_init__(self) -> None:
        if self.rows not in SIZES:
            raise TilingError(f"rows={self.rows} is not one of {', '.join(map(str, SIZES))}")
        if self.stages < 2 or self.stages * stage_bytes(self.rows) > STAGED:
            raise TilingError(f"stages={self.stages} of {self.rows} rows are under 2, or over {STAGED} bytes")
        if self.cluster not in (1, 2):
            raise TilingError(f"cluster={self.cluster} is neither 1 nor 2")
        if self.fused and self.cluster > 1:
            raise TilingError(f"cluster={self.cluster} shares loads of boxes: fused=True loads row by row")

    @property
    def name(self) -> str:
        flags = (("fused", self.fused), (f"cluster{self.cluster}", self.cluster > 1))
        size = f"hopper-{self.rows}x{WEIGHT_ROWS}-s{self.stages}"
        return "-".join([size, *(word for word, flag in flags if flag)])


def stage_bytes(rows: int) -> int:
    """Of the weights and so many rows of x."""
    return (WEIGHT_ROWS + rows) * ROW_BYTES


def choose(problem: GemmProblem, forced: object = None) -> HopperGemmTile:
    """The tile that is forced, or the best of those measured on an H200 at 64, 256, 1024 and 4096 rows an expert
    (2026-11-15).

    Few rows: 96 and one stage more, gathered by the loads. Otherwise 192, the most that two consumers' registers have
    room for, in clusters, unless much of what the second block of the last one has would lie past the features. In 8
    bits clusters gain nothing: products are 0 to 2 % faster without.
    """
    if isinstance(forced, HopperGemmTile):
        return forced
    if problem.rows <= FEW * problem.experts:
        return HopperGemmTile(96, 5, fused=True)
    features = -(-problem.n // WEIGHT_ROWS)
    alone = problem.weights in SMALL or (features % 2 and features < 16)
    return HopperGemmTile(192, 4, cluster=1 if alone else 2)


def refuses(problem: GemmProblem, gpu: Gpu | None) -> str | None:
    """Why the Hopper kernel cannot serve, or None."""
    if problem.device != "cuda" or gpu is None:
        return f"needs a Hopper GPU, the tensors are on {problem.device}"
    if not gpu.has_wgmma:
        return f"needs compute capability 9.0, {gpu.name} has {gpu.capability[0]}.{gpu.capability[1]}"
    if problem.weights == "fp8_block":
        return "has no kernel for fp8_block: scales that change along the depth would need a second set of sums"
    small = problem.weights in SMALL
    if problem.dtype not in ((problem.weights,) if small else () if problem.weights else WIDE):
        return f"has no kernel for {problem.weights or problem.dtype}"
    if problem.out not in ("", *(WIDE if small else (problem.dtype,))):
        return f"writes {' and '.join(WIDE) if small else problem.dtype}, not {problem.out}"
    if problem.activation not in KINDS:
        return f"has no {problem.activation}"
    if problem.wide and (problem.wide not in WIDE or problem.depth > WIDEST or not problem.gather):
        return f"rounds gathered rows of fp16 and bf16, of {WIDEST} columns at most"
    if problem.experts > MOST_EXPERTS:
        return f"{problem.experts} experts are over {MOST_EXPERTS}"
    for name, size, step in (("depth", problem.depth, 16 if problem.weights else 8), ("width", problem.width, 8)):
        if size % step or size == 0:
            return f"{name}={size} is not a multiple of {step}: rows would not lie in steps of 16 bytes"
    return None if problem.addressable else "x or w does not lie in steps of 16 bytes: TMA cannot read it"


def rounds(problem: GemmProblem, forced: object = None) -> bool:
    """Whether rows are copied before the product: only then are they rounded on the way."""
    return problem.gather and not choose(problem, forced).fused


def defers(problem: GemmProblem, gpu: Gpu | None) -> str | None:
    """Why "auto" leaves a problem to Triton, or None."""
    mean = problem.rows / max(1, problem.experts)
    return f"{mean:.0f} rows an expert are under {LEAST}: weights are the traffic" if mean < LEAST else None


def reason(problem: GemmProblem, tile: HopperGemmTile) -> str:
    """Why this way, in words."""
    mean = problem.rows / max(1, problem.experts)
    words = f"{mean:.0f} rows an expert, cut evenly on the device: at most {tile.rows} a tile, in steps of {GRANULE}"
    if tile.cluster > 1:
        return words + ", loaded for two blocks"
    return words + (", gathered by the loads" if tile.fused and problem.gather else "")
