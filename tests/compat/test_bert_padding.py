"""unpad_input, pad_input and index_first_axis: flash-attn 2.8's results, and gradients through them."""

from __future__ import annotations

import inspect

import pytest
import torch

from flashkernels.compat.flash_attn import bert_padding
from flashkernels.compat.flash_attn.bert_padding import index_first_axis, pad_input, unpad_input

MASK = torch.tensor([[1, 1, 1, 0], [0, 0, 0, 0], [0, 1, 0, 1]])
KEPT = [(0, 0), (0, 1), (0, 2), (2, 1), (2, 3)]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.float32], ids=str)
@pytest.mark.parametrize("tail", [(), (5,), (2, 3)], ids=["no-tail", "vector", "matrix"])
def test_unpad_input_keeps_the_rows_of_the_mask_in_order(dtype: torch.dtype, tail: tuple[int, ...]) -> None:
    x = torch.randn(3, 4, *tail)
    rows, indices, cu_seqlens, longest, used = unpad_input(x, MASK.to(dtype))
    assert torch.equal(rows, torch.stack([x[b, s] for b, s in KEPT]))
    assert indices.dtype == torch.int64 and indices.tolist() == [4 * b + s for b, s in KEPT]
    assert cu_seqlens.dtype == torch.int32 and cu_seqlens.tolist() == [0, 3, 3, 5]
    assert type(longest) is int and longest == 3
    assert used.dtype == torch.int32 and used.tolist() == [3, 0, 2]


def test_unused_mask_keeps_rows_that_do_not_count_as_used() -> None:
    x = torch.randn(3, 4, 5)
    unused = torch.tensor([[0, 0, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]])
    rows, indices, cu_seqlens, longest, used = unpad_input(x, MASK, unused)
    kept = [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (2, 1), (2, 3)]
    assert torch.equal(rows, torch.stack([x[b, s] for b, s in kept]))
    assert indices.tolist() == [4 * b + s for b, s in kept]
    assert (cu_seqlens.tolist(), longest, used.tolist()) == ([0, 4, 5, 7], 4, [3, 0, 2])


@pytest.mark.parametrize("batch", [0, 2])
def test_nothing_kept_gives_no_rows(batch: int) -> None:
    rows, indices, cu_seqlens, longest, used = unpad_input(torch.randn(batch, 4, 5), torch.zeros(batch, 4))
    assert rows.shape == (0, 5) and indices.shape == (0,)
    assert (cu_seqlens.tolist(), longest, used.tolist()) == ([0] * (batch + 1), 0, [0] * batch)
    assert torch.equal(pad_input(rows, indices, batch, 4), torch.zeros(batch, 4, 5))


def test_unpad_input_takes_a_tensor_that_is_not_contiguous() -> None:
    x = torch.randn(4, 3, 5).transpose(0, 1)
    assert torch.equal(unpad_input(x, MASK)[0], unpad_input(x.contiguous(), MASK)[0])


@pytest.mark.parametrize("tail", [(), (5,), (2, 3)], ids=["no-tail", "vector", "matrix"])
def test_pad_input_puts_the_rows_back_and_zeros_elsewhere(tail: tuple[int, ...]) -> None:
    x = torch.randn(3, 4, *tail, dtype=torch.bfloat16)
    rows, indices, *_ = unpad_input(x, MASK)
    padded = pad_input(rows, indices, 3, 4)
    assert padded.dtype == torch.bfloat16
    assert torch.equal(padded, torch.where(MASK.bool().view(3, 4, *(1 for _ in tail)), x, 0))


def test_gradients_pass_through_padding_and_unpadding() -> None:
    x = torch.randn(3, 4, 2, dtype=torch.float64, requires_grad=True)

    def there_and_back(x: torch.Tensor) -> torch.Tensor:
        rows, indices, *_ = unpad_input(x, MASK)
        return pad_input(rows.square(), indices, 3, 4)

    assert torch.autograd.gradcheck(there_and_back, (x,))
    there_and_back(x).sum().backward()
    assert torch.equal(x.grad, 2 * x.detach() * MASK[:, :, None])


def test_index_first_axis_adds_up_the_gradients_of_a_row_taken_twice() -> None:
    x = torch.randn(3, 2, requires_grad=True)
    rows = index_first_axis(x, torch.tensor([2, 0, 2]))
    assert torch.equal(rows, x[[2, 0, 2]])
    rows.sum().backward()
    assert x.grad.tolist() == [[1.0, 1.0], [0.0, 0.0], [2.0, 2.0]]


@pytest.mark.parametrize(
    ("mask", "unused", "message"),
    [
        (torch.ones(3, 5), None, r"attention_mask has shape \(3, 5\), not .* \(3, 4\)"),
        (torch.ones(3, 4), torch.ones(12), r"unused_mask has shape \(12,\), not .* \(3, 4\)"),
    ],
    ids=["attention_mask", "unused_mask"],
)
def test_a_mask_of_the_wrong_shape_is_named(mask: torch.Tensor, unused: torch.Tensor | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        unpad_input(torch.randn(3, 4, 5), mask, unused)


def test_indices_that_do_not_match_the_rows_are_named() -> None:
    with pytest.raises(ValueError, match=r"indices has shape \(2,\), not one place for each of the 3 rows"):
        pad_input(torch.randn(3, 5), torch.tensor([0, 1]), 1, 4)
    with pytest.raises(ValueError, match="batch=-1 must not be negative"):
        pad_input(torch.randn(2, 5), torch.tensor([0, 1]), -1, 4)


def test_a_batch_without_sequences_is_named() -> None:
    with pytest.raises(ValueError, match=r"hidden_states has shape \(3,\); expected \(batch, seqlen"):
        unpad_input(torch.randn(3), torch.ones(3))


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("unpad_input", {"hidden_states": None, "attention_mask": None, "unused_mask": "None"}),
        ("pad_input", {"hidden_states": None, "indices": None, "batch": None, "seqlen": None}),
        ("index_first_axis", {"input": None, "indices": None}),
    ],
)
def test_signature_is_that_of_flash_attn(name: str, parameters: dict[str, str | None]) -> None:
    found = inspect.signature(getattr(bert_padding, name)).parameters.values()
    assert {p.name: None if p.default is p.empty else repr(p.default) for p in found} == parameters
    assert [p.name for p in found] == list(parameters)
