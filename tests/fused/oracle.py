"""What the row-wise ops must compute, and the error a correct implementation may make. Knows nothing of flashkernels.

The functions below are written out from the definitions. In fp64 they are the truth. Plain torch is torch's own
function in the inputs' dtype, and the tolerance is twice its error and a few roundings.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import flashkernels as fk

ROUNDINGS = {torch.float64: 64.0}  # where the truth itself rounds


def assert_close(
    got: Tensor, plain: Tensor, want: Tensor, dtype: torch.dtype, terms: float = 0.0, name: str = "out"
) -> None:
    """`got` has the truth's NaN and infinities, and elsewhere errs at most twice as much as plain torch, and a few
    roundings of its largest number (or of the `terms` that cancel in it), by norm and at the worst element."""
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, want {tuple(want.shape)}"
    got, plain, want = (x.detach().double().cpu() for x in (got, plain, want))
    finite = want.isfinite()
    same = torch.where(finite, got.isfinite(), (got == want) | (got.isnan() & want.isnan()))
    assert same.all(), f"{name}: {(~same).sum().item()} elements differ in being finite, infinite or NaN"
    if not finite.any():
        return
    got, plain, want = (x[finite] for x in (got, plain, want))
    error, allowed = (got - want).abs(), (plain - want).abs().nan_to_num(0.0, posinf=0.0)
    slack = ROUNDINGS.get(dtype, 4.0) * torch.finfo(dtype).eps * max(terms, want.abs().max().item())
    slack += torch.finfo(dtype).tiny
    worst = 2 * allowed.max().item() + slack
    assert error.max().item() <= worst, f"{name}: worst error {error.max().item():.3g} > {worst:.3g}"
    norm = 2 * allowed.norm().item() + slack * math.sqrt(want.numel())
    assert error.norm().item() <= norm, f"{name}: norm of the error {error.norm().item():.3g} > {norm:.3g}"


# The definitions


def rms_norm(x: Tensor, weight: Tensor | None, eps: float = 1e-6) -> Tensor:
    y = x / torch.sqrt(torch.sum(x**2, -1, keepdim=True) / x.shape[-1] + eps)
    return y if weight is None else y * weight


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    centred = x - torch.sum(x, -1, keepdim=True) / x.shape[-1]
    return rms_norm(centred, weight, eps) + bias


def llama_norm(x: Tensor, weight: Tensor) -> Tensor:
    """As the modelling code of Llama in transformers has it, for fp32 weights rounded at the end too."""
    wide = x.double() if x.dtype == torch.float64 else x.float()
    return (weight * rms_norm(wide, None).to(x.dtype)).to(x.dtype)


def gelu(x: Tensor, approximate: str) -> Tensor:
    if approximate == "none":
        return x * 0.5 * torch.special.erfc(-x / math.sqrt(2))
    z = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return x / (1 + torch.exp(-2 * z))  # 0.5 * x * (1 + tanh(z)), which cancels to nothing far below 0


def gated(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return f(x[..., :half]) * x[..., half:]

    return function


def softmax(x: Tensor) -> Tensor:
    powers = torch.exp(x - x.amax(-1, keepdim=True)) if x.shape[-1] else x
    return powers / powers.sum(-1, keepdim=True)


def log_softmax(x: Tensor) -> Tensor:
    return x - torch.logsumexp(x, -1, keepdim=True)


def rope(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, dim: int, interleaved: bool) -> Tensor:
    """x (B, S, H, D) by complex numbers; positions (B, S), tables (P, dim / 2)."""
    half = dim // 2
    turn = torch.complex(cos[positions, :half], sin[positions, :half])[:, :, None]  # (B, S, 1, dim / 2)
    head, rest = x[..., :dim], x[..., dim:]
    if interleaved:
        turned = torch.view_as_real(torch.complex(head[..., 0::2], head[..., 1::2]) * turn).flatten(-2)
    else:
        both = torch.complex(head[..., :half], head[..., half:]) * turn
        turned = torch.cat((both.real, both.imag), -1)
    return torch.cat((turned, rest), -1)


# Every row-wise op, as a table


@dataclass(frozen=True)
class Op:
    """One op with its settings: the public function's name, how often it takes a tensor like x and a vector (N,), the
    truth, and plain torch. Functions of x, vectors, then the residual."""

    function: str
    truth: Callable[..., Any]
    plain: Callable[..., Any]
    vectors: tuple[str, ...] = ()
    residual: bool = False
    packed: bool = False
    settings: dict[str, Any] = field(default_factory=dict)

    def call(self, x: Tensor, *others: Tensor, impl: str) -> tuple[Tensor, ...]:
        names = (*self.vectors, *(("residual",) if self.residual else ()))
        found = getattr(fk, self.function)(x, **dict(zip(names, others, strict=True)), **self.settings, impl=impl)
        return found if isinstance(found, tuple) else (found,)

    def true(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return self._with_sum(self.truth, *tensors)

    def torch(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return self._with_sum(self.plain, *tensors)

    def _with_sum(self, function: Callable[..., Tensor], x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        if not self.residual:
            return (function(x, *others),)
        total = x + others[-1]
        return function(total, *others[:-1]), total

    def inputs(
        self, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0, scale: float = 1.0, device: str = "cpu"
    ) -> list[Tensor]:
        """Random tensors for a call; the last size becomes even where gate and up are packed."""
        generator = torch.Generator().manual_seed(seed)
        width = shape[-1] + shape[-1] % 2 if self.packed else shape[-1]
        shapes = [(*shape[:-1], width), *[(width,)] * len(self.vectors), *[(*shape[:-1], width)] * self.residual]
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        made = [torch.randn(one, generator=generator, dtype=wide) for one in shapes]
        made[0] = made[0] * scale
        return [x.to(dtype).to(device) for x in made]


def _torch_norm(f: Callable[..., Tensor], eps: float) -> Callable[..., Tensor]:
    return lambda x, *vectors: f(x, x.shape[-1:], *vectors, eps=eps)


_rms = _torch_norm(F.rms_norm, 1e-6)
_layer = _torch_norm(F.layer_norm, 1e-5)
OPS = {
    "rms_norm": Op("rms_norm", rms_norm, _rms, ("weight",)),
    "rms_norm-plain": Op("rms_norm", lambda x: rms_norm(x, None), _rms),
    "rms_norm-residual": Op("rms_norm", rms_norm, _rms, ("weight",), residual=True),
    "rms_norm-bias": Op(
        "rms_norm", lambda x, w, b: rms_norm(x, w) + b, lambda x, w, b: _rms(x, w) + b, ("weight", "bias")
    ),
    "rms_norm-hf": Op("rms_norm", rms_norm, llama_norm, ("weight",), settings={"numerics": "hf"}),
    "layer_norm": Op("layer_norm", layer_norm, _layer, ("weight", "bias")),
    "layer_norm-residual": Op("layer_norm", layer_norm, _layer, ("weight", "bias"), residual=True),
    "swiglu": Op("swiglu", gated(lambda x: x / (1 + torch.exp(-x))), gated(F.silu), packed=True),
    "geglu": Op("geglu", gated(lambda x: gelu(x, "tanh")), gated(lambda x: F.gelu(x, approximate="tanh")), packed=True),
    "geglu-exact": Op(
        "geglu", gated(lambda x: gelu(x, "none")), gated(F.gelu), packed=True, settings={"approximate": "none"}
    ),
    "relu2_glu": Op(
        "relu2_glu", gated(lambda x: x.clamp(min=0) ** 2), gated(lambda x: F.relu(x).square()), packed=True
    ),
    "gelu": Op("gelu", lambda x: gelu(x, "none"), F.gelu),
    "gelu-tanh": Op(
        "gelu", lambda x: gelu(x, "tanh"), lambda x: F.gelu(x, approximate="tanh"), settings={"approximate": "tanh"}
    ),
    "softmax": Op("softmax", softmax, lambda x: F.softmax(x, -1)),
    "log_softmax": Op("log_softmax", log_softmax, lambda x: F.log_softmax(x, -1)),
}


def check(op: Op, tensors: list[Tensor], impl: str, gradients: bool = True) -> tuple[Tensor, ...]:
    """The outputs of a call, after comparing them, and the gradients of all its inputs, with the truth."""
    dtype = tensors[0].dtype
    got, plain, want = (
        run(function, [x.to(kind) for x in tensors], gradients)
        for function, kind in (
            (lambda *x: op.call(*x, impl=impl), dtype), (op.torch, dtype), (op.true, torch.float64)
        )
    )  # fmt: skip
    for i, (a, b, c) in enumerate(zip(got, plain, want, strict=True)):
        assert a.dtype == dtype and a.device == tensors[0].device
        cancelling = terms(op, tensors) if i >= len(got) - len(tensors) and a.shape == tensors[0].shape else 0.0
        assert_close(a, b, c, dtype, cancelling, f"result {i} of {len(got)}")
    return got


def terms(op: Op, tensors: list[Tensor]) -> float:
    """How large the terms are that cancel in the gradient of a normalised x: dy * weight / deviation."""
    x, *others = (x.double() for x in tensors)
    if "norm" not in op.function or x.numel() == 0:
        return 0.0
    x = x + others[-1] if op.residual else x
    if op.function == "layer_norm":
        x = x - x.mean(-1, keepdim=True)
    largest = others[0].abs().max().item() if op.vectors else 1.0
    return largest / (x.square().mean(-1).min().item() + 1e-6) ** 0.5


def run(function: Callable[..., tuple[Tensor, ...]], tensors: list[Tensor], gradients: bool) -> tuple[Tensor, ...]:
    """Outputs, then the gradients of all inputs for fixed gradients of the outputs."""
    if not gradients:
        return function(*tensors)
    leaves = [x.detach().requires_grad_() for x in tensors]
    outs = function(*leaves)
    generator = torch.Generator().manual_seed(9)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in outs]
    return (*outs, *torch.autograd.grad(outs, leaves, weights))
