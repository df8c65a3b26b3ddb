"""From a problem to the kernels it needs: the op's own plan runs on tensors without memory, and its launches are noted.

So what is compiled ahead is what a call will ask for, by construction: dispatch, tiles and specialisation are the op's.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from flashkernels.aot.blank import ROWS, Recipe, empty
from flashkernels.aot.experts import Experts, expert_recipes
from flashkernels.aot.projections import Projection, projection_recipes
from flashkernels.aot.vocabulary import Accepting, Loss, Sampling, accepting_recipes, loss_recipes, sampling_recipes
from flashkernels.attention import api as attention
from flashkernels.attention.problem import AttentionProblem, BackwardProblem
from flashkernels.attention.tensors import Given, Tensors, empty_output, lse_shape
from flashkernels.decode import api as decode
from flashkernels.decode.hopper.tiles import forms
from flashkernels.decode.problem import DecodeProblem
from flashkernels.decode.tensors import Call
from flashkernels.dispatch import Impl, select
from flashkernels.fused import activation, norm, rope, softmax
from flashkernels.fused.rows import RowProblem, row_problem
from flashkernels.hardware import Gpu
from flashkernels.jit.notes import Program, noting
from flashkernels.kvcache.append import IMPLS as APPEND_IMPLS, Append
from flashkernels.kvcache.cache import PagedCache

SIDES = ("fp16", "bf16", "fp32")
GLU = {"swiglu": "silu", "geglu": "gelu_tanh", "relu2_glu": "relu2"}


@dataclass(frozen=True)
class Rows:
    """A call of a row-wise op: rms_norm, layer_norm, swiglu, geglu, relu2_glu, gelu, softmax or log_softmax.

    `width` is the last size of its input (of swiglu and the like gate and up together).
    """

    op: str
    width: int
    dtype: str = "bf16"
    residual: bool = False  # of the norms, as are the next two
    bias: bool = False
    quantise: str = ""
    backward: bool = False  # the gradients too
    exact: bool = False  # geglu with approximate="none"
    tanh: bool = False  # gelu with approximate="tanh"
    rounded: bool = False  # rms_norm with numerics="hf"
    weight: str = ""  # the dtype of weight and bias of the norms, where it is not x's; "none": there is no weight

    def __post_init__(self) -> None:
        if self.op not in ROW_OPS:
            raise ValueError(f"op={self.op!r} is not one of {', '.join(ROW_OPS)}")
        if self.width < 1:
            raise ValueError(f"width={self.width} must be at least 1")
        if self.exact and self.op != "geglu":
            raise ValueError(f"exact=True is for geglu, not {self.op!r}")
        if self.tanh and self.op != "gelu":
            raise ValueError(f"tanh=True is for gelu, not {self.op!r}")
        if self.rounded and self.op != "rms_norm":
            raise ValueError(f"rounded=True is for rms_norm, not {self.op!r}")
        if self.weight not in ("", "none", *SIDES) or (self.weight and not self.op.endswith("_norm")):
            raise ValueError(f"weight={self.weight!r} is not one of '', 'none', {', '.join(SIDES)}, of a norm")


@dataclass(frozen=True)
class Rotation:
    """A call of `rope` on q (B, S, heads, head_dim) and k (B, S, kv_heads, head_dim)."""

    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int = 0  # 0: all of head_dim
    dtype: str = "bf16"
    interleaved: bool = False
    inplace: bool = False
    position_ids: bool = False
    backward: bool = False  # the gradients too


@dataclass(frozen=True)
class Appending:
    """A call of `kvcache.append`: k and v (B, T, kv_heads, head_dim) into a paged cache, turned where `rotary`."""

    kv_heads: int
    head_dim: int
    page_size: int
    dtype: str = "bf16"
    format: str = "bf16"
    scales: str = "token"
    rotary: bool = False
    pages: int = 16  # of a sequence


Work = (
    AttentionProblem | BackwardProblem | DecodeProblem | Rows | Rotation | Appending | Sampling | Accepting | Loss
    | Projection | Experts
)  # fmt: skip
ROW_OPS = ("rms_norm", "layer_norm", *GLU, "gelu", "softmax", "log_softmax")


def programs(work: Work, gpu: Gpu) -> list[Program]:
    """The kernels that this call launches on this GPU; none where its implementation there is not ours to compile.

    >>> from flashkernels.hardware import lookup
    >>> call = AttentionProblem(batch=1, seq_q=1024, seq_k=1024, heads=8, kv_heads=8, head_dim=72)
    >>> [program.label.split(" (")[0] for program in programs(call, lookup("h200"))]
    ['forward.cu for sm_90a']
    """
    if type(work) not in RECIPES:
        names = ", ".join(kind.__name__ for kind in RECIPES)
        raise TypeError(f"{work!r} is a {type(work).__name__}; a call is described by one of {names}")
    found: list[Program] = []
    for run in RECIPES[type(work)](work, gpu):
        with noting(gpu.cc) as noted:
            run()
        found += noted
    return list({program.key: program for program in found}.values())


def preload(work: Work, gpu: Gpu) -> None:
    """Loads what the call needs into this process; the cache has it."""
    for program in programs(work, gpu):
        program.preload()
    if isinstance(work, (AttentionProblem, BackwardProblem, DecodeProblem)):
        for run in RECIPES[type(work)](work, gpu, only="hopper"):
            run()


# --- recipes: functions that plan and run one call each


def _attention(work: AttentionProblem, gpu: Gpu, only: str = "") -> list[Recipe]:
    problem = replace(work, device="cuda")
    tensors = attention_tensors(problem)
    impl = select(attention.IMPLS, problem, gpu)
    if impl.name == "aligned":
        return _copies(problem, tensors, only) + _attention(problem.widened(), gpu, only)
    return _recipe(impl, only, (problem, gpu, tensors), (tensors, problem.head_dim**-0.5, float(problem.softcap)))


def _backward(work: BackwardProblem, gpu: Gpu, only: str = "") -> list[Recipe]:
    call = replace(work.call, device="cuda", need_lse=True)
    problem = replace(work, call=call)
    tensors = attention_tensors(call)
    out = empty_output(tensors.q, call.head_dim_v, "bshd")
    given = Given(torch.empty_like(out), None, out, empty(*lse_shape(tensors.q)))
    impl = select(attention.BACKWARD_IMPLS, problem, gpu)
    if impl.name == "aligned":
        return _attention(call, gpu, only) + _copies(call, tensors, only) + _backward(problem.widened(), gpu, only)
    run = (tensors, given, call.head_dim**-0.5, float(call.softcap))
    return _attention(call, gpu, only) + _recipe(impl, only, (problem, gpu, tensors, given), run)


def _copies(problem: AttentionProblem, tensors: Tensors, only: str) -> list[Recipe]:
    """Those of `aligned`, to wider rows and back."""
    from flashkernels.attention.triton.copy import copier

    wide, out = problem.widened(), empty_output(tensors.q, problem.head_dim_v, problem.layout)
    widths = (wide.head_dim, wide.head_dim, wide.head_dim_v, wide.head_dim_v)

    def run() -> None:
        for x, width in zip((*tensors[:3], out), widths, strict=True):
            copy = copier(x, width, None)(x)
            copier(copy, x.shape[-1], None)(copy)

    return [] if only else [run]


def _recipe(impl: Impl, only: str, plan: tuple[Any, ...], run: tuple[Any, ...]) -> list[Recipe]:
    """Triton compiles at the first launch, so its plan has to run; NVRTC compiles in the plan."""
    if impl.name not in ("hopper", "triton") or only not in ("", impl.name):
        return []
    module = impl.load()
    if impl.name == "hopper":
        return [lambda: module.plan(*plan)]
    return [lambda: module.plan(*plan)(*run)]


def attention_tensors(problem: AttentionProblem) -> Tensors:
    """Tensors without memory that pose the problem; they are contiguous."""
    p = problem
    rows_q, rows_k = ((p.total_q,), (p.total_k,)) if p.varlen else ((p.batch, p.seq_q), (p.batch, p.seq_k))
    if p.page_size:
        rows_k = (p.batch * -(-p.seq_k // p.page_size), p.page_size)
    ends = empty(p.batch + 1, dtype=torch.int32) if p.varlen else None
    mask = None
    if p.mask:
        mask = empty(p.batch, 1, p.seq_q, p.seq_k, dtype=torch.bool if p.mask == "bool" else p.dtype)
    scales = [empty(p.batch, n) if p.dtype == "fp8" else None for n in (p.heads, p.kv_heads, p.kv_heads)]
    return Tensors(
        q=empty(*rows_q, p.heads, p.head_dim, dtype=p.dtype), k=empty(*rows_k, p.kv_heads, p.head_dim, dtype=p.dtype),
        v=empty(*rows_k, p.kv_heads, p.head_dim_v, dtype=p.dtype), alibi_slopes=empty(p.heads) if p.alibi else None,
        sinks=empty(p.heads) if p.sinks else None, mask=mask, cu_seqlens_q=ends, cu_seqlens_k=ends,
        block_table=empty(p.batch, -(-p.seq_k // p.page_size), dtype=torch.int32) if p.page_size else None,
        q_scale=scales[0], k_scale=scales[1], v_scale=scales[2],
        dropout_seed=empty(1, dtype=torch.int64) if p.dropout_p else None,
    )  # fmt: skip


def _decode(work: DecodeProblem, gpu: Gpu, only: str = "") -> list[Recipe]:
    """Pages are as `PagedCache.allocate` makes them. The Hopper kernel has the bytes from one key to the next compiled
    in, which are those of all KV heads: a cache that lies otherwise, K and V in one tensor for example, needs another.
    """
    problem = replace(work, device="cuda")
    p = problem
    pages = -(-p.context // p.page_size)
    cache = PagedCache.allocate(
        p.batch * pages, p.page_size, p.kv_heads, p.head_dim, p.head_dim_v, format=p.format,
        block_table=empty(p.batch, pages, dtype=torch.int32), scales=p.scales or "token", latent=p.shared,
    )  # fmt: skip
    q = empty(*((p.total,) if p.ragged else (p.batch, p.tokens)), p.heads, p.head_dim, dtype=p.dtype)
    call = Call(
        q, cache, empty(p.tokens, p.tokens, dtype=torch.bool) if p.tree else None,
        empty(p.heads) if p.alibi else None, empty(p.heads) if p.sinks else None,
        empty(p.batch + 1, dtype=torch.int32) if p.ragged else None,
    )  # fmt: skip
    impl = select(decode.IMPLS, problem, gpu)
    if impl.name == "hopper" and only in ("", "hopper"):  # batch and context choose between two kernels: both are built
        return [partial(impl.load().plan, form, gpu, call) for form in forms(problem)]
    return _recipe(impl, only, (problem, gpu, call), (call, p.head_dim**-0.5, float(p.softcap)))


def _rows(work: Rows, gpu: Gpu) -> list[Recipe]:
    module: ModuleType
    call: Any
    x = empty(ROWS, work.width, dtype=work.dtype)
    if work.op.endswith("_norm"):
        return _norm(work, gpu, x)
    if work.op in ("softmax", "log_softmax"):
        module, call, grad = softmax, softmax.Softmax(work.op == "log_softmax", "auto"), x
    else:
        packed = work.op in GLU
        kind = "gelu" if work.exact else GLU.get(work.op, "gelu_tanh" if work.tanh else "gelu")
        module, call = activation, activation.Activation(kind, packed, "auto")
        grad = activation.empty(x, packed)
    problem = replace(row_problem(work.op, x, 2), device="cuda")
    return _row_recipes(module, problem, gpu, (x,), call, (grad, x) if work.backward else None, call)


def _norm(work: Rows, gpu: Gpu, x: Tensor) -> list[Recipe]:
    weighted = work.weight != "none"
    kind = work.weight if work.weight and weighted else work.dtype
    centred, side = work.op == "layer_norm", empty(work.width, dtype=kind)
    weight = side if weighted else None
    tensors = (x, weight, side if work.bias else None, x if work.residual else None)
    call = norm.Norm(centred, 1e-6, work.rounded, work.quantise, False, "auto")
    problem = replace(row_problem(work.op, x, 2, work.quantise), device="cuda")
    recipes = _row_recipes(norm, problem, gpu, tensors, call, None, None)
    if not work.backward:
        return recipes
    stats = empty(ROWS)
    grads = (x, x if work.residual else None, x, weight, stats if centred else stats.new_empty(0), stats)
    backward = norm.NormBackward(centred, work.rounded, weighted, work.bias, "auto")
    return recipes + _row_recipes(norm, problem, gpu, tensors, call._replace(stats=True), grads, backward)


def _row_recipes(
    op: Any, problem: RowProblem, gpu: Gpu, tensors: tuple[Any, ...], call: Any, grads: tuple[Any, ...] | None,
    backward: Any,
) -> list[Recipe]:  # fmt: skip
    impl = select(op.IMPLS, problem, gpu)
    if impl.name != "triton":
        return []
    module = importlib.import_module(impl.module)
    recipes: list[Recipe] = [lambda: module.forward_plan(problem, gpu, tensors, call)(*tensors)]
    if grads is not None:
        recipes.append(lambda: module.backward_plan(problem, gpu, grads, backward)(*grads))
    return recipes


def _rotation(work: Rotation, gpu: Gpu) -> list[Recipe]:
    """The length is the stride of position ids: a multiple of 16, none, and 1 are compiled apart."""
    lengths = (1024, 1023, 1) if work.position_ids else (1024,)
    back = (False, True) if work.backward else (False,)
    return [recipe for seq in lengths for conjugate in back for recipe in _rotation_of(work, gpu, seq, conjugate)]


def _rotation_of(work: Rotation, gpu: Gpu, seq: int, conjugate: bool) -> list[Recipe]:
    turned = work.rotary_dim or work.head_dim
    q, k = (empty(8, seq, heads, work.head_dim, dtype=work.dtype) for heads in (work.heads, work.kv_heads))
    table = empty(1024, turned // 2)
    ids = empty(8, seq, dtype=torch.int64) if work.position_ids else None
    tensors = (q, k, table, table, ids)
    call = rope.Rope(turned, work.interleaved, conjugate, work.inplace, "auto")
    tokens = 8 * seq * (work.heads + work.kv_heads)
    problem = RowProblem("rope", tokens, work.head_dim, work.dtype, "cuda", 0)
    impl = select(rope.IMPLS, problem, gpu)
    return _recipe(impl, "", (problem, gpu, tensors, call), tensors)


def _appending(work: Appending, gpu: Gpu) -> list[Recipe]:
    batch, each = 8, work.pages
    table = empty(batch, each, dtype=torch.int32)
    sizes = (batch * each, work.page_size, work.kv_heads, work.head_dim)
    cache = PagedCache.allocate(*sizes, block_table=table, format=work.format, scales=work.scales)
    k = empty(batch, 1, work.kv_heads, work.head_dim, dtype=work.dtype)
    angles = empty(1024, work.head_dim // 2) if work.rotary else None
    pages = (cache.k, cache.v, cache.k_scale, cache.v_scale, cache.block_table, cache.lengths)
    tensors = (*pages, k, k, angles, angles, None, None)
    problem = RowProblem("append", batch * work.kv_heads, work.head_dim, work.dtype, "cuda", 0, work.format)
    call = Append(work.head_dim if work.rotary else 0, False, "auto")
    return _recipe(select(APPEND_IMPLS, problem, gpu), "", (problem, gpu, tensors, call), tensors)


RECIPES: dict[type, Callable[..., list[Recipe]]] = {
    AttentionProblem: _attention, BackwardProblem: _backward, DecodeProblem: _decode, Rows: _rows, Rotation: _rotation,
    Appending: _appending, Sampling: sampling_recipes, Accepting: accepting_recipes, Loss: loss_recipes,
    Projection: projection_recipes, Experts: expert_recipes,
}  # fmt: skip
