"""What only the activations have: which half is the gate, and which GELU."""

from __future__ import annotations

import pytest
import torch

import flashkernels as fk

from .test_rows import each_impl


@each_impl
def test_the_gate_comes_first(impl: str) -> None:
    gate_up = torch.tensor([[-1.0, 2.0, 10.0, 100.0]])
    assert torch.equal(fk.relu2_glu(gate_up, impl=impl), torch.tensor([[0.0, 400.0]]))
    silu = torch.nn.functional.silu(gate_up[:, :2])
    torch.testing.assert_close(fk.swiglu(gate_up, impl=impl), silu * gate_up[:, 2:])


@each_impl
def test_defaults_are_the_usual_ones(impl: str) -> None:
    """GELU is exact unless asked, as in torch; GEGLU is by tanh, as in Gemma."""
    x = torch.linspace(-4, 4, 100)
    torch.testing.assert_close(fk.gelu(x, impl=impl), torch.nn.functional.gelu(x))
    gated = fk.geglu(torch.cat((x, torch.ones(100))), impl=impl)
    torch.testing.assert_close(gated, torch.nn.functional.gelu(x, approximate="tanh"))


@pytest.mark.parametrize("function", [fk.gelu, fk.geglu])
def test_errors(function: object) -> None:
    with pytest.raises(ValueError, match="approximate='erf' is not one of 'none', 'tanh'"):
        function(torch.ones(2, 2), approximate="erf")
