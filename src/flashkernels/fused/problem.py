"""What a linear layer and a loss over a vocabulary have to do. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

BYTES = {"fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2}
# Activations of a linear layer: the function, and whether it is of a gate, which an equally wide half multiplies.
ACTIVATIONS = {
    "relu": ("relu", False), "relu2": ("relu2", False), "gelu": ("gelu", False), "gelu_tanh": ("gelu_tanh", False),
    "silu": ("silu", False), "swiglu": ("silu", True), "geglu": ("gelu_tanh", True), "geglu_exact": ("gelu", True),
    "reglu": ("relu", True), "relu2_glu": ("relu2", True),
}  # fmt: skip


@dataclass(frozen=True)
class LinearProblem:
    """rows x depth times depth x n, with what is done to rows before and to columns after.

    >>> problem = LinearProblem(4096, 28672, 4096, "bf16", "cuda", "swiglu")
    >>> problem.width, problem.flops() == 2 * 4096 * 28672 * 4096, problem.epilogue_bytes()
    (14336, True, 469762048)
    """

    rows: int
    n: int  # of the weight: twice the width of the output where that is gated
    depth: int
    dtype: str
    device: str
    activation: str = ""
    normed: bool = False
    rounded: bool = False  # numerics="hf"
    saved: bool = False  # the pre-activation is kept, for gradients

    @property
    def kind(self) -> str:
        return ACTIVATIONS[self.activation][0] if self.activation else ""

    @property
    def gated(self) -> bool:
        return bool(self.activation) and ACTIVATIONS[self.activation][1]

    @property
    def width(self) -> int:
        """Columns of the output."""
        return self.n // 2 if self.gated else self.n

    def flops(self) -> int:
        return 2 * self.rows * self.n * self.depth

    def bytes(self) -> int:
        """Everything read once and written once."""
        kept = self.rows * self.n if self.saved and self.activation else 0
        return BYTES[self.dtype] * (self.rows * (self.depth + self.width) + self.n * self.depth + kept)

    def epilogue_bytes(self) -> int:
        """What the activation moves as a kernel of its own, beyond what a product that has it moves: the product is
        read, and written too unless it is kept anyway."""
        if not self.activation:
            return 0
        return BYTES[self.dtype] * self.rows * self.n * (1 if self.saved else 2)


@dataclass(frozen=True)
class LossProblem:
    """The loss of tokens x vocab logits, which are a product of the depth, or given where the depth is 0.

    >>> problem = LossProblem(8192, 128256, 4096, "bf16", "cuda", grads=True)
    >>> problem.flops() == 3 * 2 * 8192 * 128256 * 4096
    True
    """

    tokens: int
    vocab: int
    depth: int
    dtype: str
    device: str
    grads: bool = False

    def flops(self) -> int:
        """One product for the logits, two for the gradients of both its sides."""
        return 2 * self.tokens * self.vocab * self.depth * (3 if self.grads else 1)

    def bytes(self) -> int:
        """Both sides read once, their gradients written once; or the logits and theirs."""
        sides = (self.tokens + self.vocab) * self.depth if self.depth else self.tokens * self.vocab
        return BYTES[self.dtype] * sides * (2 if self.grads else 1)
