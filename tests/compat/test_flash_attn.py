"""flash-attn's functions against its documented semantics, computed row by row in fp64 straight from the definition."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flashkernels.compat.flash_attn as fa
from flashkernels.compat.flash_attn.bert_padding import pad_input, unpad_input
from flashkernels.compat.flash_attn.probabilities import signed
from flashkernels.dispatch import UnsupportedError

# An fp64 result is off by at most about 2 * (headdim + S_k) * max|score| roundings of 2.2e-16: here 2 * 20 * 10.
FP64 = {"rtol": 1e-13, "atol": 1e-13}

BATCH, HEADS, HEAD_DIM = 2, 4, 12


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def cu(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)


def definition(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    key_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of dense (B, S, H, D) tensors in fp64, one row and one visible key at a time."""
    q, k, v = q.double(), k.double(), v.double()
    (batch, s_q, heads, head_dim), (_, s_k, kv_heads, _) = q.shape, k.shape
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    left, right = window_size[0], 0 if causal else window_size[1]

    def row(b: int, h: int, i: int) -> tuple[Tensor, Tensor]:
        position = i + s_k - s_q
        kv_head = h // (heads // kv_heads)
        scores, visible = [], []
        for j in range(s_k):
            if (left >= 0 and j < position - left) or (right >= 0 and j > position + right):
                continue
            if key_mask is not None and not key_mask[b, j]:
                continue
            score = scale * (q[b, i, h] * k[b, j, kv_head]).sum()
            if softcap > 0:
                score = softcap * torch.tanh(score / softcap)
            if alibi_slopes is not None:
                slope = alibi_slopes[h] if alibi_slopes.dim() == 1 else alibi_slopes[b, h]
                score = score - slope.double() * abs(position - j)
            scores.append(score)
            visible.append(j)
        if not visible:
            return q.new_zeros(v.shape[-1]), q.new_full((), -math.inf)
        weights = torch.stack(scores).exp()
        total = weights.sum()
        return (weights[:, None] * v[b, visible, kv_head]).sum(0) / total, total.log()

    places = [(b, h, i) for b in range(batch) for h in range(heads) for i in range(s_q)]
    rows = [row(*place) for place in places]
    out = torch.stack([of_row for of_row, _ in rows]).view(batch, heads, s_q, -1).transpose(1, 2)
    return out, torch.stack([lse for _, lse in rows]).view(batch, heads, s_q)


def plain_torch(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) the way a tutorial writes it, every step in the dtype of its input."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return (scores.softmax(-1) @ v).transpose(1, 2), scores.logsumexp(-1)


Attend = Callable[..., tuple[Tensor, Tensor]]


def ragged(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, attend: Attend = definition, **features: Any
) -> tuple[Tensor, Tensor]:
    """(out (total_q, H, D), lse (H, total_q)): `attend` over one sequence after another."""
    slopes = features.pop("alibi_slopes", None)
    lengths_q, lengths_k = cu_q.diff().tolist(), cu_k.diff().tolist()
    outs, lses = [], []
    for b, rows in enumerate(zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True)):
        if lengths_q[b] == 0:
            continue
        if slopes is not None:
            features["alibi_slopes"] = slopes if slopes.dim() == 1 else slopes[b]
        out, lse = attend(*(x[None] for x in rows), **features)
        outs.append(out[0])
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, dim=1)


# One call of each function: (the tensors that take a gradient, the positional arguments after them).
CALLS: dict[str, tuple[tuple[Tensor, ...], tuple[Any, ...]]] = {
    "flash_attn_func": ((rand(2, 4, 4, 12, seed=1), rand(2, 7, 2, 12, seed=2), rand(2, 7, 2, 12, seed=3)), ()),
    "flash_attn_kvpacked_func": ((rand(2, 4, 4, 12, seed=1), rand(2, 7, 2, 2, 12, seed=2)), ()),
    "flash_attn_qkvpacked_func": ((rand(2, 6, 3, 4, 12, seed=1),), ()),
    "flash_attn_varlen_func": (
        (rand(8, 4, 12, seed=1), rand(11, 2, 12, seed=2), rand(11, 2, 12, seed=3)),
        (cu(2, 6), cu(7, 4), 6, 7),
    ),
    "flash_attn_varlen_kvpacked_func": (
        (rand(8, 4, 12, seed=1), rand(11, 2, 2, 12, seed=2)),
        (cu(2, 6), cu(7, 4), 6, 7),
    ),
    "flash_attn_varlen_qkvpacked_func": ((rand(9, 3, 4, 12, seed=1),), (cu(3, 6), 6)),
}


def expected(
    tensors: tuple[Tensor, ...], rest: tuple[Any, ...], attend: Attend = definition, **features: Any
) -> tuple[Tensor, Tensor]:
    """What a row of CALLS has to give; packed tensors are taken apart by plain indexing."""
    packed = tensors[-1]
    if len(tensors) < 3:
        tensors = (*tensors[:-1], *(packed[..., part, :, :] for part in range(packed.shape[-3])))
    if not rest:
        return attend(*tensors, **features)
    return ragged(*tensors, rest[0], rest[1] if len(rest) == 4 else rest[0], attend=attend, **features)


SLOPES = rand(HEADS, seed=7, dtype=torch.float32).abs()
SLOPES_BY_BATCH = rand(BATCH, HEADS, seed=8, dtype=torch.float32).abs()
EVERYTHING = {
    "causal": True,
    "softmax_scale": 0.4,
    "window_size": (3, 0),
    "softcap": 2.0,
    "alibi_slopes": SLOPES_BY_BATCH,
}
FEATURES = [
    pytest.param({}, id="plain"),
    pytest.param({"causal": True}, id="causal"),
    pytest.param({"softmax_scale": 0.5}, id="scale"),
    pytest.param({"window_size": (2, 1)}, id="window"),
    pytest.param({"window_size": (0, 0)}, id="window-diagonal"),
    pytest.param({"window_size": (3, -1)}, id="window-left"),
    pytest.param({"window_size": (-1, 2)}, id="window-right"),
    pytest.param({"causal": True, "window_size": (2, 4)}, id="causal-window"),
    pytest.param({"softcap": 1.5}, id="softcap"),
    pytest.param({"softcap": -1.0}, id="softcap-below-0-is-off"),
    pytest.param({"alibi_slopes": SLOPES}, id="alibi"),
    pytest.param({"alibi_slopes": SLOPES_BY_BATCH}, id="alibi-by-batch"),
    pytest.param({"causal": True, "alibi_slopes": SLOPES}, id="causal-alibi"),
    pytest.param(EVERYTHING, id="everything"),
]


def check(found: tuple[Tensor, Tensor, None], want: tuple[Tensor, Tensor]) -> None:
    out, softmax_lse, probs = found
    torch.testing.assert_close(out, want[0], **FP64)
    torch.testing.assert_close(softmax_lse, want[1], **FP64)
    assert probs is None


# Values --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("name", CALLS)
def test_function_computes_the_definition(name: str, features: dict[str, Any]) -> None:
    tensors, rest = CALLS[name]
    check(getattr(fa, name)(*tensors, *rest, **features, return_attn_probs=True), expected(tensors, rest, **features))


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(
    ("s_q", "s_k"),
    [
        pytest.param(5, 5, id="square"),
        pytest.param(3, 8, id="more-keys"),
        pytest.param(8, 3, id="more-queries-some-see-nothing"),
        pytest.param(1, 6, id="one-query"),
    ],
)
@pytest.mark.parametrize("features", [pytest.param({"causal": True}, id="causal"), pytest.param(EVERYTHING, id="all")])
def test_lengths_and_head_groups(features: dict[str, Any], s_q: int, s_k: int, kv_heads: int) -> None:
    q = rand(BATCH, s_q, HEADS, HEAD_DIM, seed=1)
    k, v = rand(BATCH, s_k, kv_heads, HEAD_DIM, seed=2), rand(BATCH, s_k, kv_heads, HEAD_DIM, seed=3)
    check(fa.flash_attn_func(q, k, v, **features, return_attn_probs=True), definition(q, k, v, **features))


@pytest.mark.parametrize("features", [pytest.param({"causal": True}, id="causal"), pytest.param(EVERYTHING, id="all")])
@pytest.mark.parametrize(
    ("cu_q", "cu_k"),
    [
        pytest.param(cu(4, 0), cu(3, 5), id="no-queries"),
        pytest.param(cu(4, 2), cu(0, 5), id="no-keys"),
        pytest.param(cu(6, 3), cu(2, 3), id="more-queries"),
    ],
)
def test_ragged_lengths(features: dict[str, Any], cu_q: Tensor, cu_k: Tensor) -> None:
    q = rand(int(cu_q[-1]), HEADS, HEAD_DIM, seed=1)
    k, v = rand(int(cu_k[-1]), 2, HEAD_DIM, seed=2), rand(int(cu_k[-1]), 2, HEAD_DIM, seed=3)
    found = fa.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, int(cu_q.diff().max()), int(cu_k.diff().max()), **features, return_attn_probs=True
    )
    check(found, ragged(q, k, v, cu_q, cu_k, **features))


@pytest.mark.parametrize("name", CALLS)
def test_without_return_attn_probs_the_result_is_one_tensor(name: str) -> None:
    tensors, rest = CALLS[name]
    out = getattr(fa, name)(*tensors, *rest)
    torch.testing.assert_close(out, expected(tensors, rest)[0], **FP64)


@pytest.mark.parametrize("name", CALLS)
def test_positional_arguments_mean_what_they_mean_in_flash_attn(name: str) -> None:
    tensors, rest = CALLS[name]
    found = getattr(fa, name)(*tensors, *rest, 0.0, 0.4, True, (3, 0), 2.0, SLOPES_BY_BATCH, True, True)
    check(found, expected(tensors, rest, **EVERYTHING))


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        pytest.param("cpu", torch.float32, id="cpu-fp32"),
        pytest.param("cpu", torch.bfloat16, id="cpu-bf16"),
        pytest.param("cpu", torch.float16, id="cpu-fp16"),
        pytest.param("cuda", torch.bfloat16, id="cuda-bf16", marks=pytest.mark.gpu),
        pytest.param("cuda", torch.float16, id="cuda-fp16", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("name", CALLS)
def test_error_is_at_most_twice_that_of_plain_torch(name: str, device: str, dtype: torch.dtype) -> None:
    tensors, rest = CALLS[name]
    tensors = tuple(x.to(dtype) for x in tensors)
    out = getattr(fa, name)(*(x.to(device) if isinstance(x, Tensor) else x for x in (*tensors, *rest)))
    assert (out.dtype, out.device.type) == (dtype, device)
    want, plain = expected(tensors, rest)[0], expected(tensors, rest, attend=plain_torch)[0]
    assert off(out, want) <= 2 * off(plain, want) + torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_softmax_lse_is_fp32_in_every_dtype(name: str, dtype: torch.dtype) -> None:
    tensors, rest = CALLS[name]
    tensors = tuple(x.to(dtype) for x in tensors)
    _, softmax_lse, _ = getattr(fa, name)(*tensors, *rest, return_attn_probs=True)
    assert softmax_lse.dtype == torch.float32
    # Whatever the inputs' dtype, the scores are summed in fp32: compare with plain torch in fp32.
    want, plain = (expected(tuple(x.float() for x in tensors), rest, attend=f)[1] for f in (definition, plain_torch))
    assert off(softmax_lse, want) <= 2 * off(plain, want) + torch.finfo(torch.float32).eps


def off(found: Tensor, want: Tensor) -> float:
    return float((found.cpu().double() - want).abs().max())


# Gradients -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "features",
    [pytest.param({}, id="plain"), pytest.param({"causal": True}, id="causal"), pytest.param(EVERYTHING, id="all")],
)
@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_those_of_the_definition(name: str, features: dict[str, Any]) -> None:
    tensors, rest = CALLS[name]
    ours, theirs = ([x.clone().requires_grad_() for x in tensors] for _ in range(2))
    out = getattr(fa, name)(*ours, *rest, **features)
    want, _ = expected(tuple(theirs), rest, **features)
    upstream = rand(*want.shape, seed=9)
    out.backward(upstream)
    want.backward(upstream)
    for mine, its in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, its.grad, **FP64)


def test_rows_that_see_nothing_take_and_give_no_gradient() -> None:
    tensors = [rand(1, s, HEADS, HEAD_DIM, seed=s).requires_grad_() for s in (6, 2, 2)]
    out, softmax_lse, _ = fa.flash_attn_func(*tensors, causal=True, return_attn_probs=True)
    assert out[:, :4].eq(0).all() and softmax_lse[:, :, :4].eq(-math.inf).all()
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in tensors)
    assert tensors[0].grad[:, :4].eq(0).all()


@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_are_the_same_bits_on_every_run(deterministic: bool) -> None:
    def gradient() -> Tensor:
        qkv = rand(2, 40, 3, 4, 16, dtype=torch.float32).requires_grad_()
        fa.flash_attn_qkvpacked_func(qkv, causal=True, deterministic=deterministic).sum().backward()
        return qkv.grad

    assert torch.equal(gradient(), gradient())


# Padded batches ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_unpad_varlen_pad_equals_dense_attention_with_the_padding_masked(causal: bool) -> None:
    mask = torch.tensor([[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1], [1, 0, 0, 0, 0, 0]])
    batch, seqlen = mask.shape
    ours, theirs = (rand(batch, seqlen, 3, HEADS, HEAD_DIM).requires_grad_() for _ in range(2))

    rows, indices, cu_seqlens, longest, _ = unpad_input(ours, mask)
    packed = fa.flash_attn_varlen_qkvpacked_func(rows, cu_seqlens, longest, causal=causal)
    out = pad_input(packed, indices, batch, seqlen)

    dense, _ = definition(*theirs.unbind(2), causal=causal, key_mask=mask)
    want = dense * mask[:, :, None, None]
    torch.testing.assert_close(out, want, **FP64)
    upstream = rand(*want.shape, seed=9)
    out.backward(upstream)
    want.backward(upstream)
    torch.testing.assert_close(ours.grad, theirs.grad, **FP64)


# A paged cache -------------------------------------------------------------------------------------------------


def paged(x: Tensor, lengths: Tensor, page: int, spare: int = 3) -> tuple[Tensor, Tensor]:
    """The rows of ragged x (total, H, D) in shuffled pages full of NaN elsewhere, and the table that finds them."""
    counts = lengths.diff().tolist()
    needed = [-(-n // page) for n in counts]
    order = torch.randperm(sum(needed) + spare, generator=torch.Generator().manual_seed(5)).tolist()
    pages = x.new_full((len(order), page, *x.shape[1:]), math.nan)
    table = torch.zeros(len(counts), max(1, *needed), dtype=torch.int32)
    for b, rows in enumerate(x.split(counts)):
        for i, part in enumerate(rows.split(page) if len(rows) else ()):
            table[b, i] = order.pop()
            pages[table[b, i], : len(part)] = part
    return pages, table


@pytest.mark.parametrize("features", [pytest.param({}, id="plain"), pytest.param(EVERYTHING, id="all")])
@pytest.mark.parametrize("page", [1, 3, 64])
@pytest.mark.parametrize(
    ("cu_q", "cu_k"),
    [
        pytest.param(cu(2, 6), cu(7, 4), id="ragged"),
        pytest.param(cu(1, 1), cu(9, 5), id="decode"),
        pytest.param(cu(4, 2), cu(0, 5), id="no-keys"),
    ],
)
def test_pages_hold_what_a_block_table_says(features: dict[str, Any], page: int, cu_q: Tensor, cu_k: Tensor) -> None:
    q = rand(int(cu_q[-1]), HEADS, HEAD_DIM, seed=1)
    k, v = rand(int(cu_k[-1]), 2, HEAD_DIM, seed=2), rand(int(cu_k[-1]), 2, HEAD_DIM, seed=3)
    (k_pages, table), (v_pages, _) = paged(k, cu_k, page), paged(v, cu_k, page)
    longest = int(cu_q.diff().max()), int(cu_k.diff().max())
    found = fa.flash_attn_varlen_func(
        q, k_pages, v_pages, cu_q, cu_k, *longest, **features, return_attn_probs=True, block_table=table
    )
    check(found, ragged(q, k, v, cu_q, cu_k, **features))


def test_the_table_may_be_part_of_a_larger_one() -> None:
    cu_q, cu_k = cu(2, 6), cu(7, 4)
    q, k, v = rand(8, HEADS, HEAD_DIM, seed=1), rand(11, 2, HEAD_DIM, seed=2), rand(11, 2, HEAD_DIM, seed=3)
    (k_pages, table), (v_pages, _) = paged(k, cu_k, 3), paged(v, cu_k, 3)
    part = torch.cat((table, table), 1)[:, : table.shape[1]]
    out = fa.flash_attn_varlen_func(q, k_pages, v_pages, cu_q, cu_k, 6, 7, block_table=part)
    torch.testing.assert_close(out, ragged(q, k, v, cu_q, cu_k)[0], **FP64)


def test_a_paged_cache_takes_no_gradients() -> None:
    pages = rand(4, 3, 2, HEAD_DIM, seed=2).requires_grad_()
    table = torch.zeros(2, 3, dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="block_table: there are no gradients through the pages"):
        fa.flash_attn_varlen_func(rand(8, HEADS, HEAD_DIM), pages, pages, cu(2, 6), cu(7, 4), 6, 7, block_table=table)


def test_a_table_that_is_too_short_is_named() -> None:
    pages, table = rand(4, 3, 2, HEAD_DIM, seed=2), torch.zeros(2, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"block_table has shape \(2, 2\); expected \(2, at least 3\)"):
        fa.flash_attn_varlen_func(rand(8, HEADS, HEAD_DIM), pages, pages, cu(2, 6), cu(7, 4), 6, 7, block_table=table)


# The interface -------------------------------------------------------------------------------------------------

OPTIONS = [
    ("dropout_p", 0.0),
    ("softmax_scale", None),
    ("causal", False),
    ("window_size", (-1, -1)),
    ("softcap", 0.0),
    ("alibi_slopes", None),
    ("deterministic", False),
    ("return_attn_probs", False),
]
RAGGED = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
SIGNATURES_OF_2_8 = {
    "flash_attn_func": (["q", "k", "v"], OPTIONS),
    "flash_attn_kvpacked_func": (["q", "kv"], OPTIONS),
    "flash_attn_qkvpacked_func": (["qkv"], OPTIONS),
    "flash_attn_varlen_func": (["q", "k", "v", *RAGGED], [*OPTIONS, ("block_table", None)]),
    "flash_attn_varlen_kvpacked_func": (["q", "kv", *RAGGED], OPTIONS),
    "flash_attn_varlen_qkvpacked_func": (["qkv", "cu_seqlens", "max_seqlen"], OPTIONS),
}


@pytest.mark.parametrize("name", SIGNATURES_OF_2_8)
def test_signature_is_that_of_flash_attn(name: str) -> None:
    parameters = inspect.signature(getattr(fa, name)).parameters.values()
    required, options = SIGNATURES_OF_2_8[name]
    assert [p.name for p in parameters if p.default is p.empty] == required
    assert [(p.name, p.default) for p in parameters if p.default is not p.empty] == options
    assert {p.kind for p in parameters} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


def test_every_function_is_exported() -> None:
    assert set(fa.__all__) - {"flash_attn_with_kvcache"} == set(SIGNATURES_OF_2_8) == set(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_dropout_keeps_the_signs_it_returns(name: str) -> None:
    """The weights that are not negative, times V, are the output; all of them are the softmax."""
    tensors, rest = CALLS[name]
    out, _, probs = getattr(fa, name)(*tensors, *rest, dropout_p=0.4, return_attn_probs=True)
    packed = tensors[-1]
    v = packed if len(tensors) == 3 else packed.select(-3, -1)
    if rest:  # ragged
        cu_q, cu_k = rest[0], rest[0 if "qkvpacked" in name else 1]
        v, out = (
            torch.nn.utils.rnn.pad_sequence(x.split(cu.diff().tolist()), batch_first=True)
            for x, cu in ((v, cu_k), (out, cu_q))
        )
    assert probs.shape == (v.shape[0], out.shape[2], out.shape[1], v.shape[1]) and probs.dtype == tensors[0].dtype
    sums = probs.abs().sum(-1)
    torch.testing.assert_close(sums, (sums > 0).to(sums))
    assert 0.2 < (probs < 0).sum() / (probs != 0).sum() < 0.6
    kept = probs.clamp(min=0) / 0.6
    v = v.repeat_interleave(out.shape[2] // v.shape[2], 2)
    torch.testing.assert_close(out, (kept @ v.transpose(1, 2)).transpose(1, 2))


def test_the_softmax_with_signs_is_the_softmax() -> None:
    (q, k, v), _ = CALLS["flash_attn_func"]
    slopes = torch.tensor([0.5, 0.1, 0.2, 1.0])
    features = {"causal": True, "window_size": (4, -1), "softcap": 2.0, "alibi_slopes": slopes}
    dropped, plain = (
        fa.flash_attn_func(q, k, v, dropout_p, **features, return_attn_probs=True) for dropout_p in (1e-9, 0.0)
    )
    torch.testing.assert_close(dropped[:2], plain[:2])
    eye = torch.eye(7, dtype=q.dtype)[None, :, None].expand(2, 7, 2, 7)
    want = fa.flash_attn_func(q, k, eye, **features)
    torch.testing.assert_close(dropped[2], want.transpose(1, 2))


def test_dropout_follows_torchs_seed_and_gives_gradients() -> None:
    def gradient(seed: int) -> Tensor:
        torch.manual_seed(seed)
        qkv = rand(2, 20, 3, 4, 16, dtype=torch.float32).requires_grad_()
        fa.flash_attn_qkvpacked_func(qkv, 0.3, causal=True, deterministic=True).square().sum().backward()
        return qkv.grad

    assert torch.equal(gradient(1), gradient(1)) and not torch.equal(gradient(1), gradient(2))


def test_signs_of_a_large_softmax_are_refused() -> None:
    q, k = torch.zeros(1, 40000, 2, 1), torch.zeros(1, 1000, 1, 1)
    with pytest.raises(UnsupportedError, match="makes the whole softmax, here 1 x 2 x 40000 x 1000; it is for tests"):
        signed(q, k, torch.zeros(1, dtype=torch.int64), 0.1, None, False, (-1, -1), 0.0, None)


@pytest.mark.parametrize("dropout_p", [-0.1, 1.0, math.nan])
@pytest.mark.parametrize("name", CALLS)
def test_impossible_dropout_is_an_error_of_the_caller(name: str, dropout_p: float) -> None:
    tensors, rest = CALLS[name]
    with pytest.raises(ValueError, match=rf"dropout_p={dropout_p} is not in \[0, 1\)") as raised:
        getattr(fa, name)(*tensors, *rest, dropout_p=dropout_p)
    assert not isinstance(raised.value, UnsupportedError)


@pytest.mark.parametrize(
    ("name", "shapes", "message"),
    [
        ("flash_attn_qkvpacked_func", [(2, 5, 2, 4, 8)], r"qkv has shape \(2, 5, 2, 4, 8\), not \(batch, seqlen, 3"),
        ("flash_attn_qkvpacked_func", [(5, 3, 4, 8)], r"qkv has shape \(5, 3, 4, 8\), not \(batch, seqlen, 3"),
        ("flash_attn_kvpacked_func", [(2, 5, 4, 8), (2, 5, 3, 4, 8)], r"kv has shape \(2, 5, 3, 4, 8\), not"),
        ("flash_attn_varlen_qkvpacked_func", [(9, 2, 4, 8)], r"qkv has shape \(9, 2, 4, 8\), not \(total, 3"),
        ("flash_attn_varlen_kvpacked_func", [(8, 4, 8), (11, 4, 8)], r"kv has shape \(11, 4, 8\), not \(total_k, 2"),
    ],
)
def test_a_wrongly_packed_tensor_is_named_with_its_shape(name: str, shapes: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(fa, name)(*(rand(*shape) for shape in shapes), *CALLS[name][1])


def test_what_is_no_tensor_is_named() -> None:
    with pytest.raises(TypeError, match=r"qkv must be a torch.Tensor, got NoneType"):
        fa.flash_attn_qkvpacked_func(None)
    with pytest.raises(TypeError, match=r"kv must be a torch.Tensor, got list"):
        fa.flash_attn_kvpacked_func(rand(2, 5, 4, 8), [1])
    pages = rand(4, 3, 2, HEAD_DIM)
    with pytest.raises(TypeError, match=r"block_table must be a torch.Tensor, got list"):
        fa.flash_attn_varlen_func(
            rand(8, HEADS, HEAD_DIM), pages, pages, cu(2, 6), cu(7, 4), 6, 7,
            block_table=[[0, 1, 2]] * 2,
        )  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_function_compiles_without_a_graph_break(name: str) -> None:
    tensors, rest = CALLS[name]
    torch.compiler.reset()
    compiled = torch.compile(getattr(fa, name), fullgraph=True, backend="aot_eager")
    check(compiled(*tensors, *rest, causal=True, return_attn_probs=True), expected(tensors, rest, causal=True))
