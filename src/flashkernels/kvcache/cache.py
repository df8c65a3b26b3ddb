"""The paged cache of keys and values: its tensors, what they must be, and what they hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flashkernels.arguments import check_count
from flashkernels.dispatch import UnsupportedError
from flashkernels.formats import Format, lookup

DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.uint8: "int4",
          torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8_e5m2", torch.int8: "int8"}  # fmt: skip
SCALES = ("token", "head")


@dataclass(frozen=True, eq=False)
class PagedCache:
    """Keys and values of a batch of sequences, in pages: key j of sequence b is row j % page_size of page
    block_table[b, j // page_size]. The tensors are checked once, here; their values change in place.

    Args:
        k: (num_pages, page_size, H_kv, D), fp32, fp16, bf16, float8_e4m3fn, float8_e5m2, int8, or uint8 for INT4, two
            in a byte: (..., D / 2). The last dimension is contiguous.
        v: (num_pages, page_size, H_kv, D_v), the same dtype. It may be a view of the first columns of k, as MLA has it:
            `k[..., :512]`; then a decode reads both at once.
        block_table: (B, max_pages) int32, contiguous. Sequences may share pages.
        lengths: (B,) int32, contiguous: how many keys each sequence has. On the device, so that a captured CUDA graph
            goes on with new ones.
        k_scale, v_scale: fp16, of quantised pages: one for each token and head, (num_pages, page_size, H_kv), INT4 for
            each group of 32 too, (..., ceil(D / 32)); or one for each head, (H_kv,), positive and fixed.

    >>> import torch
    >>> table = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
    >>> cache = PagedCache.allocate(4, 16, 8, 128, block_table=table, format="int4")
    >>> cache.k.shape, cache.k_scale.shape, cache.capacity
    (torch.Size([4, 16, 8, 64]), torch.Size([4, 16, 8, 4]), 32)
    """

    k: Tensor
    v: Tensor
    block_table: Tensor
    lengths: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    format: Format = field(init=False)
    shared: bool = field(init=False)  # the values are the first columns of the keys, by the same scales
    signature: tuple[Any, ...] = field(init=False, repr=False)  # all that a prepared launch may depend on

    def __post_init__(self) -> None:
        tensors = self.tensors
        _check(*tensors)
        object.__setattr__(self, "format", lookup(DTYPES[self.k.dtype]))
        sizes = [None if x is None else (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16) for x in tensors]
        object.__setattr__(
            self, "shared", _shared(self.k, self.v) and (self.k_scale is None or _shared(self.k_scale, self.v_scale))
        )
        object.__setattr__(self, "signature", (*sizes, self.shared))

    @staticmethod
    def allocate(
        num_pages: int, page_size: int, kv_heads: int, head_dim: int, head_dim_v: int = 0, *, block_table: Tensor,
        lengths: Tensor | None = None, format: str = "bf16", scales: str = "token", latent: bool = False,
    ) -> PagedCache:  # fmt: skip
        """An empty cache on the device of `block_table`, its sequences of length 0 unless `lengths` says otherwise.

        Args:
            head_dim_v: 0: as head_dim.
            format: "fp32", "fp16", "bf16", "fp8" (e4m3), "fp8_e5m2", "int8" or "int4".
            scales: "token": one for each token and head (and group of INT4); "head": one for each head, at first 1.
            latent: the values are the first head_dim_v columns of the keys.
        """
        form = lookup(format)
        if scales not in SCALES:
            raise ValueError(f"scales={scales!r} is not one of {', '.join(map(repr, SCALES))}")
        sizes = {"num_pages": num_pages, "page_size": page_size, "kv_heads": kv_heads, "head_dim": head_dim}
        for name, size in sizes.items():
            check_count(name, size, 1)
        check_count("head_dim_v", head_dim_v)
        if not isinstance(block_table, Tensor):
            raise TypeError(f"block_table must be a torch.Tensor, got {type(block_table).__name__}")
        dim_v = head_dim_v or head_dim
        for dim in (head_dim, dim_v):
            if dim % form.packed:
                raise ValueError(f"head_dim={dim} must be even: format={format!r} stores two numbers in a byte")
        if latent and dim_v > head_dim:
            raise ValueError(f"head_dim_v={dim_v} is over head_dim={head_dim}: latent values are columns of the keys")
        device, rows = block_table.device, (num_pages, page_size, kv_heads)

        def pages(dim: int) -> tuple[Tensor, Tensor | None]:
            stored = torch.zeros(*rows, form.stored(dim), dtype=form.dtype, device=device)
            if not form.quantised:
                return stored, None
            sizes = (kv_heads,) if scales == "head" else (*rows, form.groups(dim)) if form.group else rows
            return stored, torch.ones(sizes, dtype=torch.float16, device=device)

        k, k_scale = pages(head_dim)
        if latent:
            v, v_scale = k[..., : form.stored(dim_v)], k_scale
            if v_scale is not None and form.group and scales == "token":
                v_scale = v_scale[..., : form.groups(dim_v)]
        else:
            v, v_scale = pages(dim_v)
        if lengths is None:
            lengths = torch.zeros(block_table.shape[0], dtype=torch.int32, device=device)
        return PagedCache(k, v, block_table, lengths, k_scale, v_scale)

    @staticmethod
    def contiguous(
        k: Tensor, v: Tensor, lengths: Tensor, k_scale: Tensor | None = None, v_scale: Tensor | None = None
    ) -> PagedCache:  # fmt: skip
        """Tensors (B, S, H_kv, D) and (B, S, H_kv, D_v) as a cache of one page for each sequence, without a copy;
        quantised ones with their scales."""
        if not isinstance(k, Tensor):
            raise TypeError(f"k must be a torch.Tensor, got {type(k).__name__}")
        table = torch.arange(k.shape[0], dtype=torch.int32, device=k.device)[:, None]
        return PagedCache(k, v, table, lengths, k_scale, v_scale)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        return self.k, self.v, self.block_table, self.lengths, self.k_scale, self.v_scale

    @property
    def batch(self) -> int:
        return self.block_table.shape[0]

    @property
    def page_size(self) -> int:
        return self.k.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.k.shape[2]

    @property
    def head_dim(self) -> int:
        return self.k.shape[3] * self.format.packed

    @property
    def head_dim_v(self) -> int:
        return self.v.shape[3] * self.format.packed

    @property
    def capacity(self) -> int:
        """Most keys of one sequence."""
        return self.block_table.shape[1] * self.page_size

    @property
    def scales(self) -> str:
        """ "token", "head", or nothing where the pages are not quantised."""
        return "" if self.k_scale is None else "head" if self.k_scale.dim() == 1 else "token"

    @property
    def bits_per_token(self) -> int:
        """Of keys, values and their own scales, of all heads; what a decode must read for each key."""
        by_row = self.scales == "token"
        keys = self.format.bits(self.head_dim, by_row)
        return self.kv_heads * (keys if self.shared else keys + self.format.bits(self.head_dim_v, by_row))

    def advance(self, tokens: int | Tensor) -> None:
        """Counts new tokens: one number for all sequences, or (B,). `append` then writes them, layer by layer."""
        if isinstance(tokens, Tensor):
            if tokens.dtype.is_floating_point or tuple(tokens.shape) not in ((), (1,), (self.batch,)):
                got = f"{tuple(tokens.shape)} of {tokens.dtype}"
                raise ValueError(f"tokens is {got}; expected an int or ({self.batch},) of integers")
        elif isinstance(tokens, bool) or not isinstance(tokens, (int, torch.SymInt)):
            raise TypeError(f"tokens={tokens!r} must be an int or a torch.Tensor, got {type(tokens).__name__}")
        self.lengths.add_(tokens)

    def check(self) -> None:
        """Raises where a length is over the capacity, or the block table names a page that is not there, with the
        sequence and the slot, or where the scale of a head is not positive. What is wrong is found on the device and
        read once, so this waits for the device; while a CUDA graph is captured it cannot, and raises
        `UnsupportedError`. `check=True` of an op is this call."""
        if self.k.is_cuda and torch.cuda.is_current_stream_capturing():
            raise UnsupportedError("check=True waits for the device, which a graph under capture cannot: check before")
        lengths, table = self.lengths, self.block_table
        slots = torch.arange(table.shape[1], device=lengths.device)
        used = slots < ((lengths + self.page_size - 1) // self.page_size)[:, None]
        found = [
            *_first((lengths < 0) | (lengths > self.capacity), lengths),
            *_first(used & ((table < 0) | (table >= self.k.shape[0])), table),
        ]
        named = (("k_scale", self.k_scale), ("v_scale", self.v_scale))
        fixed = [(name, x) for name, x in named if x is not None and x.dim() == 1]
        for _, scale in fixed:
            found += _first(~((scale > 0) & scale.isfinite()), scale)[:2]
        wrong_length, b, length, wrong_page, at, page, *scales = torch.stack(found).tolist()
        if wrong_length:
            raise ValueError(f"lengths[{b}]={length} is not in 0 to {self.capacity}, the capacity of sequence {b}")
        if wrong_page:
            b, slot = divmod(at, table.shape[1])
            raise ValueError(
                f"block_table[{b}, {slot}]={page} of sequence {b}, slot {slot}, is not in 0 to {self.k.shape[0] - 1}"
            )
        for (name, scale), wrong, head in zip(fixed, scales[::2], scales[1::2], strict=True):
            if wrong:
                raise ValueError(f"{name}[{head}]={float(scale[head])} must be positive and finite")


def readable(x: Tensor) -> bool:
    """Whether values can be read without waiting for a device: they are then always checked."""
    return not x.is_cuda and not x.is_meta and not torch.compiler.is_compiling()


def _first(wrong: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Whether any value is wrong, where the first such one is among all of them, and what it is; on the device."""
    if not values.numel():
        return (torch.zeros((), dtype=torch.int64, device=values.device),) * 3
    there, at = wrong.flatten().int().max(0)
    return there.long(), at, values.flatten()[at].long()


def _shared(k: Tensor, v: Tensor | None) -> bool:
    """Whether v is the first columns of k."""
    return v is not None and k.data_ptr() == v.data_ptr() and k.stride() == v.stride() and v.shape[-1] <= k.shape[-1]


def _check(
    k: Tensor, v: Tensor, table: Tensor, lengths: Tensor, k_scale: Tensor | None, v_scale: Tensor | None
) -> None:
    for name, x in (("k", k), ("v", v), ("block_table", table), ("lengths", lengths)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.device != k.device:
            raise ValueError(f"{name}.device={x.device} differs from k.device={k.device}")
    for name, x in (("k", k), ("v", v)):
        if x.dtype not in DTYPES:
            raise TypeError(f"{name}.dtype={x.dtype} is not supported; allowed: {', '.join(map(str, DTYPES))}")
        if x.dim() != 4 or 0 in x.shape[1:]:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; expected (num_pages, page_size, kv_heads, head_dim)")
        if x.stride(3) != 1 and x.shape[3] != 1:
            raise ValueError(f"{name} has strides {x.stride()}; the last dimension must be contiguous")
    if v.dtype != k.dtype:
        raise TypeError(f"v.dtype={v.dtype} differs from k.dtype={k.dtype}")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"k has shape {tuple(k.shape)}, v has {tuple(v.shape)}: all but the last size must agree")
    for name, x, rank in (("block_table", table, 2), ("lengths", lengths, 1)):
        if x.dtype != torch.int32:
            raise TypeError(f"{name}.dtype={x.dtype}; it must be torch.int32")
        if x.dim() != rank:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; expected {'(batch, max_pages)' if rank == 2 else '(batch,)'}"
            )
        if not x.is_contiguous():
            raise ValueError(f"{name} has strides {x.stride()}; it must be contiguous")
    if lengths.shape[0] != table.shape[0]:
        raise ValueError(f"lengths has {lengths.shape[0]} sequences, block_table has {table.shape[0]}")
    if table.shape[1] * k.shape[1] >= 1 << 30:
        raise ValueError(
            f"block_table has room for {table.shape[1] * k.shape[1]} keys of a sequence; 2**30 is too many"
        )
    form = lookup(DTYPES[k.dtype])
    for name, scale, pages in (("k_scale", k_scale, k), ("v_scale", v_scale, v)):
        _check_scale(name, scale, pages, form)
    if k_scale is not None and v_scale is not None and k_scale.dim() != v_scale.dim():
        raise ValueError(
            f"k_scale has shape {tuple(k_scale.shape)}, v_scale has {tuple(v_scale.shape)}: one kind for both"
        )


def _check_scale(name: str, scale: Tensor | None, pages: Tensor, form: Format) -> None:
    if not form.quantised:
        if scale is not None:
            raise ValueError(f"{name} is for quantised pages; these are {pages.dtype}")
        return
    if scale is None:
        raise ValueError(f"{name} is missing: {pages.dtype} pages need scales")
    if not isinstance(scale, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(scale).__name__}")
    if scale.dtype != torch.float16:
        raise TypeError(f"{name}.dtype={scale.dtype}; it must be torch.float16")
    if scale.device != pages.device:
        raise ValueError(f"{name}.device={scale.device} differs from k.device={pages.device}")
    rows = tuple(pages.shape[:3])
    each = (*rows, form.groups(pages.shape[3] * form.packed)) if form.group else rows
    if tuple(scale.shape) not in (each, rows[2:]):
        raise ValueError(f"{name} has shape {tuple(scale.shape)}; expected {each} or {rows[2:]}")
    if form.group and scale.dim() == 4 and scale.stride(3) != 1 and scale.shape[3] != 1:
        raise ValueError(f"{name} has strides {scale.stride()}; the last dimension must be contiguous")
    if scale.dim() == 1 and scale.stride(0) != 1 and scale.shape[0] != 1:
        raise ValueError(f"{name} has stride {scale.stride(0)}; it must be contiguous")
