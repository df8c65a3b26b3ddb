"""What an op must compute and move: ours from their `Problem`, torch's by formula from the recorded shapes.

Bytes are the least traffic: each operand read once, each result written once. FLOPs of a product count a multiplication
and an addition each; of row-wise and elementwise ops they are the arithmetic in the definition, an exponential as one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from flashkernels.attention.problem import visible_pairs
from flashkernels.profiling.trace import Op

# As the profiler spells the types of elements: our name, bytes.
TYPES = {
    "float": ("fp32", 4), "double": ("fp64", 8), "c10::Half": ("fp16", 2), "c10::BFloat16": ("bf16", 2),
    "c10::Float8_e4m3fn": ("fp8", 1), "c10::Float8_e5m2": ("fp8", 1), "signed char": ("int8", 1),
    "unsigned char": ("uint8", 1), "bool": ("bool", 1), "int": ("int32", 4), "long": ("int64", 8),
    "long int": ("int64", 8), "short": ("int16", 2), "short int": ("int16", 2),
    "c10::complex<float>": ("complex64", 8), "c10::complex<double>": ("complex128", 16),
}  # fmt: skip
# Of an element: mean, variance, scaling and affine; maximum, difference, exp, sum and division.
NORM_FLOPS, SOFTMAX_FLOPS = 8, 5


@dataclass(frozen=True)
class Cost:
    """FLOPs, and bytes of memory traffic, in the number format that the multiplications take."""

    flops: float
    bytes: float
    dtype: str  # a key of `Gpu.peak` where products dominate

    def __mul__(self, share: float) -> Cost:
        return Cost(self.flops * share, self.bytes * share, self.dtype)

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes, self.dtype)


def cost_of(op: Op) -> Cost | None:
    """The cost of one call, or None where there is no formula or the shapes were not recorded.

    >>> op = Op("aten::mm", 0, 1, dims=([4, 8], [8, 2]), types=("c10::Half", "c10::Half"))
    >>> cost_of(op)
    Cost(flops=128, bytes=112, dtype='fp16')
    """
    formula = FORMULAS.get(op.name)
    if formula is None and op.name.startswith("flashkernels::"):
        formula = ours
    if formula is None or not op.dims:
        return None
    try:
        return formula(op)
    except (IndexError, KeyError, TypeError, ValueError):
        return None  # an argument that is no tensor, or a shape that the op takes in another way


def is_ours(op: Op) -> bool:
    return op.name.startswith("flashkernels::")


def is_product(op: Op) -> bool:
    """Whether this is a matrix product of torch's."""
    return op.name in PRODUCTS


def is_elementwise(op: Op) -> bool:
    return op.name in ELEMENTWISE_NAMES


# --- tensors of a call


def _count(op: Op, i: int) -> int:
    return math.prod(op.dims[i])


def _size(op: Op, i: int) -> int:
    return TYPES[op.types[i]][1]


def _dtype(op: Op, i: int = 0) -> str:
    return TYPES[op.types[i]][0]


def _tensors(op: Op) -> list[int]:
    """Which arguments are tensors."""
    return [i for i, kind in enumerate(op.types) if kind in TYPES and i < len(op.dims)]


def _numbers(text: str) -> list[int]:
    """A recorded list of integers: "[1, 1]"."""
    return [int(x) for x in text.strip("[]").split(",") if x.strip()]


# --- products


def _product(a: int) -> Callable[[Op], Cost]:
    """Of (..., m, k) at argument `a` and (..., k, n) after it; a bias before them is read too."""

    def formula(op: Op) -> Cost:
        left, right = op.dims[a], op.dims[a + 1]
        m, k, n = left[-2], left[-1], right[-1]
        if right[-2] != k:
            raise ValueError(f"{op.name} of {left} and {right}")
        batch = math.prod(left[:-2])
        moved = _count(op, a) * _size(op, a) + _count(op, a + 1) * _size(op, a + 1) + batch * m * n * _size(op, a)
        moved += sum(_count(op, i) * _size(op, i) for i in range(a))
        return Cost(2 * batch * m * k * n, moved, _dtype(op, a))

    return formula


def _linear(op: Op) -> Cost:
    """Of x (..., k) and a weight (n, k)."""
    rows, k, n = math.prod(op.dims[0][:-1]), op.dims[0][-1], op.dims[1][0]
    moved = sum(_count(op, i) * _size(op, i) for i in _tensors(op)) + rows * n * _size(op, 0)
    return Cost(2 * rows * k * n, moved, _dtype(op))


def _convolution(op: Op) -> Cost:
    """aten::convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)."""
    (batch, cin, *size), weight = op.dims[0], op.dims[1]
    stride, padding, dilation, extra = (_numbers(op.values[i]) for i in (3, 4, 5, 7))
    transposed, groups, kernel = op.values[6] == "True", int(op.values[8]), weight[2:]
    reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    if transposed:
        out = [
            (s - 1) * t - 2 * p + r + e + 1 for s, t, p, r, e in zip(size, stride, padding, reach, extra, strict=True)
        ]
        cout, pairs = weight[1] * groups, batch * cin * math.prod(size) * weight[1]
    else:
        out = [(s + 2 * p - r - 1) // t + 1 for s, t, p, r in zip(size, stride, padding, reach, strict=True)]
        cout, pairs = weight[0], batch * weight[0] * math.prod(out) * weight[1]
    moved = (_count(op, 0) + _count(op, 1) + batch * cout * math.prod(out)) * _size(op, 0)
    return Cost(2 * pairs * math.prod(kernel), moved, _dtype(op))


def _convolution_backward(op: Op) -> Cost:
    """Of the gradient (N, C_out, ...), x and the weight: as many products as the forward for each gradient wanted."""
    gradient, weight = op.dims[0], op.dims[2]
    once = 2 * gradient[0] * math.prod(gradient[2:]) * math.prod(weight)
    transposed = op.values[7] == "True"
    if transposed:
        once = 2 * math.prod(op.dims[1][:1]) * math.prod(op.dims[1][2:]) * math.prod(weight)
    wanted = op.values[-1].count("True") if op.values[-1] else 2
    moved = (2 * _count(op, 1) + 2 * _count(op, 2) + _count(op, 0)) * _size(op, 0)
    return Cost(min(2, wanted) * once, moved, _dtype(op))


# --- attention of torch's: (B, H, S, D); causal is aligned top-left


def _sdpa(causal: int, q: int = 0, backward: bool = False) -> Callable[[Op], Cost]:
    """Of the op whose argument `causal` says whether it is causal and whose q, k, v start at `q`."""

    def formula(op: Op) -> Cost:
        (batch, heads, sq, dim), (_, kv_heads, sk, _), dim_v = op.dims[q], op.dims[q + 1], op.dims[q + 2][-1]
        pairs = sq * sk
        if op.values[causal] == "True":  # sq < sk: a square, no query sees the keys after it
            pairs = visible_pairs(sq, min(sq, sk), -1, max(0, sq - sk))
        per_pair = 3 * dim + 2 * dim_v if backward else dim + dim_v
        q_side, kv_side = batch * heads * sq * (dim + dim_v), batch * kv_heads * sk * (dim + dim_v)
        moved = (q_side + kv_side) * _size(op, q) * (2 if backward else 1) + 4 * batch * heads * sq
        return Cost(2 * batch * heads * pairs * per_pair, moved, _dtype(op, q))

    return formula


# --- everything that moves more than it computes


def _rows(flops: int, streams: int = 2) -> Callable[[Op], Cost]:
    def formula(op: Op) -> Cost:
        return Cost(flops * _count(op, 0), streams * _count(op, 0) * _size(op, 0), "fp32")

    return formula


def _elementwise(op: Op) -> Cost:
    """Reads its tensors and writes one of their common shape."""
    tensors = _tensors(op)
    widest = max(tensors, key=lambda i: _count(op, i))
    moved = sum(_count(op, i) * _size(op, i) for i in tensors)
    if not op.name.endswith("_"):
        moved += _count(op, widest) * _size(op, widest)
    return Cost(_count(op, widest), moved, "fp32")


def _copy(op: Op) -> Cost:
    """aten::copy_(to, from): one is read, the other is written."""
    return Cost(0, _count(op, 0) * (_size(op, 0) + _size(op, 1)), "fp32")


def _fill(op: Op) -> Cost:
    return Cost(0, _count(op, 0) * _size(op, 0), "fp32")


def _reduction(op: Op) -> Cost:
    return Cost(_count(op, 0), _count(op, 0) * _size(op, 0), "fp32")


def _gathered(op: Op) -> Cost:
    """aten::embedding(weight, indices): one row for each index, read and written."""
    rows, width = _count(op, 1), op.dims[0][-1]
    return Cost(0, rows * (2 * width * _size(op, 0) + _size(op, 1)), "fp32")


# --- ours, each from the problem that its own checks describe


@cache
def _names(op: str) -> tuple[str, ...]:
    """Names of an op's arguments, in the order in which the profiler records them."""
    import importlib

    import torch

    module = OURS[op][0]
    importlib.import_module(f"flashkernels.{module}")
    schema = getattr(torch.ops.flashkernels, op).default._schema
    return tuple(argument.name for argument in schema.arguments)


def ours(op: Op) -> Cost | None:
    name = op.name.removeprefix("flashkernels::")
    if name not in OURS:
        return None
    arguments = {arg: _argument(op, i) for i, arg in enumerate(_names(name)) if i < len(op.dims)}
    return OURS[name][1](arguments)


def _argument(op: Op, i: int) -> Any:
    """A recorded argument: a tensor without memory, a number, or None."""
    import torch

    kind = op.types[i]
    if kind in TYPES:
        name = kind.removeprefix("c10::")
        dtypes: dict[str, torch.dtype] = {
            "float": torch.float32, "double": torch.float64, "Half": torch.float16, "BFloat16": torch.bfloat16,
            "Float8_e4m3fn": torch.float8_e4m3fn, "Float8_e5m2": torch.float8_e5m2, "signed char": torch.int8,
            "unsigned char": torch.uint8, "bool": torch.bool, "int": torch.int32, "long": torch.int64,
            "long int": torch.int64,
        }  # fmt: skip
        if i < len(op.strides):
            return torch.empty_strided(tuple(op.dims[i]), tuple(op.strides[i]), dtype=dtypes[name], device="meta")
        return torch.empty(tuple(op.dims[i]), dtype=dtypes[name], device="meta")
    text = op.values[i] if i < len(op.values) else ""
    if text in ("True", "False"):
        return text == "True"
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return None  # words are not recorded


def _from(problem: Any, dtype: str | None = None) -> Cost:
    return Cost(problem.flops(), problem.bytes(), dtype or problem.dtype)


def _attention_problem(a: dict[str, Any]) -> Any:
    from flashkernels.attention.validation import described

    given = ("causal", "softmax_scale", "softcap", "alibi_slopes", "sinks", "mask", "cu_seqlens_q", "cu_seqlens_k",
             "block_table", "q_scale", "k_scale", "v_scale", "max_seqlen_q", "max_seqlen_k")  # fmt: skip
    extra = {name: a[name] for name in given if name in a}
    return described(a["q"], a["k"], a["v"], window=(a["window_left"], a["window_right"]), **extra)


def _attention(a: dict[str, Any]) -> Cost:
    return _from(_attention_problem(a))


def _attention_backward(a: dict[str, Any]) -> Cost:
    from flashkernels.attention.problem import BackwardProblem

    call = _attention_problem(a)
    q_side, kv_side = call.total_q * call.heads, call.total_k * call.kv_heads
    # read: q, the output and its gradient, k, v, the log-sum-exp; written: three gradients
    moved = 2 * (q_side + kv_side) * (call.head_dim + call.head_dim_v) * call.element_bytes + 4 * q_side
    return Cost(BackwardProblem(call, ("q", "k", "v")).flops(), moved, call.dtype)


def _decode(a: dict[str, Any]) -> Cost:
    """Lengths are on the device: as if every sequence were as long as its block table allows. Values of the keys' width
    count as tensors of their own: the trace does not say whether they are the keys themselves."""
    from flashkernels.decode.tensors import Call
    from flashkernels.decode.validation import described
    from flashkernels.kvcache.cache import PagedCache

    cache_ = PagedCache(a["k"], a["v"], a["block_table"], a["lengths"], a["k_scale"], a["v_scale"])
    call = Call(a["q"], cache_, a["tree_mask"], a["alibi_slopes"], a["sinks"], a["cu_seqlens_q"])
    window = (a["window_left"], a["window_right"])
    problem = described(call, a["tokens"], a["causal"], a["softmax_scale"], window, a["softcap"], a["need_lse"])
    if cache_.shared and cache_.head_dim == cache_.head_dim_v:
        values = cache_.format.bits(cache_.head_dim_v, cache_.scales == "token")
        problem = replace(problem, shared=False, row_bits=problem.row_bits + values)
    return _from(problem)


def _row(tensor: str, streams: Callable[[dict[str, Any]], float], flops: int) -> Callable[[dict[str, Any]], Cost]:
    def formula(a: dict[str, Any]) -> Cost:
        from flashkernels.fused.rows import row_problem

        problem = row_problem("row", a[tensor], streams(a))
        return Cost(flops * problem.rows * problem.width, problem.traffic, "fp32")

    return formula


def _rope(a: dict[str, Any]) -> Cost:
    """q and k read and written; half a complex product for each number: 3 FLOPs."""
    count = a["q"].numel() + a["k"].numel()
    return Cost(3 * count, 2 * count * a["q"].element_size(), "fp32")


def _moe_gemm(a: dict[str, Any]) -> Cost:
    """The names of format and activation are not recorded: weights are counted by their bytes, the output as plain."""
    x, w, rows = a["x"], a["w"], a["permutation"].shape[0]
    used = min(w.shape[0], rows)
    moved = rows * (a["depth"] + w.shape[1]) * x.element_size() + used * w[0].numel() * w.element_size()
    name = {"torch.float16": "fp16", "torch.bfloat16": "bf16", "torch.float32": "fp32", "torch.float8_e4m3fn": "fp8",
            "torch.int8": "int8"}[str(x.dtype)]  # fmt: skip
    return Cost(2 * rows * w.shape[1] * a["depth"], moved, name)


def _moe_route(a: dict[str, Any]) -> Cost:
    from flashkernels.fused.rows import DTYPES
    from flashkernels.moe.problem import RouteProblem

    tokens, experts = a["logits"].shape
    problem = RouteProblem(tokens, experts, a["k"], DTYPES[a["logits"].dtype], "cuda", a["block"] > 0)
    return _from(problem, "fp32")


OURS: dict[str, tuple[str, Callable[[dict[str, Any]], Cost]]] = {  # the module that registers it, the formula
    "attention": ("attention.api", _attention),
    "attention_backward": ("attention.api", _attention_backward),
    "decode": ("decode.api", _decode),
    "norm": ("fused.norm", _row("x", lambda a: 2 if a["residual"] is None else 4, NORM_FLOPS)),
    "norm_backward": ("fused.norm", _row("x", lambda a: 3 if a["grad_total"] is None else 4, 2 * NORM_FLOPS)),
    "softmax": ("fused.softmax", _row("x", lambda a: 2, SOFTMAX_FLOPS)),
    "activation": ("fused.activation", _row("x", lambda a: 1.5 if a["packed"] else 2, 4)),
    "sample": ("fused.sampling", _row("logits", lambda a: 1, SOFTMAX_FLOPS)),
    "rope": ("fused.rope", _rope),
    "rope_inplace": ("fused.rope", _rope),
    "moe_gemm": ("moe.gemm", _moe_gemm),
    "moe_route": ("moe.route", _moe_route),
}

PRODUCTS: dict[str, Callable[[Op], Cost]] = {
    "aten::mm": _product(0),
    "aten::bmm": _product(0),
    "aten::_scaled_mm": _product(0),
    "aten::addmm": _product(1),
    "aten::addmm_": _product(1),
    "aten::baddbmm": _product(1),
    "aten::baddbmm_": _product(1),
    "aten::_addmm_activation": _product(1),
    "aten::linear": _linear,
}
ELEMENTWISE = (
    "abs", "add", "addcdiv", "addcmul", "bitwise_and", "bitwise_not", "bitwise_or", "clamp", "clamp_max",
    "clamp_min", "cos", "div", "elu", "eq", "erf", "exp", "floor_divide", "ge", "gelu", "gelu_backward", "gt",
    "hardtanh", "isfinite", "isnan", "le", "leaky_relu", "lerp", "log", "logical_and", "logical_not",
    "logical_or", "lt", "masked_fill", "maximum", "minimum", "mish", "mul", "native_dropout", "ne", "neg",
    "pow", "reciprocal", "relu", "remainder", "round", "rsqrt", "rsub", "sigmoid", "sigmoid_backward", "sign",
    "silu", "silu_backward", "sin", "softplus", "sqrt", "square", "sub", "tanh", "tanh_backward", "threshold",
    "threshold_backward", "tril", "triu", "where",
)  # fmt: skip
REDUCTIONS = ("all", "amax", "amin", "any", "argmax", "max", "mean", "min", "norm", "prod", "sum")
ELEMENTWISE_NAMES = frozenset(f"aten::{name}{end}" for name in ELEMENTWISE for end in ("", "_"))
FORMULAS: dict[str, Callable[[Op], Cost | None]] = {
    **PRODUCTS,
    **dict.fromkeys(ELEMENTWISE_NAMES, _elementwise),
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    "aten::_scaled_dot_product_flash_attention": _sdpa(4),
    "aten::_scaled_dot_product_flash_attention_for_cpu": _sdpa(4),
    "aten::_scaled_dot_product_efficient_attention": _sdpa(6),
    "aten::_scaled_dot_product_cudnn_attention": _sdpa(6),
    "aten::_scaled_dot_product_flash_attention_backward": _sdpa(11, 1, True),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _sdpa(7, 1, True),
    "aten::_scaled_dot_product_efficient_attention_backward": _sdpa(11, 1, True),
    "aten::_scaled_dot_product_cudnn_attention_backward": _sdpa(14, 1, True),
    "aten::native_layer_norm": _rows(NORM_FLOPS),
    "aten::_fused_rms_norm": _rows(NORM_FLOPS // 2),
    "aten::native_group_norm": _rows(NORM_FLOPS),
    "aten::native_batch_norm": _rows(NORM_FLOPS),
    "aten::cudnn_batch_norm": _rows(NORM_FLOPS),
    "aten::native_layer_norm_backward": _rows(2 * NORM_FLOPS, 3),
    "aten::_softmax": _rows(SOFTMAX_FLOPS),
    "aten::_log_softmax": _rows(SOFTMAX_FLOPS),
    "aten::_softmax_backward_data": _rows(4, 3),
    "aten::_log_softmax_backward_data": _rows(4, 3),
    "aten::copy_": _copy,
    "aten::fill_": _fill,
    "aten::zero_": _fill,
    **dict.fromkeys((f"aten::{name}" for name in REDUCTIONS), _reduction),
    "aten::embedding": _gathered,
}
