"""The prepared layer: what its parts are asked for, and the router's dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashkernels as fk
from flashkernels.moe import inference
from flashkernels.moe.rows import Rounding


@pytest.mark.parametrize(("impl", "want"), [("hopper", "auto"), ("triton", "triton"), ("torch", "torch")])
def test_hopper_leaves_rounding_to_any_implementation(impl: str, want: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `gemm.product` does: the Hopper kernel does not round all rows."""
    asked: list[str] = []

    def find(tensors: tuple[Any, ...], call: Rounding) -> Any:
        asked.append(call.impl)
        raise fk.UnsupportedError("asked")

    monkeypatch.setattr(inference.roundings, "find", find)
    monkeypatch.setattr(inference.layers, "known", {})
    monkeypatch.setattr(inference.layers, "last", None)
    routing = fk.moe.route(torch.randn(3, 2), 1)
    w = [fk.moe.quantise(torch.randn(2, *shape), "int8") for shape in ((16, 16), (16, 8))]
    with pytest.raises(fk.UnsupportedError, match="asked"):
        fk.moe.layer(torch.randn(3, 16), None, *w, routing=routing, impl=impl)
    assert asked == [want]


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_leaves_the_router_wide(dtype: torch.dtype, trained: bool) -> None:
    x, router, bias = torch.randn(5, 16).to(dtype), torch.randn(4, 16, requires_grad=trained), torch.randn(4)
    w_gate_up, w_down = torch.randn(4, 24, 16), torch.randn(4, 16, 12)
    with torch.autocast("cpu", torch.bfloat16):
        found = fk.moe.layer(x, router, w_gate_up, w_down, router_bias=bias, return_routing=True)
    assert isinstance(found, fk.moe.Layered) and found.logits is not None
    assert found.logits.dtype == torch.float32 and found.out.dtype == torch.bfloat16
    torch.testing.assert_close(found.logits, x.float() @ router.T + bias)
    if trained:
        found.out.sum().backward()
        assert router.grad is not None and router.grad.dtype == torch.float32
