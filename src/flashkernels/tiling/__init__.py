"""Tiles and how they are chosen: values from a pure search over hardware limits, never autotuning."""

from flashkernels.tiling.choose import Candidate, Choice, best_of, cheapest
from flashkernels.tiling.limits import Footprint, footprint
from flashkernels.tiling.tile import STRATEGIES, Tile, TilingError, decomposed, override, padded, use_tile, waste

__all__ = [
    "STRATEGIES", "Candidate", "Choice", "Footprint", "Tile", "TilingError", "best_of", "cheapest", "decomposed",
    "footprint", "override", "padded", "use_tile", "waste",
]  # fmt: skip
