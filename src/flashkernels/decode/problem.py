"""What one call over a paged cache has to do, as plain numbers. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from flashkernels.attention.problem import DTYPE_BYTES


@dataclass(frozen=True)
class DecodeProblem:
    """Sizes and features of one call. Lengths are on the device: `context` is the capacity of a sequence, and figures
    of work take the true number of keys, or else count with all of it.

    >>> sizes = {"batch": 64, "tokens": 1, "heads": 32, "kv_heads": 8, "head_dim": 128, "context": 4096}
    >>> p = DecodeProblem(page_size=16, row_bits=4096, **sizes)
    >>> f"{p.bytes() / 1e9:.3f} GB, {p.flops() / p.bytes():.0f} FLOP/byte"
    '1.075 GB, 4 FLOP/byte'
    """

    batch: int
    tokens: int  # queries of each sequence; of a ragged batch the most
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    page_size: int
    row_bits: int  # of one key with its value and scales, of one head
    head_dim_v: int = 0  # 0: the same as head_dim
    dtype: str = "bf16"
    format: str = "bf16"
    scales: str = ""  # "token", "head" or none
    shared: bool = False  # values are the first columns of the keys
    one_page: bool = False  # each sequence has one page: a contiguous cache
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    softcap: bool = False
    positive_scale: bool = True
    alibi: bool = False
    sinks: bool = False
    tree: bool = False
    ragged: bool = False
    total: int = 0  # query rows; of a dense batch batch * tokens
    need_lse: bool = False
    batch_invariant: bool = False
    unaddressable: str = ""  # why TMA and wide copies cannot read the cache
    device: str = "cuda"

    def __post_init__(self) -> None:
        if not self.head_dim_v:
            object.__setattr__(self, "head_dim_v", self.head_dim)
        if not self.ragged:
            object.__setattr__(self, "total", self.batch * self.tokens)

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.heads // self.kv_heads

    @property
    def band(self) -> tuple[int, int]:
        """(left, right) of the visible band, -1: unbounded. Causal makes right 0; a tree stands instead of causal."""
        left, right = self.window
        return left, 0 if self.causal and not self.tree else right

    def keys(self) -> int:
        """Keys of all sequences, were they as long as they can be."""
        left = self.window[0]
        return self.batch * (self.context if left < 0 else min(self.context, left + self.tokens))

    def flops(self, keys: int | None = None) -> int:
        """Multiplications and additions of Q·Kᵀ and P·V; every query sees every key."""
        keys = self.keys() if keys is None else keys
        each = self.total / max(1, self.batch)
        return round(2 * each * self.heads * keys * (self.head_dim + self.head_dim_v))

    def bytes(self, keys: int | None = None) -> int:
        """Least traffic: the cache and the queries read once, the output and its log-sum-exp written once."""
        rows = self.total * self.heads
        own = rows * (self.head_dim + self.head_dim_v) * DTYPE_BYTES[self.dtype] + 4 * rows * self.need_lse
        return self.cache_bytes(keys) + own

    def cache_bytes(self, keys: int | None = None) -> int:
        """Bytes of the cache alone, its scales included, read once."""
        return (self.keys() if keys is None else keys) * self.kv_heads * self.row_bits // 8
