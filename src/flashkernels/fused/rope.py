"""Rotary position embedding of queries and keys together, and the tables of cosines and sines it reads."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashkernels.arguments import check_count
from flashkernels.dispatch import Impl, UnsupportedError, leaves_the_cpu, serving
from flashkernels.fused.rows import DTYPES, RowProblem, check_choice, check_number, check_rows, gpu_of, needs_triton
from flashkernels.hardware import Gpu
from flashkernels.jit.eager import Plans, Run

MOST_PLACES = 256
SCALING = (None, "linear", "ntk", "yarn", "llama3")

# Best first. "auto" takes the first row that does not reject the problem. `torch` is in this file.
IMPLS = (
    Impl("triton", "flashkernels.fused.triton.rope", rejects=needs_triton, defers=leaves_the_cpu),
    Impl("torch", "flashkernels.fused.rope"),
)


class Rope(NamedTuple):
    """What a call asks for, beside its tensors."""

    rotary_dim: int | None  # None: by the tables; a plan has the number
    interleaved: bool
    conjugate: bool  # turns back: the gradient
    inplace: bool
    impl: str


def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, position_ids: Tensor | None = None, interleaved: bool = False,
    rotary_dim: int | None = None, inplace: bool = False, impl: str = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Turns pairs of numbers of every head of q and k by the angles of their position, in fp32, in one launch.

    Args:
        q: (B, S, H, D), fp16, bf16, fp32 (fp64 on the `torch` implementation), any strides.
        k: (B, S, H_kv, D), the same dtype.
        cos, sin: (P, R / 2), any float dtype: row p is position p. With R columns, as transformers has them, the second
            half must repeat the first and is not read. `fk.rope_tables` makes them. They get no gradients.
        position_ids: (B, S) or (S,), int32 or int64; default 0 to S - 1. On a GPU their values are not read by the
            host; a position outside the tables gives NaN.
        interleaved: pairs are (0, 1), (2, 3), ...; otherwise (0, R / 2), (1, R / 2 + 1), ...
        rotary_dim: R, how many of the D columns turn; default D where the tables have D columns, else twice theirs.
        inplace: writes into q and k, which must not overlap, and returns them. There are no gradients.
        impl: "auto", or the name of the one implementation that must serve.

    Returns:
        q and k turned, contiguous unless in place.

    >>> import torch, flashkernels as fk
    >>> cos, sin = fk.rope_tables(4096, 64)
    >>> q, k = torch.randn(2, 5, 8, 64), torch.randn(2, 5, 2, 64)
    >>> q_out, k_out = fk.rope(q, k, cos, sin)
    >>> q_out.shape, torch.equal(q_out[:, 0], q[:, 0])
    (torch.Size([2, 5, 8, 64]), True)
    """
    tensors = (q, k, cos, sin, position_ids)
    run = _planned.ready(tensors, (rotary_dim, interleaved, False, inplace, impl))
    if run is not None:
        found: tuple[Tensor, Tensor] = run(*tensors)
        return found
    _check(q, k, cos, sin, position_ids, rotary_dim, interleaved, inplace)  # the same errors as eager
    turned = _rotary_dim(q, cos, rotary_dim)
    if not inplace:
        return rope_op(*tensors, turned, interleaved, False, impl)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
        raise UnsupportedError("inplace=True has no gradients: call it under torch.no_grad()")
    rope_inplace_op(*tensors, turned, interleaved, impl)
    return q, k


def rope_tables(
    max_position: int, dim: int, *, base: float = 10000.0, scaling: str | None = None, factor: float = 1.0,
    original_max_position: int | None = None, low_freq_factor: float = 1.0, high_freq_factor: float = 4.0,
    beta_fast: float = 32.0, beta_slow: float = 1.0, attention_factor: float | None = None,
    dtype: torch.dtype = torch.float32, device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Cosines and sines of the angles `position * base ** (-2 i / dim)`, computed in fp64.

    Args:
        max_position: positions 0 to max_position - 1.
        dim: how many columns of a head turn, even.
        scaling: how a context `factor` times the one of training is reached: "linear" (positions / factor), "ntk" (a
            larger base), "yarn" and "llama3" (slow frequencies / factor, fast ones as they were; these two need
            `original_max_position`, the length of training).
        low_freq_factor, high_freq_factor: of "llama3": the band of frequencies in which it blends.
        beta_fast, beta_slow: the same for "yarn", in turns over the original length.
        attention_factor: multiplies the tables; default 1, with "yarn" `0.1 * log(factor) + 1`.

    Returns:
        cos and sin, each (max_position, dim / 2).

    >>> cos, sin = rope_tables(8, 4, base=100.0)
    >>> cos.shape, [round(x, 4) for x in sin[1].tolist()]
    (torch.Size([8, 2]), [0.8415, 0.0998])
    """
    _check_tables(max_position, dim, base, scaling, factor, original_max_position)
    _check_bands(low_freq_factor, high_freq_factor, beta_fast, beta_slow, attention_factor)
    if dtype not in DTYPES:
        raise TypeError(f"dtype={dtype!r} is not one of {', '.join(map(str, DTYPES))}")
    if scaling == "ntk":
        base = base * factor ** (dim / max(1, dim - 2))
    rates = float(base) ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if scaling == "linear":
        rates = rates / factor
    elif scaling in ("yarn", "llama3"):
        assert original_max_position is not None
        if scaling == "yarn":
            keep = 1 - _ramp(*_yarn_band(dim, base, original_max_position, beta_fast, beta_slow), dim // 2)
        else:
            turns = original_max_position * rates / (2 * math.pi)  # over the original length
            keep = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
        rates = rates * keep + rates / factor * (1 - keep)
    if attention_factor is None:
        attention_factor = 0.1 * math.log(factor) + 1 if scaling == "yarn" else 1.0
    angles = torch.arange(max_position, dtype=torch.float64)[:, None] * rates
    cos, sin = ((attention_factor * f(angles)).to(device=device, dtype=dtype) for f in (torch.cos, torch.sin))
    return cos, sin


def _yarn_band(dim: int, base: float, length: int, fast: float, slow: float) -> tuple[int, int]:
    """Between which frequencies YaRN blends: those that make `fast` and `slow` turns over the original length."""
    low, high = (dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base)) for turns in (fast, slow))
    return max(0, math.floor(low)), min(dim - 1, math.ceil(high))


def _ramp(low: int, high: int, count: int) -> Tensor:
    """0 up to `low`, 1 from `high` on, a line between."""
    return ((torch.arange(count, dtype=torch.float64) - low) / max(high - low, 1e-3)).clamp(0, 1)


def _check_tables(
    max_position: int, dim: int, base: float, scaling: str | None, factor: float, original: int | None
) -> None:
    check_count("max_position", max_position)
    check_count("dim", dim)
    if max_position >= 1 << 31:
        raise ValueError(f"max_position={max_position} is more than {(1 << 31) - 1}")
    if dim < 2 or dim % 2:
        raise ValueError(f"dim={dim} must be even and at least 2")
    check_choice("scaling", scaling, SCALING)
    check_number("base", base)
    check_number("factor", factor)
    if base <= 1:
        raise ValueError(f"base={base} must be more than 1")
    if factor < 1:
        raise ValueError(f"factor={factor} must be at least 1")
    if original is not None:
        check_count("original_max_position", original)
    if original is not None and original >= 1 << 31:
        raise ValueError(f"original_max_position={original} is more than {(1 << 31) - 1}")
    if scaling in ("yarn", "llama3") and (original is None or original < 1):
        raise ValueError(f"original_max_position={original}: scaling={scaling!r} needs the length of training")


def _check_bands(low: float, high: float, fast: float, slow: float, attention_factor: float | None) -> None:
    check_number("low_freq_factor", low)
    check_number("high_freq_factor", high)
    if low >= high:
        raise ValueError(f"low_freq_factor={low} must be less than high_freq_factor={high}")
    for name, turns in (("beta_fast", fast), ("beta_slow", slow)):
        check_number(name, turns)
        if turns <= 0:
            raise ValueError(f"{name}={turns} must be positive")
    if slow >= fast:
        raise ValueError(f"beta_slow={slow} must be less than beta_fast={fast}")
    if attention_factor is not None:
        check_number("attention_factor", attention_factor)


def _rotary_dim(q: Tensor, cos: Tensor, rotary_dim: int | None) -> int:
    if rotary_dim is not None:
        return rotary_dim
    return q.shape[-1] if cos.shape[-1] == q.shape[-1] else 2 * cos.shape[-1]


def _check(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None, rotary_dim: int | None,
    interleaved: bool, inplace: bool,
) -> None:  # fmt: skip
    check_choice("interleaved", interleaved, (False, True))
    check_choice("inplace", inplace, (False, True))
    for name, x in (("q", q), ("k", k)):
        check_rows(name, x)
        if x.dim() != 4:
            raise ValueError(f"{name} has {x.dim()} dimensions, shape {tuple(x.shape)}; expected (B, S, heads, D)")
        if inplace and overlaps(x):
            raise ValueError(f"{name} has strides {x.stride()}: in place, elements must not share memory")
    if k.dtype != q.dtype:
        raise TypeError(f"k.dtype={k.dtype} differs from q.dtype={q.dtype}")
    if k.shape[:2] != q.shape[:2] or k.shape[3] != q.shape[3]:
        raise ValueError(f"k has shape {tuple(k.shape)}, q has {tuple(q.shape)}: all but the heads must agree")
    for name, x in (("cos", cos), ("sin", sin)):
        check_rows(name, x)
        if x.dim() != 2:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; expected (positions, rotary_dim / 2)")
    if sin.shape != cos.shape:
        raise ValueError(f"sin has shape {tuple(sin.shape)}, cos has {tuple(cos.shape)}")
    turned = _rotary_dim(q, cos, rotary_dim)
    check_count("rotary_dim", turned)
    if turned % 2 or turned > q.shape[-1]:
        raise ValueError(f"rotary_dim={turned} must be even and at most the last size of q, {q.shape[-1]}")
    if cos.shape[-1] not in (turned, turned // 2):
        raise ValueError(f"cos has {cos.shape[-1]} columns; rotary_dim={turned} needs {turned // 2} or {turned}")
    if position_ids is None:
        if cos.shape[0] < q.shape[1]:
            raise ValueError(f"cos has {cos.shape[0]} positions, q has {q.shape[1]}")
    elif not isinstance(position_ids, Tensor):
        raise TypeError(f"position_ids must be a torch.Tensor, got {type(position_ids).__name__}")
    elif position_ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"position_ids.dtype={position_ids.dtype}; it must be torch.int32 or torch.int64")
    elif tuple(position_ids.shape) not in ((q.shape[0], q.shape[1]), (1, q.shape[1]), (q.shape[1],)):
        raise ValueError(
            f"position_ids has shape {tuple(position_ids.shape)}; expected {tuple(q.shape[:2])} or ({q.shape[1]},)"
        )
    for name, other in (("k", k), ("cos", cos), ("sin", sin), ("position_ids", position_ids)):
        if other is not None and other.device != q.device:
            raise ValueError(f"{name}.device={other.device} differs from q.device={q.device}")


def _check_positions(position_ids: Tensor, positions: int) -> None:
    """The values, where they can be read without waiting for a device."""
    least, most = (int(x) for x in position_ids.aminmax())
    if least < 0 or most >= positions:
        raise ValueError(f"position_ids goes from {least} to {most}; cos has positions 0 to {positions - 1}")


def _plan(tensors: tuple[Any, ...], settings: tuple[Any, ...]) -> Run:
    (q, k, cos, sin, position_ids), call = tensors, Rope(*settings)
    _check(q, k, cos, sin, position_ids, call.rotary_dim, call.interleaved, call.inplace)
    call = call._replace(rotary_dim=_rotary_dim(q, cos, call.rotary_dim))
    heads, tokens = q.shape[2] + k.shape[2], q.shape[0] * q.shape[1]
    moved = 2 * tokens * heads * (call.rotary_dim if call.inplace else q.shape[3]) * q.element_size()
    problem = RowProblem("rope", tokens * heads, q.shape[3], DTYPES[q.dtype], q.device.type, moved)
    gpu = gpu_of(q)
    run: Run = serving(IMPLS, problem, gpu, call.impl).plan(problem, gpu, tensors, call)
    return _apart(q, k, run) if call.inplace else run


def _apart(q: Tensor, k: Tensor, run: Run) -> Run:
    """`run`, where q and k do not overlap. That depends on how far one is from the other, which no plan knows; most are
    further apart than they reach, and others, in one packed tensor, always as far."""
    of_q, of_k, width = _dims(q), _dims(k), q.element_size()
    reach_q, reach_k = _reach(of_q, width), _reach(of_k, width)
    fine: set[int] = set()

    def checked(q: Tensor, k: Tensor, *others: Any) -> Any:
        start = k.data_ptr() - q.data_ptr()
        if -reach_k < start < reach_q and start not in fine:
            if _overlap(of_q, of_k, start, width):
                raise ValueError("q and k overlap: in place, elements must not share memory")
            if len(fine) >= MOST_PLACES:
                fine.clear()
            fine.add(start)
        return run(q, k, *others)

    return checked


def _dims(x: Tensor) -> tuple[tuple[int, int], ...]:
    """Sizes and steps in bytes, the largest step first; none with a size of 1. An empty tensor has a size of 0."""
    dims = ((n, step * x.element_size()) for n, step in zip(x.shape, x.stride(), strict=True) if n != 1)
    return tuple(sorted(dims, key=lambda dim: -dim[1]))


def _reach(dims: tuple[tuple[int, int], ...], width: int) -> int:
    """Bytes from the first to the end of the last element."""
    return width + sum((n - 1) * step for n, step in dims) if all(n for n, _ in dims) else 0


def overlaps(x: Tensor) -> bool:
    """Whether two elements of x share memory; of a call that is compiled, whether a step of 0 says so.

    >>> x = torch.zeros(40)
    >>> overlaps(x.as_strided((3, 4), (2, 1))), overlaps(x.as_strided((3, 4), (4, 1))), overlaps(x[:1].expand(2))
    (True, False, True)
    """
    if torch.compiler.is_compiling():  # comparing sizes would compile anew for each of them
        return any(n > 1 and step == 0 for n, step in zip(x.shape, x.stride(), strict=True))
    reach = 0
    dims = sorted((step, n) for n, step in zip(x.shape, x.stride(), strict=True) if n > 1)
    for step, n in dims:
        if step <= reach:  # all steps of those before are shorter: these may lie between them, or on them
            places = torch.zeros(1, dtype=torch.int64)
            for s, m in dims:
                places = (places[:, None] + s * torch.arange(m, device="cpu")).flatten()
            return places.unique().numel() < places.numel()
        reach += (n - 1) * step
    return False


def _overlap(a: tuple[tuple[int, int], ...], b: tuple[tuple[int, int], ...], start: int, width: int) -> bool:
    """Whether elements of `width` bytes at a, and at b, whose first is `start` bytes after a's, share memory.

    >>> _overlap(((2, 8), (2, 1)), ((2, 8), (4, 1)), 3, 1), _overlap(((2, 8), (2, 1)), ((2, 8), (7, 1)), 3, 1)
    (False, True)
    """
    reach_a, reach_b = _reach(a, width), _reach(b, width)
    if not -reach_b < start < reach_a:
        return False
    if all(reach == width * math.prod(n for n, _ in x) for x, reach in ((a, reach_a), (b, reach_b))):  # without gaps
        return True
    both = max(_reach(a[1:], width), start + _reach(b[1:], width)) - min(0, start)
    if a and b and a[0] == b[0] and both <= a[0][1]:  # the outermost steps are the same, and all of them alike
        return _overlap(a[1:], b[1:], start, width)
    if not a or (b and b[0][1] > a[0][1]):
        return _overlap(b, a, -start, width)
    (count, step), inner = a[0], a[1:]
    # those that reach b
    first, last = max(0, (start - _reach(inner, width)) // step), min(count, (start + reach_b) // step + 1)
    return any(_overlap(inner, b, start - i * step, width) for i in range(first, last))


_planned = Plans(_plan)


# --- the `torch` implementation


def plan(problem: RowProblem, gpu: Gpu | None, tensors: tuple[Any, ...], call: Rope) -> Run:
    half = (call.rotary_dim or 0) // 2
    pairs = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if call.interleaved else (slice(half), slice(half, 2 * half))

    def run(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        if position_ids is None:
            position_ids = torch.arange(q.shape[1], device=q.device)
        elif not q.is_cuda and position_ids.numel():
            _check_positions(position_ids, cos.shape[0])
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        known = (position_ids >= 0) & (position_ids < cos.shape[0])
        rows = position_ids.long().clamp(0, max(0, cos.shape[0] - 1))
        # (B or 1, S, 1, R / 2)
        c, s = (
            table[rows, :half].to(wide).masked_fill(~known[..., None], math.nan).unsqueeze(-2) for table in (cos, sin)
        )
        if call.conjugate:
            s = -s
        outs = []
        for x in (q, k):
            out = x if call.inplace else x.new_empty(x.shape).copy_(x)
            a, b = (x[..., pair].to(wide) for pair in pairs)
            turned = (a * c - b * s, b * c + a * s)
            for pair, y in zip(pairs, turned, strict=True):
                out[..., pair] = y.to(x.dtype)
            outs.append(out)
        return outs[0], outs[1]

    return run


# --- the registered ops: schema, fake and autograd, for torch.compile, torch.export and training


@torch.library.custom_op("flashkernels::rope", mutates_args=())
def rope_op(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None, rotary_dim: int, interleaved: bool,
    conjugate: bool, impl: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    found: tuple[Tensor, Tensor] = _planned(
        (q, k, cos, sin, position_ids), (rotary_dim, interleaved, conjugate, False, impl)
    )
    return found


@rope_op.register_fake
def _fake(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None, rotary_dim: int, interleaved: bool,
    conjugate: bool, impl: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, cos, sin, position_ids, *ctx.settings = inputs
    if cos.requires_grad or sin.requires_grad:
        raise UnsupportedError("cos and sin get no gradients: detach them")
    ctx.save_for_backward(cos, sin, position_ids)


def _gradients(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple[Any, ...]:
    rotary_dim, interleaved, conjugate, impl = ctx.settings
    grads = rope_op(grad_q, grad_k, *ctx.saved_tensors, rotary_dim, interleaved, not conjugate, impl)
    return (*grads, *(None,) * 7)


rope_op.register_autograd(_gradients, setup_context=_setup)


@torch.library.custom_op("flashkernels::rope_inplace", mutates_args=("q", "k"))
def rope_inplace_op(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None, rotary_dim: int, interleaved: bool,
    impl: str,
) -> None:  # fmt: skip
    _planned((q, k, cos, sin, position_ids), (rotary_dim, interleaved, False, True, impl))


@rope_inplace_op.register_fake
def _fake_inplace(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None, rotary_dim: int, interleaved: bool,
    impl: str,
) -> None:  # fmt: skip
    return None
