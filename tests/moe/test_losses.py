"""Balance loss and z-loss, against their definitions."""

from __future__ import annotations

import pytest
import torch

import flashkernels as fk


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_balance(score: str) -> None:
    logits = torch.randn(20, 6)
    ids = fk.moe.route(logits, 2, score=score).ids
    value = logits.softmax(-1) if score == "softmax" else torch.sigmoid(logits) / torch.sigmoid(logits).sum(-1, True)
    share = torch.tensor([(ids == e).sum().item() / ids.numel() for e in range(6)])
    torch.testing.assert_close(fk.moe.balance_loss(logits, ids, score=score), 6 * (share * value.mean(0)).sum())


def test_z() -> None:
    logits = torch.randn(20, 6)
    torch.testing.assert_close(fk.moe.z_loss(logits), logits.exp().sum(-1).log().square().mean())


def test_tokens_not_in_use_do_not_count() -> None:
    logits, used = torch.randn(20, 6), torch.tensor([12], dtype=torch.int32)
    ids = fk.moe.route(logits, 2, used=used).ids
    logits[15] = torch.nan
    torch.testing.assert_close(fk.moe.z_loss(logits, used=used), fk.moe.z_loss(logits[:12]))
    want = fk.moe.balance_loss(logits[:12], ids[:12])
    torch.testing.assert_close(fk.moe.balance_loss(logits, ids, used=used), want)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_tokens_not_in_use_have_no_gradient(score: str) -> None:
    logits, used = torch.randn(6, 4), torch.tensor([[4]], dtype=torch.int32)
    logits[4], logits[5] = torch.nan, torch.inf
    logits.requires_grad_()
    ids = torch.tensor([[0, 1], [1, 2], [3, -1], [0, 2], [1, 99], [3, 3]])  # those of tokens past it do not count
    loss = fk.moe.balance_loss(logits, ids, score=score, used=used)
    torch.testing.assert_close(loss, fk.moe.balance_loss(logits[:4], ids[:4], score=score))
    (loss + fk.moe.z_loss(logits, used=used)).backward()
    assert logits.grad is not None and logits.grad[:4].isfinite().all() and (logits.grad[4:] == 0).all()


def test_a_token_with_all_experts_hidden_adds_nothing_to_z() -> None:
    logits = torch.randn(5, 3)
    logits[3], logits[1, 2] = -torch.inf, -torch.inf
    logits.requires_grad_()
    loss = fk.moe.z_loss(logits)
    torch.testing.assert_close(loss, fk.moe.z_loss(logits[[0, 1, 2, 4]]) * 4 / 5)
    loss.backward()
    assert logits.grad is not None and logits.grad.isfinite().all() and (logits.grad[3] == 0).all()


def test_bad_values_are_named() -> None:
    with pytest.raises(ValueError, match="score='nonsense'"):
        fk.moe.balance_loss(torch.randn(3, 4), torch.tensor([[0], [1], [2]]), score="nonsense")
    with pytest.raises(ValueError, match=r"ids has shape \(3,\)"):
        fk.moe.balance_loss(torch.randn(3, 4), torch.tensor([0, 1, 2]))


def test_gradients() -> None:
    logits = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    ids = fk.moe.route(logits.detach(), 2).ids
    assert torch.autograd.gradcheck(lambda x: fk.moe.balance_loss(x, ids), (logits,))
    assert torch.autograd.gradcheck(fk.moe.z_loss, (logits,))
