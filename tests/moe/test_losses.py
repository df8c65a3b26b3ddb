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


def test_gradients() -> None:
    logits = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    ids = fk.moe.route(logits.detach(), 2).ids
    assert torch.autograd.gradcheck(lambda x: fk.moe.balance_loss(x, ids), (logits,))
    assert torch.autograd.gradcheck(fk.moe.z_loss, (logits,))
