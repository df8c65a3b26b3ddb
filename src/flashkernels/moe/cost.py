"""The predicted time of a routing and of a layer: traffic, products in whole rounds of tiles, unpacking, and launches.

Tokens are taken to like all experts equally: how they do is on the device. Eager calls are not predicted, their time is
Python's. Fitted to the suites `route` and `layer` on an H200 (2026-11-15, commit 8a98538, CUDA graphs), least squares
of the logarithm of predicted over measured; for another GPU peak, bandwidth and number of multiprocessors scale it.
What is of the Hopper routing was fitted to its first run, the same day; docs/notes/moe.md says what a fit to one model
tells of the other.

`HOPPER` and `TILE`, of the Hopper products, were fitted likewise on the same GPU (2026-11-15 and 16): to 12 products in
bf16 and 12 in FP8, the suite's 6 layers in bf16 and 3 in FP8 of 1024 tokens and more, and 3 in FP8 whose copy rounds,
which docs/notes/moe.md has. The products are within 10 %, the layers within 7. INT8 was left out: its one layer, 4096
tokens of Mixtral, takes 10 % less than predicted. Without `TILE` Qwen3's second product in FP8, 6 stages deep, was
predicted 27 % short.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import NormalDist

from flashkernels.hardware import Gpu
from flashkernels.moe.hopper import gemm_tiles
from flashkernels.moe.hopper.gemm_tiles import GRANULE, WEIGHT_ROWS, HopperGemmTile
from flashkernels.moe.hopper.route_tiles import CLUSTER, own_experts, tile_of
from flashkernels.moe.problem import BYTES, FORMATS, PHASES, GemmProblem, LayerProblem, RouteProblem
from flashkernels.moe.triton.tiles import GemmTile, widens
from flashkernels.moe.weights import ROUNDED

MEASURED = ("", "fp8", "int8", "w4")  # formats of weights
SMALL, PARTS = 1024, 16  # items that one program places, and programs that choose them

BANDWIDTH = 0.92  # of the datasheet's
PRODUCTS = 0.61  # of the peak, by tiles that are full
HOPPER = {"bf16": 0.78, "fp16": 0.78, "fp8": 0.69, "int8": 0.69}  # likewise, by the stages of the Hopper kernel's
TILE = 2.2e-6  # seconds of a multiprocessor for what a tile of it has beside its stages: its start and its end
EXPOSED = 0.23  # share of the shorter one of traffic and arithmetic that the longer one does not hide
UNPACK = 14.5e-12  # seconds of a multiprocessor for a weight of 4 bits,
PAIRED = 11e-12  # and where its scales come in pairs (H200, 2026-11-17)
LAUNCH = 3.5e-6  # of each kernel of a layer: to start it, fill the machine and empty it
ROUTE = 2.1e-6  # of a routing's kernel, alone
CHOOSE = 66e-12  # seconds of a multiprocessor for a logit in each of k rounds, and two more for its power and key
RANK = 0.68e-9  # seconds of a multiprocessor for a logit's rank among those of its expert
# Of the routing on Hopper; its instructions are counted in the machine code.
ALONE = 1.85e-6  # of a launch of one block, with its first logits
FILLED = 1.2e-6  # more of one on all multiprocessors
ISSUED = 5.2e9  # instructions of warps, by a multiprocessor in a second
PLANNED = 1.2e-6  # sums over the warps of a block, and places from them
MEETING = 1.1e-6  # until all blocks of a whole grid have seen that all have arrived
L2_RATE = 5.5e12  # bytes a second
PLACED = 3.3e-9  # seconds of a multiprocessor for one item: two stores of 4 bytes, one of them anywhere


def route_seconds(problem: RouteProblem, gpu: Gpu) -> float:
    """On the GPU, of the choice and, where it is planned, the regrouping."""
    small = problem.tokens * problem.k <= SMALL
    logits = problem.tokens * problem.experts / (max(1, min(PARTS, problem.tokens)) if small else gpu.sms)
    seconds = ROUTE + CHOOSE * logits * (problem.k + 2)
    if not problem.planned:
        return seconds
    if small:  # the last program places all items, which takes it about as long as a launch
        return seconds + RANK * logits + ROUTE
    parts = 2 * gpu.sms  # each reads the counts of all
    return seconds + RANK * logits + parts * parts * problem.experts * 4 / (BANDWIDTH * gpu.bandwidth)


def hopper_route_seconds(problem: RouteProblem, gpu: Gpu) -> float:
    """The same, by the Hopper kernel: a launch, instructions, blocks that meet, and stores."""
    own = own_experts(problem.experts)
    sort = 5 * sum(own - 1 - i for i in range(min(own, problem.k)))
    instructions = 25 + 3 * own + sort + problem.k * (8 + own)
    blocks = max(1, min(problem.tokens, CLUSTER) if tile_of(problem).way == "cluster" else gpu.sms)
    share = blocks / gpu.sms
    tokens = problem.tokens / blocks
    seconds = ALONE + FILLED * share + tokens * instructions / ISSUED
    if not problem.planned:
        return seconds
    table = blocks * blocks * problem.experts * 2 / L2_RATE  # each block reads the counts of all
    return seconds + PLANNED + MEETING * share + table + tokens * problem.k * PLACED


ROUTES = {"hopper": hopper_route_seconds, "triton": route_seconds}  # by implementation


def layer_seconds(
    problem: LayerProblem, parts: Sequence[tuple[GemmProblem, GemmTile | HopperGemmTile]], gpu: Gpu,
    routing: str = "triton",
) -> float | None:  # fmt: skip
    """Of the routing by this implementation, the two products on their tiles, the passes between them and the sum;
    None where nothing like it was measured."""
    if problem.weights not in MEASURED or problem.dtype not in ("bf16", "fp16") or problem.compute not in gpu.peak:
        return None
    tokens, items = problem.tokens, problem.tokens * problem.k
    seconds = ROUTES[routing](RouteProblem(tokens, problem.experts, problem.k, problem.dtype, problem.device), gpu)
    kernels = 1  # the sum
    moved = 2.0 * tokens * problem.hidden  # by the passes
    for product, tile in parts:
        if isinstance(tile, HopperGemmTile):
            seconds += even_seconds(product, tile, gpu)
        else:
            seconds += product_seconds(product, tile, *spread(tokens, problem.k, problem.experts, tile.block_m), gpu)
        before, touched = passes(problem, product, tile, gpu)
        kernels, moved = kernels + 1 + before, moved + touched
    moved += items * problem.hidden * stored_bytes(parts[-1][1])
    return seconds + LAUNCH * kernels + moved / (BANDWIDTH * gpu.bandwidth)


def passes(problem: LayerProblem, product: GemmProblem, tile: GemmTile | HopperGemmTile, gpu: Gpu) -> tuple[int, float]:
    """Kernels that a product has before it, and the bytes that they move.

    Weights are unpacked first where that pays. Rows are rounded to 8 bits, and copied to their places; the Hopper
    kernel's copy rounds on its way, so that a token is read once and written k times.

    >>> from flashkernels.hardware import lookup
    >>> layer = LayerProblem(4096, 4096, 14336, 8, 2, "bf16", "cuda", "fp8")
    >>> product = GemmProblem(8192, 8, 28672, 4096, "fp8", "cuda", "fp8", "swiglu", gather=True, out="bf16")
    >>> passes(layer, product, HopperGemmTile(192, 4), lookup("h200")) == (1, 4096 * (2 * 4096 + 8192))
    True
    """
    items, depth = problem.tokens * problem.k, product.depth
    rows = problem.tokens if product.gather else items
    if isinstance(tile, HopperGemmTile):
        copied, wide = gemm_tiles.rounds(product, tile), replace(product, wide=problem.dtype)
        together = copied and product.weights in ROUNDED and gemm_tiles.refuses(wide, gpu) is None
    else:
        copied, together = tile.copied, False
    if together:
        return 1, (2 * rows + items) * depth
    kernels, moved = 0, 0.0
    if product.weights in ROUNDED:
        kernels, moved = kernels + 1, moved + 3 * rows * depth
    if copied:
        kernels, moved = kernels + 1, moved + 2 * items * depth * BYTES[product.dtype]
    if widens(product):
        words = FORMATS[product.weights] / 8 + 2
        kernels, moved = kernels + 1, moved + words * product.experts * product.n * depth
    return kernels, moved


def product_seconds(problem: GemmProblem, tile: GemmTile, used: float, row_tiles: float, gpu: Gpu) -> float:
    """Of one grouped GEMM with so many experts in use and tiles of rows."""
    widened = widens(problem)
    bits = 16 if widened else FORMATS.get(problem.weights, 8 * BYTES[problem.dtype])
    features = tile.block_n * problem.n // problem.width  # gate and up of a column
    tiles = row_tiles * -(-problem.width // tile.block_n) * tile.split
    rounds = math.ceil(round(tiles / gpu.sms, 6)) / tile.split
    busy = 2 * tile.block_m * features * problem.depth / (PRODUCTS * gpu.peak[problem.dtype] / gpu.sms)
    if problem.weights in PHASES and not widened:
        busy += (PAIRED if tile.paired else UNPACK) * features * problem.depth
    rows = problem.rows * (problem.depth * BYTES[problem.dtype] + problem.width * stored_bytes(tile))
    memory = (used * problem.n * problem.depth * bits / 8 + rows) / (BANDWIDTH * gpu.bandwidth)
    return max(rounds * busy, memory) + EXPOSED * min(rounds * busy, memory)


def even_seconds(problem: GemmProblem, tile: HopperGemmTile, gpu: Gpu) -> float:
    """Of one grouped GEMM by the Hopper kernel, whose tiles are even parts of an expert's rows. An expert's rows end
    in the middle of a granule on average."""
    rows = problem.rows / max(1, problem.experts) + GRANULE / 2
    of_expert = math.ceil(rows / tile.rows)
    rounds = math.ceil(problem.experts * of_expert * -(-problem.n // WEIGHT_ROWS) / gpu.sms)
    rate = HOPPER[problem.dtype] * gpu.peak[problem.dtype] / gpu.sms
    each = TILE + 2 * WEIGHT_ROWS * rows / of_expert * problem.depth / rate
    stored = problem.rows * problem.width * (stored_bytes(tile) - BYTES[problem.dtype])  # what has 8 bits gives 16
    memory = (problem.bytes() + stored) / (BANDWIDTH * gpu.bandwidth)
    return max(rounds * each, memory) + EXPOSED * min(rounds * each, memory)


def stored_bytes(tile: GemmTile | HopperGemmTile) -> int:
    """Of a number of the output; sums of parts are in fp32."""
    if isinstance(tile, HopperGemmTile):
        return 2
    return 4 * tile.split if tile.split > 1 else 2


def spread(tokens: int, k: int, experts: int, block: int) -> tuple[float, float]:
    """Experts that get any token, and tiles of `block` rows, on average. Rows of an expert are nearly normal.

    >>> spread(100, 4, 4, 32)  # every expert gets all of them
    (4.0, 16.0)
    """
    share = k / experts
    used = experts * (1 - (1 - share) ** tokens)
    rows = NormalDist(tokens * share, max(1e-6, math.sqrt(tokens * share * (1 - share))))
    more = sum(1 - rows.cdf(full + 0.5) for full in range(block, tokens, block))
    return used, used + experts * more
