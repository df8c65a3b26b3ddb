"""What one attention call has to do, as plain numbers. No torch here: tiling, roofline, bench and explain read it."""

from __future__ import annotations

from dataclasses import dataclass, replace

DTYPE_BYTES = {"fp8": 1, "fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8}


@dataclass(frozen=True)
class AttentionProblem:
    """Sizes and features of one attention call.

    A ragged (varlen) batch is described by its totals: `seq_q` and `seq_k` are the longest sequences,
    `total_q` and `total_k` the rows really there. Work is counted as if the rows were spread evenly
    over the batch, because the true lengths live on the device.

    >>> p = AttentionProblem(batch=4, seq_q=4096, seq_k=4096, heads=28, kv_heads=28, head_dim=72, causal=True)
    >>> f"{p.flops() / 1e12:.3f} TFLOP, {p.bytes() / 1e6:.0f} MB"
    '0.271 TFLOP, 266 MB'
    """

    batch: int
    seq_q: int
    seq_k: int
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int = 0  # 0: the same as head_dim
    dtype: str = "bf16"
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: bool = False
    positive_scale: bool = True
    alibi: bool = False
    sinks: bool = False
    mask: str | None = None  # None, "bool" or "float"
    varlen: bool = False
    total_q: int = 0
    total_k: int = 0
    page_size: int = 0  # keys of a page, where K and V are pages of a cache
    unaddressable: str = ""  # why TMA cannot read q, k or v; empty: it can
    misaligned: str = ""  # which of q, k and v, of 16 bits, does not lie at multiples of 16 bytes; empty: all do
    need_lse: bool = False
    dropout_p: float = 0.0
    layout: str = "bshd"  # memory order of the output; the inputs may have any strides
    device: str = "cuda"

    def __post_init__(self) -> None:
        if not self.head_dim_v:
            object.__setattr__(self, "head_dim_v", self.head_dim)
        if not self.varlen:
            object.__setattr__(self, "total_q", self.batch * self.seq_q)
            object.__setattr__(self, "total_k", self.batch * self.seq_k)

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def empty(self) -> bool:
        """Whether there is nothing to load."""
        return min(self.total_q, self.total_k, self.heads) == 0

    @property
    def narrow(self) -> str:
        """Why rows of 16 bits cannot be read 16 bytes at a time; empty: they can, or are not of 16 bits."""
        if self.element_bytes != 2:
            return ""
        odd = (dim for dim in (self.head_dim, self.head_dim_v) if dim % 8)
        return next((f"rows of {dim} columns are no multiple of 16 bytes" for dim in odd), self.misaligned)

    def widened(self) -> AttentionProblem:
        """The same with rows that are not narrow, filled up with columns of zeros."""
        dim, dim_v = (-(-dim // 8) * 8 for dim in (self.head_dim, self.head_dim_v))
        return replace(self, head_dim=dim, head_dim_v=dim_v, unaddressable="", misaligned="")

    @property
    def band(self) -> tuple[int, int]:
        """(left, right) of the visible band around the bottom-right diagonal; -1: unbounded. Causal makes right 0."""
        left, right = self.window
        return left, 0 if self.causal else right

    @property
    def kv_bytes(self) -> int:
        """Of K and V."""
        return self.total_k * self.kv_heads * (self.head_dim + self.head_dim_v) * self.element_bytes

    @property
    def walked_bytes(self) -> int:
        """What a pass over keys that adds up dQ walks: Q and dO in 16 bits, and dQ in 32."""
        return self.total_q * self.heads * (6 * self.head_dim + 2 * self.head_dim_v)

    def pairs(self) -> int:
        """Visible (query, key) pairs of one head over the whole batch, by causal and window; masks are not counted."""
        if self.batch == 0:
            return 0
        if self.varlen:
            sq, sk = self.total_q // self.batch, self.total_k // self.batch
        else:
            sq, sk = self.seq_q, self.seq_k
        return self.batch * visible_pairs(sq, sk, *self.band)

    def flops(self) -> int:
        """Multiplications and additions of Q·Kᵀ and P·V over the visible pairs, at the true head dimensions."""
        return 2 * self.heads * self.pairs() * (self.head_dim + self.head_dim_v)

    def bytes(self) -> int:
        """Least traffic: Q, K and V read once, the output and its fp32 log-sum-exp written once."""
        q_side = self.total_q * self.heads * self.head_dim
        out = self.total_q * self.heads * self.head_dim_v * max(2, self.element_bytes)  # of FP8, bf16
        mask = 0
        if self.mask:
            mask = self.batch * self.seq_q * self.seq_k * (1 if self.mask == "bool" else self.element_bytes)
        return q_side * self.element_bytes + self.kv_bytes + out + 4 * self.total_q * self.heads + mask


@dataclass(frozen=True)
class BackwardProblem:
    """The gradients of one attention call that are asked for.

    >>> call = AttentionProblem(batch=1, seq_q=4096, seq_k=4096, heads=16, kv_heads=16, head_dim=128)
    >>> BackwardProblem(call, ("q", "k", "v")).flops() / call.flops()
    2.5
    """

    call: AttentionProblem
    wanted: tuple[str, ...]  # of q, k, v, alibi_slopes, sinks and mask
    impl: str = "auto"  # as the caller of the forward named it
    saved: bool = True  # whether the forward left its output and log-sum-exp
    deterministic: bool = False  # whether all gradients have to be the same to the bit in every run

    @property
    def dtype(self) -> str:
        return self.call.dtype

    def widened(self) -> BackwardProblem:
        """The same of rows that are not narrow, for whoever is best."""
        return replace(self, call=self.call.widened(), impl="auto" if self.impl == "aligned" else self.impl)

    def flops(self) -> int:
        """Five products: Q·Kᵀ again, dO·Vᵀ, and dQ, dK and dV. All are counted, whatever is wanted."""
        call = self.call
        return 2 * call.heads * call.pairs() * (3 * call.head_dim + 2 * call.head_dim_v)

    def bytes(self) -> int:
        """Least traffic: Q, K, V, the output, its gradient and the fp32 log-sum-exp read once, the gradients of q, k
        and v written once. All are counted, whatever is wanted; masks and biases are not."""
        call = self.call
        q_side = call.total_q * call.heads * (call.head_dim + call.head_dim_v)
        return 2 * (q_side * call.element_bytes + call.kv_bytes) + 4 * call.total_q * call.heads


def heads_together(heads: int, walked: int, most: float) -> int:
    """How many of these heads are worked on side by side: in equal sections, each about `most` of all bytes walked.

    >>> heads_together(128, 268_000_000, 48e6), heads_together(4, 1000, 48e6)
    (22, 4)
    """
    return max(1, -(-heads // max(1, round(walked / most))))


def visible_pairs(sq: int, sk: int, left: int, right: int) -> int:
    """How many pairs (i, j) satisfy -left <= j - (i + sk - sq) <= right, for i < sq and j < sk.

    >>> visible_pairs(4, 4, -1, 0), visible_pairs(4, 4, -1, -1), visible_pairs(4, 4, 1, 0)
    (10, 16, 7)
    """
    shift = sk - sq
    first_unbounded = left < 0
    last_unbounded = right < 0
    if first_unbounded and last_unbounded:
        return sq * sk
    # Clamped ends of each row's interval are linear in i, so the sum of max(0, hi - lo) is a sum of two ramps.
    hi = sq * sk if last_unbounded else _clamped_ramp(sq, shift + right + 1, sk)
    lo = 0 if first_unbounded else _clamped_ramp(sq, shift - left, sk)
    return max(0, hi - lo)


def _clamped_ramp(rows: int, start: int, top: int) -> int:
    """Sum over i < rows of min(top, max(0, start + i))."""
    first = min(rows, max(0, -start))  # rows before this are clamped to 0
    full = min(rows, max(first, top - start))  # rows from this on are clamped to `top`
    n = full - first
    return n * (start + first) + n * (n - 1) // 2 + (rows - full) * top
