"""What calls of the mixture of experts ask for, and what they cost. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

GATED = ("swiglu", "geglu", "relu2_glu", "clamped_swiglu")
ACTIVATIONS = ("none", "relu2", *GATED)
BYTES = {"fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "int8": 1}
# bits of a weight in each format, "" being that of x itself
FORMATS = {"fp8": 8, "fp8_block": 8, "int8": 8, "w8": 8, "w4": 4}
PHASES = {"w8": 2, "w4": 4}  # weights in a word of 16 bits


class Choice(NamedTuple):
    """How experts are chosen and weighted."""

    k: int
    sigmoid: bool
    renormalise: bool
    groups: int
    top_groups: int
    top2: bool  # a group is worth the sum of its two best, not its best
    scale: float


class Epilogue(NamedTuple):
    """What happens to a product before it is stored."""

    activation: str
    interleaved: bool  # gate and up alternate; otherwise the gate's rows come first
    alpha: float  # of the clamped SwiGLU: gate * sigmoid(alpha * gate)
    limit: float  # where it clamps


@dataclass(frozen=True)
class RouteProblem:
    """One routing: tokens x experts, k of them chosen, and the regrouping of the tokens * k items.

    >>> RouteProblem(32768, 64, 2, "fp32", "cuda").bytes()
    9437704
    """

    tokens: int
    experts: int
    k: int
    dtype: str
    device: str
    planned: bool = True
    groups: int = 1  # experts are chosen from the best of so many groups
    given: bool = False  # the choice: only the regrouping is asked for

    def bytes(self) -> int:
        """Logits read once; weights, ids, permutation and its inverse written once, counts and offsets too."""
        items = self.tokens * self.k
        plan = 8 * items + 8 * (self.experts + 1) if self.planned else 0
        return self.tokens * self.experts * BYTES[self.dtype] + 8 * items + plan

    def flops(self) -> int:
        """None: comparing and counting are not floating-point work."""
        return 0


@dataclass(frozen=True)
class GemmProblem:
    """One grouped GEMM: `rows` at most, each times the (n, depth) matrix of its expert.

    >>> GemmProblem(8192, 8, 28672, 4096, "bf16", "cuda").flops() == 2 * 8192 * 28672 * 4096
    True
    """

    rows: int
    experts: int
    n: int  # of the weights: twice the width of the output where that is gated
    depth: int
    dtype: str  # of x
    device: str
    weights: str = ""  # the format of quantised weights
    activation: str = "none"
    gather: bool = False
    block: int = 128
    group: int = 0  # weights of a row that share a scale
    out: str = ""  # dtype of the output, where it is not x's
    addressable: bool = True  # x and w lie as TMA reads them
    wide: str = ""  # dtype of x before it is rounded, where the product does that itself

    @property
    def gated(self) -> bool:
        return self.activation in GATED

    @property
    def width(self) -> int:
        """Columns of the output."""
        return self.n // 2 if self.gated else self.n

    def flops(self) -> int:
        return 2 * self.rows * self.n * self.depth

    def bytes(self) -> int:
        """Rows read and written once, the weights of as many experts as there can be read once."""
        used = min(self.experts, self.rows)
        bits = FORMATS.get(self.weights, 8 * BYTES[self.dtype])
        return self.rows * (self.depth + self.width) * BYTES[self.dtype] + used * self.n * self.depth * bits // 8


@dataclass(frozen=True)
class LayerProblem:
    """One whole layer.

    >>> LayerProblem(4096, 4096, 14336, 8, 2, "bf16", "cuda").flops() == 6 * 4096 * 2 * 4096 * 14336
    True
    """

    tokens: int
    hidden: int
    inner: int
    experts: int
    k: int
    dtype: str
    device: str
    weights: str = ""

    @property
    def compute(self) -> str:
        """The type that the tensor cores multiply in."""
        return {"fp8": "fp8", "fp8_block": "fp8", "int8": "int8"}.get(self.weights, self.dtype)

    def flops(self) -> int:
        return 6 * self.tokens * self.k * self.hidden * self.inner

    def bytes(self) -> int:
        """Tokens read and written once, and the weights of the experts that get any of them, on average: each is left
        out by all tokens with probability (1 - k / E) ** T."""
        used = self.experts * (1 - (1 - self.k / self.experts) ** self.tokens)
        bits = FORMATS.get(self.weights, 8 * BYTES[self.dtype])
        return 2 * self.tokens * self.hidden * BYTES[self.dtype] + int(used * 3 * self.hidden * self.inner * bits / 8)
