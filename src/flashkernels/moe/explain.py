"""Says which implementation serves a layer, how its parts are cut, why, and what the hardware would allow."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flashkernels import hardware
from flashkernels.arguments import check_count
from flashkernels.dispatch import Verdict, select, verdicts
from flashkernels.fused.rows import DTYPES, check_choice
from flashkernels.hardware import Gpu
from flashkernels.moe import cost, gemm, route
from flashkernels.moe.hopper import gemm_tiles as hopper
from flashkernels.moe.plan import MOST_EXPERTS, MOST_K, block_rows
from flashkernels.moe.problem import ACTIVATIONS, FORMATS, GATED, GemmProblem, LayerProblem, RouteProblem
from flashkernels.moe.triton import tiles
from flashkernels.moe.weights import ROUNDED


@dataclass(frozen=True)
class Part:
    """One of the two products: its tile where a kernel of ours serves, and why this one."""

    name: str
    problem: GemmProblem
    impl: str
    tile: gemm.Tile | None
    reason: str

    def __str__(self) -> str:
        tile = f", tile {self.tile.name} ({self.reason})" if self.tile else ""
        return f"{self.name}: {self.problem.n} x {self.problem.depth}, {self.impl}{tile}"


@dataclass(frozen=True)
class Explanation:
    """Everything that decides one layer. `print` it, or read the fields."""

    problem: LayerProblem
    gpu: Gpu | None
    verdicts: list[Verdict]  # on the routing
    routing: str  # the implementation that serves it
    launches: int
    parts: tuple[Part, Part]

    @property
    def floor(self) -> float | None:
        """The roofline: no kernel is faster than this many seconds on this GPU."""
        if self.gpu is None or self.problem.compute not in self.gpu.peak:
            return None
        compute = self.problem.flops() / self.gpu.peak[self.problem.compute]
        return max(compute, self.problem.bytes() / self.gpu.bandwidth)

    @property
    def predicted(self) -> float | None:
        """Seconds of the layer in a CUDA graph, by the cost model; None where nothing like it was measured."""
        cut = [(part.problem, part.tile) for part in self.parts if part.tile]
        if self.gpu is None or len(cut) < 2 or self.routing not in cost.ROUTES:
            return None
        return cost.layer_seconds(self.problem, cut, self.gpu, self.routing)

    @property
    def route_predicted(self) -> float | None:
        """Seconds of the routing alone, likewise."""
        p, seconds = self.problem, cost.ROUTES.get(self.routing)
        if self.gpu is None or seconds is None:
            return None
        return seconds(RouteProblem(p.tokens, p.experts, p.k, p.dtype, p.device), self.gpu)

    def __str__(self) -> str:
        lines = [f"{self.problem}"]
        lines += [f"  {v.name}: {'serves' if v.reason is None else v.reason}" for v in self.verdicts]
        alone = f", predicted {self.route_predicted * 1e6:.1f} µs" if self.route_predicted else ""
        lines.append(f"route: {self.routing}, {self.launches} launch{'es' if self.launches > 1 else ''}{alone}")
        lines += map(str, self.parts)
        if self.floor is not None and self.gpu is not None:
            memory = self.problem.bytes() / self.gpu.bandwidth
            bound = "memory" if memory >= self.floor else "compute"
            lines.append(f"roofline: {self.floor * 1e6:.1f} µs on {self.gpu.name}, {bound}-bound")
            if self.predicted:
                rate, share = self.problem.flops() / self.predicted / 1e12, self.floor / self.predicted
                words = f"{rate:.0f} TFLOPS, {share:.0%} of the roofline"
                lines.append(f"predicted: {self.predicted * 1e6:.1f} µs, {words}")
        return "\n".join(lines)


def explain(
    tokens: int, hidden: int, inner: int, experts: int, k: int, *, dtype: str = "bf16", weights: str = "",
    activation: str = "swiglu", gpu: str | Gpu | None = None, impl: str = "auto",
) -> Explanation:  # fmt: skip
    """How `layer` would serve so many tokens.

    Args:
        dtype: "bf16", "fp16" or "fp32"; weights: "" or a format of `quantise`.
        gpu: the name of a GPU, present or not, or None for the one that is here (if any).
        impl: "auto", or the name of the one implementation that must serve routing and products.

    >>> import flashkernels as fk
    >>> print(fk.moe.explain(64, 4096, 14336, 8, 2, gpu="h200"))  # doctest: +ELLIPSIS
    LayerProblem(tokens=64, ...
      hopper: serves
      triton: serves
      torch: serves
    route: hopper, 1 launch, predicted 3.3 µs
    gate and up: 28672 x 4096, triton, tile decode-32x64x... (16.0 rows an expert: weights are the traffic, ...
    down: 4096 x 14336, triton, tile decode-32x64x... rows are the narrow side (32))
    roofline: 587... µs on NVIDIA H200, memory-bound
    predicted: 69... µs, 65 TFLOPS, 85% of the roofline
    """
    check_count("tokens", tokens)
    for name, size in (("hidden", hidden), ("inner", inner), ("experts", experts), ("k", k)):
        check_count(name, size, 1)
    if experts > MOST_EXPERTS or k > min(MOST_K, experts):
        most = f"at most {MOST_EXPERTS} experts, and k at most {MOST_K} of them"
        raise ValueError(f"experts={experts} with k={k}: allowed are {most}")
    check_choice("dtype", dtype, tuple(DTYPES.values()))
    check_choice("weights", weights, ("", *FORMATS))
    check_choice("activation", activation, ACTIVATIONS)
    chip = hardware.lookup(gpu) if isinstance(gpu, str) else gpu or hardware.detect()
    device = "cpu" if chip is None else "cuda"
    problem = LayerProblem(tokens, hidden, inner, experts, k, dtype, device, weights)
    multiplied = problem.compute if weights in ROUNDED else dtype
    group = 128 if weights in ("w8", "w4") else 0
    block = block_rows(tokens * k, experts)
    halves = 2 if activation in GATED else 1
    shapes = (("gate and up", halves * inner, hidden, activation, True), ("down", hidden, inner, "none", False))
    parts = []
    for name, n, depth, kind, gathers in shapes:
        one = GemmProblem(
            tokens * k, experts, n, depth, multiplied, device, weights, kind, gathers, block, group,
            "" if multiplied == dtype else dtype,
        )  # fmt: skip
        serves = select(gemm.IMPLS, one, chip, impl).name
        parts.append(Part(name, one, serves, *_tile(one, chip, serves, not gathers)))
    wanted = RouteProblem(tokens, experts, k, dtype, device)
    answers, routing = verdicts(route.IMPLS, wanted, chip), select(route.IMPLS, wanted, chip, impl).name
    alone = tokens * k <= 1024 or routing == "hopper"
    return Explanation(problem, chip, answers, routing, 1 if alone else 2, (parts[0], parts[1]))


def _tile(problem: GemmProblem, gpu: Gpu | None, impl: str, splittable: bool) -> tuple[gemm.Tile | None, str]:
    """How the implementation that serves a product cuts it, and why so."""
    if impl == "hopper":
        chosen = hopper.choose(problem)
        return chosen, hopper.reason(problem, chosen)
    if gpu is None or impl != "triton":
        return None, ""
    first = tiles.widens(problem)
    product = replace(problem, weights="", group=0) if first else problem
    tile = tiles.choose(product, gpu, True, splittable)
    return tile, tiles.reason(product, tile) + (", weights are unpacked first" if first else "")
