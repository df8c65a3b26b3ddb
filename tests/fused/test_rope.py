"""Rotary embedding against complex multiplication, and its tables against the formulas they come from."""

from __future__ import annotations

import importlib
import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import flashkernels as fk

from . import oracle
from .test_rows import INTERPRETED, each_impl, interpreter

rope_module = importlib.import_module("flashkernels.fused.rope")  # `fused` has the function by this name
POSITIONS = 32


def heads_of(
    batch: int, seq: int, heads: int, dim: int, dtype: torch.dtype = torch.float32, layout: str = "bshd", seed: int = 0
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, seq, heads, dim, generator=generator).to(dtype)
    if layout == "bhsd":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "packed":
        return torch.cat((x, x, x), 2)[:, :, :heads]
    if layout == "stepped":
        return x.new_zeros(batch, seq, heads, 2 * dim)[..., ::2].copy_(x)
    return x


def plain(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, dim: int, interleaved: bool) -> Tensor:
    """As transformers has it, in x's dtype."""
    half = dim // 2
    c, s = (table[positions, :half][:, :, None].to(x.dtype) for table in (cos, sin))
    head = x[..., :dim]
    a, b = (head[..., 0::2], head[..., 1::2]) if interleaved else (head[..., :half], head[..., half:])
    turned = (a * c - b * s, b * c + a * s)
    both = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat((both, x[..., dim:]), -1)


def check(
    q: Tensor, k: Tensor, dim: int, impl: str, ids: Tensor | None = None, interleaved: bool = False, **arguments: Any
) -> None:
    cos, sin = (t[:, : dim // 2] for t in fk.rope_tables(POSITIONS, max(2, dim)))
    positions = (torch.arange(q.shape[1], device=q.device) if ids is None else ids).long().expand(q.shape[:2])
    cos, sin = cos.to(q.device), sin.to(q.device)
    arguments |= {"position_ids": ids, "interleaved": interleaved, "rotary_dim": dim}

    def ours(*x: Tensor) -> tuple[Tensor, ...]:
        return fk.rope(*x, cos, sin, impl=impl, **arguments)

    def in_torch(*x: Tensor) -> tuple[Tensor, ...]:
        return tuple(plain(y, cos, sin, positions, dim, interleaved) for y in x)

    def truly(*x: Tensor) -> tuple[Tensor, ...]:
        return tuple(oracle.rope(y, cos.double(), sin.double(), positions, dim, interleaved) for y in x)

    got, rough = (oracle.run(f, [q, k], True) for f in (ours, in_torch))
    want = oracle.run(truly, [q.double(), k.double()], True)
    for i, (a, b, c) in enumerate(zip(got, rough, want, strict=True)):
        assert a.dtype == q.dtype
        oracle.assert_close(a, b, c, q.dtype, name=f"result {i}")
    turned = [x.clone(memory_format=torch.preserve_format) for x in (q, k)]
    found = fk.rope(*turned, cos, sin, impl=impl, inplace=True, **arguments)
    for x, y, z in zip(found, turned, got[:2], strict=True):
        assert x is y and torch.equal(x, z)


@each_impl
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
@pytest.mark.parametrize(("dim", "rotary"), [(64, 64), (64, 32), (80, 80), (6, 2), (7, 6), (8, 0), (96, 24)])
def test_dimensions(dim: int, rotary: int, interleaved: bool, impl: str) -> None:
    check(heads_of(2, 5, 4, dim), heads_of(2, 5, 2, dim, seed=1), rotary, impl, interleaved=interleaved)


@st.composite
def calls(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...]) -> tuple[Any, ...]:
    batch, seq, dim = draw(st.integers(0, 3)), draw(st.integers(0, 6)), draw(st.integers(1, 40))
    dtype, layouts = draw(st.sampled_from(dtypes)), st.sampled_from(["bshd", "bhsd", "packed", "stepped"])
    q, k = (heads_of(batch, seq, draw(st.integers(0, 5)), dim, dtype, draw(layouts), seed) for seed in (0, 1))
    rotary = draw(st.integers(0, dim // 2)) * 2
    ids = None
    if draw(st.booleans()):
        shape = draw(st.sampled_from([(batch, seq), (1, seq), (seq,)]))
        ids = torch.randint(0, POSITIONS, shape, dtype=draw(st.sampled_from([torch.int32, torch.int64])))
    return q, k, rotary, ids, draw(st.booleans())


@settings(max_examples=100)
@given(calls((torch.float16, torch.bfloat16, torch.float32, torch.float64)))
def test_torch(call: tuple[Any, ...]) -> None:
    q, k, rotary, ids, interleaved = call
    check(q, k, rotary, "torch", ids, interleaved)


@interpreter
@settings(max_examples=60)
@given(calls((torch.float16, torch.float32)))
def test_triton(call: tuple[Any, ...]) -> None:
    q, k, rotary, ids, interleaved = call
    check(q, k, rotary, "triton", ids, interleaved)


@each_impl
def test_many_heads_take_several_programs(impl: str) -> None:
    check(heads_of(1, 2, 70, 128), heads_of(1, 2, 3, 128), 128, impl)
    check(heads_of(1, 2, 1, 128), heads_of(1, 2, 40, 128), 128, impl)


@each_impl
def test_tables_of_transformers(impl: str) -> None:
    q, k = heads_of(2, 5, 4, 16), heads_of(2, 5, 2, 16)
    cos, sin = fk.rope_tables(POSITIONS, 16)
    want = fk.rope(q, k, cos, sin, impl=impl)
    doubled = fk.rope(q, k, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1), impl=impl)
    assert all(torch.equal(a, b) for a, b in zip(doubled, want, strict=True))
    half = [torch.cat((t[:, :4], t[:, :4]), -1) for t in (cos, sin)]  # 8 columns mean 16, unless rotary_dim says 8
    found = fk.rope(q, k, *half, rotary_dim=8, impl=impl)
    assert torch.equal(found[0][..., 8:], q[..., 8:]) and torch.equal(
        found[0], fk.rope(q, k, cos[:, :4], sin[:, :4], impl=impl)[0]
    )


@each_impl
def test_nan_stays_in_its_head(impl: str) -> None:
    q, k = heads_of(2, 5, 4, 16), heads_of(2, 5, 2, 16)
    tables = fk.rope_tables(POSITIONS, 16)
    clean = fk.rope(q, k, *tables, impl=impl)
    q[1, 2, 3, 4] = torch.nan
    dirty = fk.rope(q, k, *tables, impl=impl)
    assert dirty[0].isnan().nonzero().tolist() == [[1, 2, 3, 4], [1, 2, 3, 12]]
    assert torch.equal(dirty[0].isnan() | (dirty[0] == clean[0]), torch.ones(2, 5, 4, 16, dtype=torch.bool))


def test_a_position_outside_the_tables() -> None:
    q, ids = heads_of(1, 3, 2, 8), torch.tensor([0, 40, -1])
    tables = fk.rope_tables(POSITIONS, 8)
    with pytest.raises(ValueError, match="position_ids goes from -1 to 40; cos has positions 0 to 31"):
        fk.rope(q, q, *tables, position_ids=ids, impl="torch")
    if INTERPRETED:
        out, _ = fk.rope(q, q, *tables, position_ids=ids, impl="triton")
        assert out[0, 1:].isnan().all() and torch.equal(out[0, 0], q[0, 0])


@each_impl
def test_autograd_hears_of_what_is_written_in_place(impl: str) -> None:
    q, k = heads_of(1, 3, 2, 8), heads_of(1, 3, 1, 8)
    factor = torch.ones((), requires_grad=True)
    products = [(x * factor).sum() for x in (q, k)]
    fk.rope(q, k, *fk.rope_tables(POSITIONS, 8), inplace=True, impl=impl)
    for product in products:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()
    with torch.inference_mode():
        fk.rope(q.clone(), k.clone(), *fk.rope_tables(POSITIONS, 8), inplace=True, impl=impl)


def packed(*, first: int, second: int, late: int = 0) -> tuple[Tensor, Tensor]:
    """Two heads of one tensor from `first`, and two from `second`, `late` tokens later."""
    x = torch.randn(2, 6, 5, 8)
    return x[:, :5, first : first + 2], x[:, late : late + 5, second : second + 2]


@each_impl
def test_in_place_they_must_not_overlap(impl: str) -> None:
    """Whatever calls of the same kind there were before."""
    tables = fk.rope_tables(POSITIONS, 8)
    for first, second, late in ((0, 2, 0), (2, 0, 0), (0, 3, 1), (3, 0, 1), (1, 3, 0)):
        q, k = packed(first=first, second=second, late=late)
        want = fk.rope(q, k, *tables, impl=impl)
        found = fk.rope(q, k, *tables, impl=impl, inplace=True)
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    for first, second, late in ((0, 1, 0), (1, 0, 0), (2, 2, 0), (2, 2, 1), (1, 2, 1), (2, 1, 1)):
        q, k = packed(first=first, second=second, late=late)
        with pytest.raises(ValueError, match="q and k overlap: in place, elements must not share memory"):
            fk.rope(q, k, *tables, impl=impl, inplace=True)
        fk.rope(q, k, *tables, impl=impl)
    with pytest.raises(ValueError, match="q and k overlap"):
        fk.rope(q, q, *tables, impl=impl, inplace=True)


@given(st.data())
def test_overlaps(data: st.DataObject) -> None:
    """Against all addresses."""
    dims = st.lists(st.tuples(st.integers(2, 4), st.integers(1, 12)), max_size=3)
    a, b = (tuple(sorted(data.draw(dims), key=lambda dim: -dim[1])) for _ in range(2))
    start, width = data.draw(st.integers(-40, 40)), data.draw(st.integers(1, 2))

    def taken(dims: tuple[tuple[int, int], ...], start: int) -> set[int]:
        steps = itertools.product(*(range(0, n * step, step) for n, step in dims))
        return {start + sum(place) + i for place in steps for i in range(width)}

    shared = taken(a, 0) & taken(b, start)
    found = rope_module._overlap(a, b, start, width)
    assert found == bool(shared) or (found and not all(_apart(dims, width) for dims in (a, b)))


def _apart(dims: tuple[tuple[int, int], ...], width: int) -> bool:
    """Whether elements of one tensor do not share memory, which is checked elsewhere."""
    reach = width
    for n, step in reversed(dims):
        if step < reach:
            return False
        reach += (n - 1) * step
    return True


def test_gradients_of_gradients() -> None:
    q, k = (heads_of(1, 3, heads, 8).double().requires_grad_() for heads in (2, 1))
    tables = fk.rope_tables(POSITIONS, 8, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda *x: fk.rope(*x, *tables), (q, k))
    assert torch.autograd.gradgradcheck(lambda *x: fk.rope(*x, *tables), (q, k))


# The registered op


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("ids", [None, torch.tensor([3, 1, 2])], ids=["in-order", "ids"])
def test_opcheck(ids: Tensor | None, grad: bool) -> None:
    q, k = (heads_of(2, 3, heads, 8, layout="bhsd").requires_grad_(grad) for heads in (2, 1))
    tables = fk.rope_tables(POSITIONS, 8)
    torch.library.opcheck(torch.ops.flashkernels.rope.default, (q, k, *tables, ids, 8, True, False, "torch"))
    if not grad:
        torch.library.opcheck(torch.ops.flashkernels.rope_inplace.default, (q, k, *tables, ids, 8, True, "torch"))


@pytest.mark.parametrize("inplace", [False, True], ids=["new", "in-place"])
def test_compiled_once_serves_every_length(inplace: bool) -> None:
    torch._dynamo.reset()
    tables = fk.rope_tables(POSITIONS, 16)

    def function(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return fk.rope(q * 2, k * 2, *tables, inplace=inplace)

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for seq in (5, 9, 12):
        q, k = heads_of(3, seq, 4, 16), heads_of(3, seq, 2, 16)
        with torch._dynamo.config.patch(error_on_recompile=seq > 5):
            found = compiled(q, k)
        torch.testing.assert_close(found, function(q, k))


# Errors


def arguments(**changed: Any) -> dict[str, Any]:
    cos, sin = fk.rope_tables(POSITIONS, 8)
    return {"q": heads_of(2, 5, 4, 8), "k": heads_of(2, 5, 2, 8), "cos": cos, "sin": sin} | changed


@pytest.mark.parametrize("grad", [False, True], ids=["unwatched", "watched"])
@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"k": 1}, TypeError, "k must be a torch.Tensor, got int"),
        ({"k": torch.ones(2, 5, 8)}, ValueError, r"k has 3 dimensions, shape \(2, 5, 8\); expected \(B, S, heads, D\)"),
        ({"k": torch.ones(2, 4, 2, 8)}, ValueError, r"k has shape \(2, 4, 2, 8\), q has \(2, 5, 4, 8\)"),
        ({"k": torch.ones(2, 5, 2, 8).half()}, TypeError, "k.dtype=torch.float16 differs from q.dtype=torch.float32"),
        ({"cos": torch.ones(32, 3)}, ValueError, r"sin has shape \(32, 4\), cos has \(32, 3\)"),
        ({"cos": torch.ones(4)}, ValueError, r"cos has shape \(4,\); expected \(positions, rotary_dim / 2\)"),
        ({"cos": torch.ones(())}, ValueError, "cos has no dimensions"),
        ({"cos": torch.ones(3, 4), "sin": torch.ones(3, 4)}, ValueError, "cos has 3 positions, q has 5"),
        ({"rotary_dim": 5}, ValueError, "rotary_dim=5 must be even and at most the last size of q, 8"),
        ({"rotary_dim": 10}, ValueError, "rotary_dim=10 must be even and at most the last size of q, 8"),
        ({"rotary_dim": 2.0}, TypeError, "rotary_dim=2.0 must be an int, got float"),
        ({"rotary_dim": 6}, ValueError, "cos has 4 columns; rotary_dim=6 needs 3 or 6"),
        ({"position_ids": torch.ones(5)}, TypeError, "position_ids.dtype=torch.float32; it must be torch.int32"),
        ({"position_ids": torch.ones(4).long()}, ValueError, r"position_ids has shape \(4,\); expected \(2, 5\) or"),
        ({"position_ids": [0]}, TypeError, "position_ids must be a torch.Tensor, got list"),
        ({"interleaved": "x"}, ValueError, "interleaved='x' is not one of False, True"),
        ({"inplace": "x"}, ValueError, "inplace='x' is not one of False, True"),
        ({"inplace": True, "k": torch.ones(2, 5, 1, 8).expand(2, 5, 2, 8)}, ValueError, "k has strides .* in place"),
    ],
)
def test_errors(changed: dict[str, Any], error: type[Exception], message: str, grad: bool) -> None:
    call = arguments(**changed)
    call["q"].requires_grad_(grad)
    with pytest.raises(error, match=message):
        fk.rope(**call)


def test_what_has_no_gradients() -> None:
    call = arguments()
    call["q"].requires_grad_()
    with pytest.raises(fk.UnsupportedError, match="inplace=True has no gradients"):
        fk.rope(**call, inplace=True)
    with torch.no_grad():
        assert fk.rope(**call, inplace=True)[0] is call["q"]
    call = arguments()
    call["cos"].requires_grad_()
    with pytest.raises(fk.UnsupportedError, match="cos and sin get no gradients"):
        fk.rope(**call)


# Tables


def rates(**settings: Any) -> list[float]:
    """Angles of position 1, from its cosine and sine."""
    cos, sin = fk.rope_tables(2, 8, dtype=torch.float64, **settings)
    return torch.atan2(sin[1], cos[1]).tolist()


def test_tables() -> None:
    cos, sin = fk.rope_tables(1_000_000, 8, base=500_000.0)
    angle = 999_999 * 500_000 ** (-2 / 8)
    assert cos.dtype == torch.float32 and cos.shape == sin.shape == (1_000_000, 4)
    assert cos[-1, 1].item() == pytest.approx(math.cos(angle)) and sin[-1, 1].item() == pytest.approx(math.sin(angle))
    assert fk.rope_tables(0, 8)[0].shape == (0, 4)


def test_scaled_tables() -> None:
    base = [10000 ** (-2 * i / 8) for i in range(4)]
    assert rates() == pytest.approx(base)
    assert rates(scaling="linear", factor=4.0) == pytest.approx([r / 4 for r in base])
    ntk = (10000 * 4.0 ** (8 / 6)) ** (-1 / 8)
    assert rates(scaling="ntk", factor=4.0) == pytest.approx([ntk ** (2 * i) for i in range(4)])
    assert rates(scaling="ntk", factor=4.0)[-1] == pytest.approx(base[-1] / 4)  # the slowest is scaled in full


def test_llama3_tables() -> None:
    """By wavelength, as Llama 3.1 has it: long ones are divided, short ones stay, a blend between."""
    want = []
    for rate in (10000 ** (-2 * i / 8) for i in range(4)):
        length = 2 * math.pi / rate
        if length > 512 / 1.0:
            want.append(rate / 8)
        elif length < 512 / 4.0:
            want.append(rate)
        else:
            smooth = (512 / length - 1.0) / (4.0 - 1.0)
            want.append((1 - smooth) * rate / 8 + smooth * rate)
    assert rates(scaling="llama3", factor=8.0, original_max_position=512) == pytest.approx(want)


def test_yarn_tables() -> None:
    """Corrections by dimension, as YaRN has them: low 0 and high 3 for this length; and the attention factor."""
    low = math.floor(8 * math.log(512 / (32 * 2 * math.pi)) / (2 * math.log(10000)))
    high = math.ceil(8 * math.log(512 / (1 * 2 * math.pi)) / (2 * math.log(10000)))
    want = []
    for i, rate in enumerate(10000 ** (-2 * i / 8) for i in range(4)):
        ramp = min(1.0, max(0.0, (i - low) / (high - low)))
        want.append(rate / 4 * ramp + rate * (1 - ramp))
    settings: dict[str, Any] = {"scaling": "yarn", "factor": 4.0, "original_max_position": 512}
    assert rates(**settings) == pytest.approx(want)
    cos, _ = fk.rope_tables(1, 8, **settings)
    assert cos[0, 0].item() == pytest.approx(0.1 * math.log(4) + 1)
    assert fk.rope_tables(1, 8, **settings, attention_factor=1.0)[0][0, 0] == 1


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"dim": 7}, ValueError, "dim=7 must be even and at least 2"),
        ({"dim": 8.0}, TypeError, "dim=8.0 must be an int, got float"),
        ({"max_position": -1}, ValueError, "max_position=-1 must not be negative"),
        ({"base": 1.0}, ValueError, "base=1.0 must be more than 1"),
        ({"factor": 0.5}, ValueError, "factor=0.5 must be at least 1"),
        ({"scaling": "longrope"}, ValueError, "scaling='longrope' is not one of None, 'linear'"),
        ({"scaling": "yarn"}, ValueError, "original_max_position=None: scaling='yarn' needs the length of training"),
        ({"original_max_position": "a"}, TypeError, "original_max_position='a' must be an int, got str"),
        ({"beta_fast": 0.0}, ValueError, "beta_fast=0.0 must be positive"),
        ({"beta_slow": "a"}, TypeError, "beta_slow='a' must be a number, got str"),
        ({"attention_factor": math.nan}, ValueError, "attention_factor=nan must be finite"),
        ({"low_freq_factor": 4.0}, ValueError, "low_freq_factor=4.0 must be less than high_freq_factor=4.0"),
    ],
)
def test_table_errors(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fk.rope_tables(**({"max_position": 4, "dim": 8} | settings))
