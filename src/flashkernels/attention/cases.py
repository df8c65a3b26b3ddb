"""Named attention shapes. Benchmarks, tests and warm-up take them from here: a name means one shape everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from flashkernels.attention.problem import AttentionProblem, visible_pairs

if TYPE_CHECKING:
    import torch

HEAD_DIMS = (*range(32, 257, 8), 512)
ODD_HEAD_DIMS = (33, 50, 70, 97, 100, 255)
SCALING = (  # (batch, heads, seq, head_dim)
    *((batch, 8, seq, 64) for batch in (1, 2, 4) for seq in (512, 1024, 2048, 4096)),
    (1, 32, 2048, 128),
)
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
# 16 sequences, 16384 tokens: a few long ones, many short ones, some of odd length.
RAGGED = (4096, 2911, 2048, 1536, 1311, 1024, 777, 640, 513, 400, 320, 256, 200, 150, 129, 73)
# 64 sequences of 100 to 4000 tokens, evenly spread; 37 and 64 have no common factor, so each length comes once.
MIXED = tuple(100 + round(3900 * (37 * i % 64) / 63) for i in range(64))

# What a quick run on a GPU times: the same shapes as the full suite, but few.
QUICK_ON_GPU = {
    "headdims": tuple(f"d{d}-{kind}" for d in (64, 72, 96, 128) for kind in ("full", "causal")),
    "scaling": ("b1-h8-s512-d64", "b2-h8-s2048-d64", "b1-h32-s2048-d128"),
    "seqlens": ("d72-s1024", "d72-s4096", "d72-s16384"),
    "features": ("d72-gqa8", "d72-window1024", "d72-boolmask", "d72-varlen"),
    "shapes": ("gqa-s16384-d128-causal", "b16-s1024-d64-causal", "b1-s16384-d72-full"),
    "odd": ("d70-full", "d97-full", "d97-causal", "d97-q16"),
    "fp8": ("d64-full-fp8", "d128-full-bf16", "d128-full-fp8", "d128-causal-bf16", "d128-causal-fp8"),
}


@dataclass(frozen=True)
class Case:
    """One named problem, with the values that an `AttentionProblem` leaves out."""

    name: str
    problem: AttentionProblem
    softcap: float = 0.0
    lengths: tuple[int, ...] = ()  # of each sequence, when the batch is ragged

    def flops(self) -> int:
        """As `AttentionProblem.flops`, but by the true lengths of a ragged batch."""
        p = self.problem
        if not self.lengths:
            return p.flops()
        pairs = sum(visible_pairs(n, n, *p.band) for n in self.lengths)
        return 2 * p.heads * pairs * (p.head_dim + p.head_dim_v)


def suite(name: str, *, device: str = "cuda", quick: bool = False) -> tuple[Case, ...]:
    """The cases of a suite. A quick run takes a few of them on a GPU, and all of them at tiny sizes on the CPU.

    >>> [case.name for case in suite("headdims")][:4]
    ['d32-full', 'd32-causal', 'd40-full', 'd40-causal']
    >>> suite("headdims", device="cpu", quick=True)[0].problem.seq_q
    64
    """
    if name not in SUITES:
        raise ValueError(f"suite={name!r} is not one of {', '.join(map(repr, SUITES))}")
    cases: Iterator[Case] = SUITES[name]()
    if quick and device == "cpu":
        cases = map(_tiny, cases)
    elif quick:
        cases = (case for case in cases if case.name in QUICK_ON_GPU[name])
    return tuple(replace(case, problem=replace(case.problem, device=device)) for case in cases)


def inputs(
    case: Case, *, device: str | torch.device, dtype: torch.dtype | None = None, seed: int = 0
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Random `(args, kwargs)` of a case, for `fk.attention`, or for `fk.attention_varlen` when the case is ragged.

    Dense q is (B, S_q, H, D), k is (B, S_k, H_kv, D), v is (B, S_k, H_kv, D_v); ragged ones are (total, H, D).
    `dtype` replaces the dtype of the case; the same seed gives the same numbers on the same device. Those of FP8 are
    the numbers of bf16, quantised; their scales are among the keywords.

    >>> import torch
    >>> (q, k, v), kwargs = inputs(suite("headdims", device="cpu", quick=True)[1], device="cpu")
    >>> tuple(q.shape), q.dtype, kwargs
    ((2, 64, 2, 32), torch.bfloat16, {'causal': True})
    """
    import torch

    from flashkernels.attention.fp8 import quantise_qkv

    p = case.problem
    quantise = p.dtype == "fp8" and dtype is None
    dtypes = {"fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
    dtype = dtype or dtypes.get(p.dtype, torch.bfloat16)
    random = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, generator=random, device=device, dtype=dtype)

    rows_q, rows_k = ((p.total_q,), (p.total_k,)) if p.varlen else ((p.batch, p.seq_q), (p.batch, p.seq_k))
    q = normal(*rows_q, p.heads, p.head_dim)
    k = normal(*rows_k, p.kv_heads, p.head_dim)
    v = normal(*rows_k, p.kv_heads, p.head_dim_v)
    args: tuple[Any, ...] = (q, k, v)
    kwargs: dict[str, Any] = {}
    if quantise:
        small = quantise_qkv(q, k, v)
        args, kwargs = small[:3], small.scales
    if p.varlen:
        ends = torch.tensor((0, *case.lengths)).cumsum(0).to(device, torch.int32)
        args += (ends, ends, p.seq_q, p.seq_k)

    if p.causal:
        kwargs["causal"] = True
    if p.window != (-1, -1):
        kwargs["window"] = p.window
    if case.softcap:
        kwargs["softcap"] = case.softcap
    if p.alibi:
        kwargs["alibi_slopes"] = torch.tensor([2 ** (-8 * (h + 1) / p.heads) for h in range(p.heads)], device=device)
    if p.sinks:
        kwargs["sinks"] = normal(p.heads, dtype=torch.float32)
    if p.mask == "float":
        kwargs["mask"] = normal(p.batch, 1, p.seq_q, p.seq_k)
    elif p.mask == "bool":
        mask = torch.rand((p.batch, 1, p.seq_q, p.seq_k), generator=random, device=device) > 0.1
        mask[..., 0] = True  # no row is fully masked: libraries disagree about what such a row gives
        kwargs["mask"] = mask
    return args, kwargs


def _headdims() -> Iterator[Case]:
    yield from _by_dimension(HEAD_DIMS)


def _by_dimension(dims: tuple[int, ...]) -> Iterator[Case]:
    for d in dims:
        for kind in ("full", "causal"):
            yield Case(f"d{d}-{kind}", _self_attention(4, 4096, _heads(d), d, causal=kind == "causal"))


def _scaling() -> Iterator[Case]:
    for batch, heads, seq, d in SCALING:
        yield Case(f"b{batch}-h{heads}-s{seq}-d{d}", _self_attention(batch, seq, heads, d, dtype="fp16"))


def _seqlens() -> Iterator[Case]:
    for d in (64, 72, 128):
        for seq in SEQLENS:
            yield Case(f"d{d}-s{seq}", _self_attention(16384 // seq, seq, _heads(d), d, causal=True))


def _features() -> Iterator[Case]:
    for d in (64, 72):
        plain = _self_attention(4, 4096, _heads(d), d)
        causal = replace(plain, causal=True)
        yield Case(f"d{d}-gqa8", replace(causal, heads=32, kv_heads=4))
        yield Case(f"d{d}-gqa7", replace(causal, heads=28, kv_heads=4))
        yield Case(f"d{d}-window1024", replace(causal, window=(1024, -1)))
        yield Case(f"d{d}-softcap30", replace(causal, softcap=True), softcap=30.0)
        yield Case(f"d{d}-alibi", replace(causal, alibi=True))
        yield Case(f"d{d}-sinks", replace(causal, sinks=True))
        yield Case(f"d{d}-boolmask", replace(plain, mask="bool"))
        yield Case(f"d{d}-floatmask", replace(plain, mask="float"))
        yield _ragged(f"d{d}-varlen", causal, RAGGED)
        yield Case(f"d{d}-cross", replace(causal, seq_q=1024))
    yield Case("d192-v128", replace(_self_attention(4, 4096, 16, 192, causal=True), head_dim_v=128))


def _shapes() -> Iterator[Case]:
    """What the other suites leave out: one long sequence, many short ones, and lengths that differ widely."""
    long = _self_attention(1, 16384, 16, 128, causal=True)
    yield Case("gqa-s16384-d128-causal", replace(long, heads=32, kv_heads=8))
    yield Case("window1024-s16384-d128-causal", replace(long, window=(1024, -1)))
    yield _ragged("varlen64-d128-causal", long, MIXED)
    for batch, seq, dims in ((16, 1024, (64, 128)), (1, 16384, (64, 72, 128, 256))):
        for d in dims:
            for kind in ("full", "causal"):
                problem = _self_attention(batch, seq, _heads(d), d, causal=kind == "causal")
                yield Case(f"b{batch}-s{seq}-d{d}-{kind}", problem)


def _odd() -> Iterator[Case]:
    """Head dimensions whose rows are no multiple of 16 bytes, and one with few queries of many keys."""
    yield from _by_dimension(ODD_HEAD_DIMS)
    for seq_q in (1, 16, 256):
        yield Case(f"d97-q{seq_q}", replace(_self_attention(4, 4096, _heads(97), 97, causal=True), seq_q=seq_q))


def _fp8() -> Iterator[Case]:
    """One long sequence in bf16, and the same numbers in FP8."""
    for d in (64, 128, 256):
        for kind in ("full", "causal"):
            for dtype in ("bf16", "fp8"):
                problem = _self_attention(1, 16384, _heads(d), d, causal=kind == "causal", dtype=dtype)
                yield Case(f"d{d}-{kind}-{dtype}", problem)


SUITES = {
    "headdims": _headdims, "scaling": _scaling, "seqlens": _seqlens, "features": _features, "shapes": _shapes,
    "fp8": _fp8, "odd": _odd,
}  # fmt: skip


def _heads(head_dim: int) -> int:
    """As many heads as keep the model width near 2048."""
    return max(1, round(2048 / head_dim))


def _self_attention(batch: int, seq: int, heads: int, head_dim: int, **features: Any) -> AttentionProblem:
    return AttentionProblem(
        batch=batch, seq_q=seq, seq_k=seq, heads=heads, kv_heads=heads, head_dim=head_dim, **features
    )


def _ragged(name: str, problem: AttentionProblem, lengths: tuple[int, ...]) -> Case:
    longest, total = max(lengths), sum(lengths)
    ragged = replace(problem, varlen=True, batch=len(lengths), seq_q=longest, seq_k=longest)
    return Case(name, replace(ragged, total_q=total, total_k=total), lengths=lengths)


def _tiny(case: Case) -> Case:
    """The same features and head dimension at a size that a CPU checks in milliseconds."""
    p = case.problem
    group = p.heads // p.kv_heads
    kv_heads = 1 if group > 1 else 2
    p = replace(p, heads=group * kv_heads, kv_heads=kv_heads)
    if p.window[0] >= 0:
        p = replace(p, window=(p.window[0] // 64, p.window[1]))
    if case.lengths:
        tiny = _ragged(case.name, p, tuple(max(1, n // 64) for n in case.lengths))
        return replace(tiny, softcap=case.softcap)
    return replace(case, problem=replace(p, batch=min(p.batch, 2), seq_q=max(1, p.seq_q // 64), seq_k=p.seq_k // 64))
