"""Grouped GEMM: rows sorted by expert, each times the matrix of its expert."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashkernels.arguments import check_flag
from flashkernels.dispatch import Impl, UnsupportedError, check_impl, lacks_triton, leaves_the_cpu, select, serving
from flashkernels.fused.linear import lowered
from flashkernels.fused.rows import DTYPES, check_choice, check_number, gpu_of, nothing
from flashkernels.hardware import Gpu
from flashkernels.jit.eager import MOST_PLANS, Plans, Run, placed, unwatched
from flashkernels.moe import reference
from flashkernels.moe.hopper import gemm_tiles as hopper
from flashkernels.moe.hopper.gemm_tiles import HopperGemmTile
from flashkernels.moe.plan import Plan, plan_of
from flashkernels.moe.problem import ACTIVATIONS, FORMATS, GATED, PHASES, Epilogue, GemmProblem
from flashkernels.moe.rows import round_rows
from flashkernels.moe.triton.tiles import GemmTile
from flashkernels.moe.weights import (
    BLOCK,
    DTYPES as SMALL,
    GROUPS,
    ROUNDED,
    WORDS,
    Quantised,
    check_quantised,
    check_scale,
    dequantise,
)  # fmt: skip
from flashkernels.tiling import override

ALPHA, LIMIT = 1.702, 7.0  # of gpt-oss


def needs_rounding(problem: GemmProblem, gpu: Gpu | None) -> str | None:
    return f"multiplies x in 8 bits, not in {problem.wide}: round_rows makes them" if problem.wide else None


def needs_triton(problem: GemmProblem, gpu: Gpu | None) -> str | None:
    if reason := lacks_triton(problem.device, problem.dtype, gpu):
        return reason
    if reason := needs_rounding(problem, gpu):
        return reason
    if problem.weights.startswith("fp8") and gpu is not None and not gpu.has_fp8:
        return f"FP8 needs compute capability 8.9, {gpu.name} has {gpu.capability[0]}.{gpu.capability[1]}"
    return None


# Best first. "auto" takes the first row that does not reject the problem. `torch` is in this file.
IMPLS = (
    Impl("hopper", "flashkernels.moe.hopper.gemm", rejects=hopper.refuses, defers=hopper.defers),
    Impl("triton", "flashkernels.moe.triton.gemm", rejects=needs_triton, defers=leaves_the_cpu),
    Impl("torch", "flashkernels.moe.gemm", rejects=needs_rounding),
)
BACKWARD = (
    Impl("triton", "flashkernels.moe.triton.backward", rejects=needs_triton, defers=leaves_the_cpu),
    Impl("torch", "flashkernels.moe.gemm"),
)
Tile = GemmTile | HopperGemmTile
NAMES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


class Gemm(NamedTuple):
    """What a grouped GEMM asks for, beside its tensors."""

    gather: bool
    activation: str
    interleaved: bool
    alpha: float
    limit: float
    weights: str  # format of quantised ones
    group: int
    depth: int
    block: int
    out: str
    splittable: bool  # the caller adds up sums over parts of the depth
    impl: str
    tile: Tile | None = None  # the one that `use_tile` gives

    @property
    def epilogue(self) -> Epilogue:
        return Epilogue(self.activation, self.interleaved, self.alpha, self.limit)

    @property
    def out_dtype(self) -> torch.dtype:
        return NAMES[self.out]

    @property
    def wanted(self) -> str:
        """The name of the implementation that must serve, or "auto": a tile belongs to one."""
        if self.impl != "auto" or self.tile is None:
            return self.impl
        return "hopper" if isinstance(self.tile, HopperGemmTile) else "triton"


def forced_tile() -> Tile | None:
    """The tile of a grouped GEMM that `use_tile` has put in force."""
    forced = override()
    return forced if isinstance(forced, (GemmTile, HopperGemmTile)) else None


def grouped_gemm(
    x: Tensor, w: Tensor | Quantised, plan: Plan, *, gather: bool = True, bias: Tensor | None = None,
    activation: str = "none", interleaved: bool = False, alpha: float = ALPHA, limit: float = LIMIT,
    row_weights: Tensor | None = None, x_scale: Tensor | None = None, out_dtype: torch.dtype | None = None,
    impl: str = "auto",
) -> Tensor:  # fmt: skip
    """`out[p] = f(x[p] @ w[e].T + bias[e]) * row_weight`, p a place of the plan and e its expert; sums in fp32.

    Args:
        x: (T, K) tokens, gathered to their places while they are loaded; with `gather=False` (R, K), sorted already.
            fp16, bf16, fp32 (fp64 on the `torch` implementation); with weights in "fp8", "fp8_block" or "int8" it is
            rounded to 8 bits first, unless it is in 8 bits already and comes with `x_scale`.
        w: (E, N, K), the orientation of torch's Linear, or `fk.moe.quantise` of such.
        plan: of `route`, `regroup` or `presorted`. R is its number of places, T * k.
        bias: (E, N), or None.
        activation: "none", "relu2", or a gated one, which takes N = 2 I to I columns: "swiglu", "geglu", "relu2_glu",
            "clamped_swiglu" (gpt-oss: `(clamp(up) + 1) * gate * sigmoid(alpha * gate)`, clamped at `limit`). The gate's
            rows come first in w; with `interleaved=True` gate and up alternate.
        row_weights: (T, k), such as the routing's, or None.
        x_scale: fp32, as `round_rows` makes it: (rows of x,), or (rows, ⌈K/128⌉) with weights in "fp8_block".
        out_dtype: of the output; by default x's, or bf16 where x has 8 bits.
        impl: "auto", or the name of the one implementation that must serve.

    Returns:
        (R, N), or (R, I). Rows past the plan's last place are not written. Gradients flow to x, w and bias where there
        is no activation and no quantisation.

    >>> import torch, flashkernels as fk
    >>> plan = fk.moe.route(torch.randn(5, 4), 2).plan
    >>> fk.moe.grouped_gemm(torch.randn(5, 16), torch.randn(4, 24, 16), plan, activation="swiglu").shape
    torch.Size([10, 12])
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a torch.Tensor, got {type(x).__name__}")
    x, w = lowered(x, w)
    call = _call(x, w, plan, gather, activation, interleaved, alpha, limit, out_dtype, impl)
    return product(x, w, plan, bias, row_weights, x_scale, call)


def product(
    x: Tensor, w: Tensor | Quantised, plan: Plan, bias: Tensor | None, row_weights: Tensor | None,
    x_scale: Tensor | None, call: Gemm,
) -> Tensor:  # fmt: skip
    """A grouped GEMM; (parts of the depth, R, N) fp32 where it may be split, and is."""
    if call.weights in ROUNDED and x_scale is None:
        impl = "auto" if call.impl == "hopper" else call.impl  # which does not round all
        x, x_scale = round_rows(x, call.weights, impl=impl)
    data, scale = (w.data, w.scale) if isinstance(w, Quantised) else (w, None)
    tensors = (x, data, bias, row_weights, x_scale, scale, *plan[:6])
    if unwatched(tensors[:6]):  # nothing follows a plan's integers alone
        return forward(tensors, call._replace(tile=forced_tile()))
    _check(tensors, call)  # the same errors as eager
    return gemm_op(*tensors, *call._replace(splittable=False)[:-1])


def _call(
    x: Tensor, w: Tensor | Quantised, plan: Plan, gather: bool, activation: str, interleaved: bool, alpha: float,
    limit: float, out_dtype: torch.dtype | None, impl: str,
) -> Gemm:  # fmt: skip
    check_choice("activation", activation, ACTIVATIONS)
    if not isinstance(plan, Plan):
        raise TypeError(f"plan must be a flashkernels.moe.Plan, got {type(plan).__name__}")
    if x.dim() != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}; expected (rows, k)")
    weights, group, depth = ("", 0, x.shape[1])
    if isinstance(w, Quantised):
        if len(w.shape) != 3:
            check_quantised("w", w)  # which says so; all else `_check` asks, of each kind of call once
        weights, group, depth = w.format, w.group, w.shape[2]
    small = weights in ROUNDED and x.dtype not in DTYPES
    if not small and x.dtype not in DTYPES:
        raise TypeError(f"x.dtype={x.dtype} is not one of {', '.join(map(str, DTYPES))}")
    dtype = out_dtype or (torch.bfloat16 if small else x.dtype)
    if dtype not in DTYPES:
        raise TypeError(f"out_dtype={dtype} is not one of {', '.join(map(str, DTYPES))}")
    out = DTYPES[dtype]
    return Gemm(gather, activation, interleaved, alpha, limit, weights, group, depth, plan.block, out, False, impl)


def _check(tensors: tuple[Any, ...], call: Gemm) -> None:
    x, w, bias, row_weights, x_scale, w_scale, counts, _, permutation, inverse = tensors[:10]
    experts, rows, k = counts.shape[0], permutation.shape[0], inverse.shape[1]
    if not isinstance(w, Tensor) or w.dim() != 3 or w.shape[0] != experts:
        shape = tuple(getattr(w, "shape", ()))
        raise ValueError(f"w has shape {shape}; expected ({experts}, n, k), one matrix for each expert of the plan")
    if x.dim() != 2 or x.shape[1] != call.depth:
        raise ValueError(f"x has shape {tuple(x.shape)}; expected (rows, {call.depth}), the depth of w")
    if not call.weights and w.shape[2] != x.shape[1]:
        raise ValueError(f"w has shape {tuple(w.shape)}; its last size differs from x's, {x.shape[1]}")
    want = rows // k if call.gather else rows
    if x.shape[0] != want:
        raise ValueError(f"x has {x.shape[0]} rows; the plan has {want} {'tokens' if call.gather else 'places'}")
    if not call.weights and (x.dtype not in DTYPES or w.dtype != x.dtype):
        allowed = ", ".join(map(str, DTYPES))
        raise TypeError(f"x.dtype={x.dtype} and w.dtype={w.dtype}: expected the same one of {allowed}")
    for name, y in (("bias", bias), ("row_weights", row_weights), ("x_scale", x_scale)):
        if y is not None and not isinstance(y, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor or None, got {type(y).__name__}")
        if y is not None and y.dtype not in DTYPES:
            raise TypeError(f"{name}.dtype={y.dtype} is not one of {', '.join(map(str, DTYPES))}")
    check_flag("gather", call.gather)
    check_flag("interleaved", call.interleaved)
    check_impl(call.impl, IMPLS)
    _check_scale(x, x_scale, call)
    if call.weights:
        _check_weights(w, w_scale, call)
    if call.activation in GATED and w.shape[1] % 2:
        raise ValueError(f"w has shape {tuple(w.shape)}; activation={call.activation!r} needs an even n, gate and up")
    check_number("alpha", call.alpha)
    check_number("limit", call.limit)
    if bias is not None and bias.shape != w.shape[:2]:
        raise ValueError(f"bias has shape {tuple(bias.shape)}; expected {tuple(w.shape[:2])}")
    if row_weights is not None and row_weights.shape != inverse.shape:
        raise ValueError(f"row_weights has shape {tuple(row_weights.shape)}; expected {tuple(inverse.shape)}")
    others = (("w", w), ("bias", bias), ("row_weights", row_weights), ("x_scale", x_scale), ("plan", counts))
    for name, y in others:
        if y is not None and y.device != x.device:
            raise ValueError(f"{name}.device={y.device} differs from x.device={x.device}")


def _check_scale(x: Tensor, x_scale: Tensor | None, call: Gemm) -> None:
    """That x_scale is there where x has 8 bits, and only there, and fits it and the format of the weights."""
    wide = _is_wide(x, call)
    if wide and x_scale is not None:
        raise ValueError(f"x_scale goes with x in 8 bits, but x.dtype={x.dtype}: leave one away, or round x")
    if (x_scale is None) == (call.weights in ROUNDED) and not wide:
        raise ValueError(f"x_scale goes with x in 8 bits, for weights in {', '.join(ROUNDED)}, and only with it")
    if x_scale is None:
        return
    if x.dtype != SMALL[call.weights]:
        raise TypeError(f"x.dtype={x.dtype}: weights in {call.weights!r} are multiplied by {SMALL[call.weights]}")
    want = (x.shape[0], -(-call.depth // BLOCK)) if call.weights == "fp8_block" else (x.shape[0],)
    if x_scale.shape != want:
        raise ValueError(f"x_scale has shape {tuple(x_scale.shape)}; expected {want} with weights in {call.weights!r}")
    if x_scale.dtype != torch.float32:
        raise TypeError(f"x_scale.dtype={x_scale.dtype} is not torch.float32")


def _check_weights(w: Tensor, scale: Tensor, call: Gemm) -> None:
    """That quantised weights and their scales have the shapes and types of their format."""
    n, form = w.shape[1], call.weights
    check_choice("w.format", form, tuple(FORMATS))
    columns = call.depth
    scales: tuple[int, ...] = (w.shape[0], n)
    if form in PHASES:
        check_choice("w.group", call.group, GROUPS)
        columns, scales = -(-call.depth // (WORDS * PHASES[form])) * WORDS, (*scales, -(-call.depth // call.group))
    elif form == "fp8_block":
        scales = (w.shape[0], -(-n // BLOCK), -(-call.depth // BLOCK))
    dtype = SMALL.get(form, torch.int16)
    if w.shape[2] != columns or w.dtype != dtype:
        about = f"expected {(w.shape[0], n, columns)} of {dtype}"
        raise ValueError(f"w.data has shape {tuple(w.shape)} of {w.dtype}; {about} for w.format={form!r}")
    check_scale("w", scale)
    if scale.shape != scales:
        raise ValueError(f"w.scale has shape {tuple(scale.shape)}; expected {scales} for w.format={form!r}")
    if scale.device != w.device:
        raise ValueError(f"w.scale.device={scale.device} differs from w.data.device={w.device}")


def gemm_problem(tensors: tuple[Any, ...], call: Gemm) -> GemmProblem:
    x, w = tensors[:2]
    small = {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}
    dtype = small.get(x.dtype) or DTYPES[x.dtype]
    wide = dtype if _is_wide(x, call) else ""
    if wide:
        dtype = "int8" if call.weights == "int8" else "fp8"
    return GemmProblem(
        tensors[8].shape[0], w.shape[0], w.shape[1], call.depth, dtype, x.device.type, call.weights, call.activation,
        call.gather, call.block, call.group, "" if call.out == dtype else call.out, _addressable(x) and _addressable(w),
        wide,
    )  # fmt: skip


def _is_wide(x: Tensor, call: Gemm) -> bool:
    """Whether x is still to be rounded."""
    return call.weights in ROUNDED and x.dtype in DTYPES


def rounds_itself(problem: GemmProblem, gpu: Gpu | None, call: Gemm) -> bool:
    """Whether what serves takes x as it is, and rounds rows on the way to their places."""
    if call.wanted not in ("auto", "hopper") or not hopper.rounds(problem, call.tile):
        return False
    try:
        return select(IMPLS, problem, gpu).name == "hopper"
    except UnsupportedError:
        return False


def _addressable(x: Tensor) -> bool:
    """Whether TMA can read x: contiguous rows, steps of 16 bytes."""
    aligned = x.data_ptr() % 16 == 0 and all(step * x.element_size() % 16 == 0 for step in x.stride()[:-1])
    return x.stride(-1) == 1 and aligned


def _plan(tensors: tuple[Any, ...], call: Any) -> Run:
    _check(tensors, call)
    problem, gpu = gemm_problem(tensors, call), gpu_of(tensors[0])
    return serving(IMPLS, problem, gpu, call.wanted).gemm_plan(problem, gpu, tensors, call)


def _plan_backward(tensors: tuple[Any, ...], call: Any) -> Run:
    _, x, w, *rest = tensors
    described = gemm_problem((x, w, None, None, None, None, *rest), call.gemm)
    gpu = gpu_of(x)
    impl = "triton" if call.gemm.impl == "hopper" else call.gemm.impl  # which has no gradients of its own
    return serving(BACKWARD, described, gpu, impl).backward_plan(described, gpu, tensors, call)


class Prepared:
    """As `Plans`, by a shorter key: of a plan's six tensors only the sizes differ from call to call, and alignment."""

    def __init__(self) -> None:
        self.known: dict[Any, Run] = {}

    def __call__(self, tensors: tuple[Any, ...], call: Gemm) -> Tensor:
        found: Tensor = self.find(tensors, call)(*tensors)
        return found

    def find(self, tensors: tuple[Any, ...], call: Gemm) -> Run:
        places = 0
        for x in tensors[6:]:
            places |= x.data_ptr()
        wide = tuple(
            [None if x is None else (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16) for x in tensors[:6]]
        )
        kind = (wide, tensors[6].shape, tensors[9].shape, tensors[6].device, places % 16)
        key = (*kind, call, *map(type, call))  # 1, 1.0 and True are equal, but not equally valid
        try:
            run = self.known.get(key)
        except TypeError:  # a setting without a hash: the checks say which
            return _plan(tensors, call)
        if run is None:
            if len(self.known) >= MOST_PLANS:
                self.known.clear()
            run = self.known[key] = _plan(tensors, call)
        return placed(run, tensors[0].device.index)


forward, _backward = Prepared(), Plans(_plan_backward)


# --- the `torch` implementation


def gemm_plan(problem: GemmProblem, gpu: Gpu | None, tensors: tuple[Any, ...], call: Gemm) -> Run:
    def run(
        x: Tensor, w: Tensor, bias: Tensor | None, row_weights: Tensor | None, x_scale: Tensor | None,
        w_scale: Tensor | None, *plan_tensors: Tensor,
    ) -> Tensor:  # fmt: skip
        plan = plan_of(plan_tensors, call.block)
        if w_scale is not None:
            shape = (problem.experts, problem.n, problem.depth)
            w = dequantise(Quantised(w, w_scale, call.weights, shape, call.group))
        if x_scale is not None:
            scale = x_scale[:, None] if x_scale.dim() == 1 else x_scale.repeat_interleave(128, 1)[:, : call.depth]
            x = x.float() * scale
        out = reference.grouped_gemm(x, w, bias, row_weights, plan, call.gather, call.epilogue)
        return out.to(call.out_dtype)

    return run


def backward_plan(problem: GemmProblem, gpu: Gpu | None, tensors: tuple[Any, ...], call: GemmBackward) -> Run:
    def run(grad: Tensor, x: Tensor, w: Tensor, *plan_tensors: Tensor) -> tuple[Tensor, Tensor]:
        plan = plan_of(plan_tensors, call.gemm.block)
        dx, dw = nothing(x), nothing(w)
        grad = grad.to(reference.wide(x).dtype)
        if call.need_x:
            dx = reference.multiply(grad, w.mT, plan, gather=False)
            dx = (reference.combine(dx, None, plan.inverse) if call.gemm.gather else dx).to(x.dtype)
        if call.need_w:
            dw = reference.weight_gradient(grad, x, plan, call.gemm.gather).to(w.dtype)
        return dx, dw

    return run


# --- the registered ops: schema, fake and autograd, for torch.compile, torch.export and training


@torch.library.custom_op("flashkernels::moe_gemm", mutates_args=())
def gemm_op(
    x: Tensor, w: Tensor, bias: Tensor | None, row_weights: Tensor | None, x_scale: Tensor | None,
    w_scale: Tensor | None, counts: Tensor, offsets: Tensor, permutation: Tensor, inverse: Tensor, tiles: Tensor,
    tile_offsets: Tensor, gather: bool, activation: str, interleaved: bool, alpha: float, limit: float, weights: str,
    group: int, depth: int, block: int, out: str, splittable: bool, impl: str,
) -> Tensor:  # fmt: skip
    tensors = (x, w, bias, row_weights, x_scale, w_scale, counts, offsets, permutation, inverse, tiles, tile_offsets)
    call = Gemm(
        gather, activation, interleaved, alpha, limit, weights, group, depth, block, out, splittable, impl,
        forced_tile(),
    )  # fmt: skip
    return forward(tensors, call)


@gemm_op.register_fake
def _fake(
    x: Tensor, w: Tensor, bias: Tensor | None, row_weights: Tensor | None, x_scale: Tensor | None,
    w_scale: Tensor | None, counts: Tensor, offsets: Tensor, permutation: Tensor, inverse: Tensor, tiles: Tensor,
    tile_offsets: Tensor, gather: bool, activation: str, interleaved: bool, alpha: float, limit: float, weights: str,
    group: int, depth: int, block: int, out: str, splittable: bool, impl: str,
) -> Tensor:  # fmt: skip
    width = w.shape[1] // 2 if activation in GATED else w.shape[1]
    return x.new_empty((permutation.shape[0], width), dtype=NAMES[out])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, bias, row_weights, *_ = inputs
    ctx.call = Gemm(*inputs[12:])
    if ctx.call.weights or ctx.call.activation != "none" or row_weights is not None:
        what = f"weights in {ctx.call.weights!r}" if ctx.call.weights else f"activation={ctx.call.activation!r}"
        what = what if ctx.call.activation != "none" or ctx.call.weights else "row_weights"
        raise UnsupportedError(f"a grouped GEMM with {what} has no gradients: call it under torch.no_grad()")
    ctx.bias = None if bias is None else bias.dtype
    ctx.save_for_backward(x, w, *inputs[6:12])


def _gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, w, *plan_tensors = ctx.saved_tensors
    need_x, need_w, need_bias = ctx.needs_input_grad[:3]
    dx, dw = gemm_backward_op(grad, x, w, *plan_tensors, *ctx.call[:-1], need_x, need_w)
    dbias = None
    if ctx.bias is not None and need_bias:
        dbias = _bias_gradient(reference.wide(grad), plan_tensors[1]).to(ctx.bias)
    return (dx if need_x else None, dw if need_w else None, dbias, *(None,) * 21)


def _bias_gradient(grad: Tensor, offsets: Tensor) -> Tensor:
    """Sums of each expert's places, which begin at its offset: rows of others and past the last have no part in it."""
    if grad.numel() == 0:
        return grad.new_zeros(offsets.shape[0] - 1, grad.shape[1])
    return torch.segment_reduce(grad, "sum", offsets=offsets, axis=0, initial=0.0)


gemm_op.register_autograd(_gradients, setup_context=_setup)


class GemmBackward(NamedTuple):
    """What the gradients of a call depend on, beside its tensors."""

    gemm: Gemm
    need_x: bool
    need_w: bool


@torch.library.custom_op("flashkernels::moe_gemm_backward", mutates_args=())
def gemm_backward_op(
    grad: Tensor, x: Tensor, w: Tensor, counts: Tensor, offsets: Tensor, permutation: Tensor, inverse: Tensor,
    tiles: Tensor, tile_offsets: Tensor, gather: bool, activation: str, interleaved: bool, alpha: float, limit: float,
    weights: str, group: int, depth: int, block: int, out: str, splittable: bool, impl: str, need_x: bool, need_w: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of x and w."""
    tensors = (grad, x, w, counts, offsets, permutation, inverse, tiles, tile_offsets)
    call = Gemm(
        gather, activation, interleaved, alpha, limit, weights, group, depth, block, out, splittable, impl
    )  # fmt: skip
    return _backward(tensors, GemmBackward(call, need_x, need_w))


@gemm_backward_op.register_fake
def _fake_backward(
    grad: Tensor, x: Tensor, w: Tensor, counts: Tensor, offsets: Tensor, permutation: Tensor, inverse: Tensor,
    tiles: Tensor, tile_offsets: Tensor, gather: bool, activation: str, interleaved: bool, alpha: float, limit: float,
    weights: str, group: int, depth: int, block: int, out: str, splittable: bool, impl: str, need_x: bool, need_w: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return x.new_empty(x.shape if need_x else 0), w.new_empty(w.shape if need_w else 0)
