"""Benchmarks of decoding: what the runner needs to know of a cache, and how far its formats are from bf16."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

import flashkernels as fk
from flashkernels.attention.reference import attention
from flashkernels.bench import check, runner, timing
from flashkernels.bench.peers import Peer
from flashkernels.bench.results import Row
from flashkernels.bench.runner import BenchError as BenchError, Contestant, Subject
from flashkernels.bench.suites import Suite
from flashkernels.decode.api import IMPLS
from flashkernels.decode.cases import Case, inputs, suite as cases
from flashkernels.decode.reference import keys_of
from flashkernels.formats import FORMATS, decode as numbers, encode
from flashkernels.hardware import Gpu, detect
from flashkernels.kvcache import PagedCache


def run(
    suite: Suite, peers: Sequence[Peer], *, impls: Sequence[str] | None = None, rounds: int = 5
) -> Iterator[list[Row]]:
    """Measures one case after the other and yields its rows, with the figures of the keys that are there."""
    gpu = detect() if suite.device == "cuda" else None
    measured = runner.run(suite, peers, impls=impls, rounds=rounds, contestants=ours, subject=SUBJECT)
    for case, rows in zip(suite.cases, measured, strict=True):
        yield [_counted(row, case, gpu) for row in rows]


def choose(names: str) -> tuple[str, ...]:
    """Our implementations by a comma-separated list of their names; "invariant" is triton with batch_invariant=True."""
    return runner.named(names, [*(impl.name for impl in IMPLS), INVARIANT])


INVARIANT = "invariant"


def ours(case: Case, gpu: Gpu | None, impls: Sequence[str] | None = None) -> list[Contestant]:
    """Our implementations that take part: by default the best one that serves, and on a GPU what invariance costs."""
    able = [impl.name for impl in IMPLS if impl.rejects(case.problem, gpu) is None]
    if gpu:
        able.append(INVARIANT)
    best = [able[0], INVARIANT] if gpu else ["torch"]  # the time of Triton's interpreter says nothing
    names = best if impls is None else [name for name in able if name in impls]
    return [Contestant(name, False, partial(_our_call, impl=name)) for name in names]


def launch_costs(device: str, impls: Sequence[str] | None = None) -> dict[str, float]:
    """CPU microseconds of one eager call, at a size that costs the device next to nothing."""
    case = cases("formats", device=device, quick=device == "cpu")[0]
    return runner.costs(case, ours(case, detect() if device == "cuda" else None, impls), SUBJECT, device)


def _our_call(case: Case, args: tuple[Any, ...], kwargs: dict[str, Any], *, impl: str) -> timing.Call:
    if impl == INVARIANT:
        return timing.Call(lambda: fk.decode(*args, batch_invariant=True))
    return timing.Call(lambda: fk.decode(*args, impl=impl))


def _counted(row: Row, case: Case, gpu: Gpu | None) -> Row:
    """The row with the figures of the keys that are there: `tbps` counts the cache's own bytes, read once."""
    if not row.ok:
        return row
    flops, moved = case.flops(), case.cache_bytes()
    figures: dict[str, Any] = {"tflops": flops / row.seconds / 1e12, "tbps": moved / row.seconds / 1e12}
    if gpu:
        compute, memory = flops / gpu.peak["bf16"], moved / gpu.bandwidth
        figures |= {
            "roofline": max(compute, memory) / row.seconds,
            "bound": "compute" if compute >= memory else "memory",
        }
    return replace(row, **figures)


# --- what is right


def oracle(case: Case, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Attention in fp32 over the keys that come back from the cache, sequence by sequence."""
    return _by_sequence(args, torch.float32)


def plain(case: Case, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The same with keys, values and output rounded to the dtype of the queries."""
    return _by_sequence(args, args[0].dtype).to(args[0].dtype)


def _by_sequence(args: tuple[Any, ...], dtype: torch.dtype) -> Tensor:
    q, cache = args
    outs = []
    for b, length in enumerate(cache.lengths.tolist()):
        k, v = (x.to(dtype) for x in keys_of(cache, b, length))
        if dtype == torch.float32:
            outs.append(attention(q[b : b + 1].float(), k[None], v[None], q.shape[-1] ** -0.5)[0])
        else:
            outs.append(_naive(q[b : b + 1], k[None], v[None]))
    return torch.cat(outs)


def _naive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One query of each head in its own dtype, as a user would write it."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2).transpose(1, 2) for x in (k, v))
    p = torch.softmax(q.transpose(1, 2) @ k.mT * q.shape[-1] ** -0.5, -1)
    return (p @ v).transpose(1, 2)


def _params(case: Case, suite: Suite) -> dict[str, Any]:
    """Everything that changes the figure."""
    p = case.problem
    params: dict[str, Any] = {"batch": p.batch, "context": p.context, "kv": p.format, "page_size": p.page_size}
    if len(set(case.lengths)) > 1:
        params["keys"] = sum(case.lengths)
    params |= {"heads": p.heads, "kv_heads": p.kv_heads, "head_dim": p.head_dim}
    if p.head_dim_v != p.head_dim:
        params["head_dim_v"] = p.head_dim_v
    return params | {"dtype": p.dtype, "launch": suite.launch, "l2": runner.l2_of(case, suite)}


APART = 200e6  # bytes read before any of them is read again: four times an H200's L2


def _turns(case: Case, args: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """The queries with the cache and copies of it."""
    q, cache = args
    more = -(-int(APART) // case.cache_bytes()) - 1
    return [args, *((q, _copy(cache)) for _ in range(more))]


def _copy(cache: PagedCache) -> PagedCache:
    k = cache.k.clone()
    v = k[..., : cache.v.shape[-1]] if cache.shared else cache.v.clone()
    k_scale = v_scale = None
    if cache.k_scale is not None and cache.v_scale is not None:
        k_scale = cache.k_scale.clone()
        v_scale = k_scale[..., : cache.v_scale.shape[-1]] if cache.shared else cache.v_scale.clone()
    return replace(cache, k=k, v=v, k_scale=k_scale, v_scale=v_scale)


SUBJECT = Subject(
    inputs=lambda case, device: (inputs(case, device=device), {}),
    oracle=oracle,
    plain=plain,
    error=lambda found, reference, case: check.relative_error(cast(Tensor, found), reference),
    params=_params,
    turns=_turns,
)


# --- how far the formats are from bf16

OUTLIERS, OUTLIER_SIZE = 0.01, 20.0  # the share of channels that are so many times as large
QUANTISED = tuple(form.name for form in FORMATS.values() if form.quantised)


def accuracy(
    device: str, *, draws: int = 64, keys: int = 1024, heads: int = 8, dim: int = 128
) -> dict[str, dict[str, tuple[float, float]]]:
    """Relative errors of the output and of the attention probabilities, by distribution of K and V and by format.

    Against bf16 keys and values, all attended to in fp32, so that nothing but the format shows. Each error is one ratio
    of norms, over all draws together: how much an outlier channel matters depends on the queries it meets, so a few
    draws say little. An outlier is a channel of one head, the same for all tokens; K and V have their own. The numbers
    are drawn on the CPU: the same on every device.
    """
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for name, share in (("normal", 0.0), (f"{OUTLIERS:.0%} of channels {OUTLIER_SIZE:.0f}x", OUTLIERS)):
        squares = {form: torch.zeros(2, 2, dtype=torch.float64) for form in QUANTISED}  # (out, p), (error, size)
        for seed in range(draws):
            q, k, v = (x.to(device) for x in _drawn(seed, share, keys, heads, dim))
            right = _attended(q, k, v)
            for form, total in squares.items():
                near = _attended(q, *(numbers(*_stored(x, form)) for x in (k, v)))
                for i in range(2):
                    total[i] += torch.stack([(near[i] - right[i]).norm(), right[i].norm()]).cpu().double() ** 2
        found[name] = {form: _ratios(total) for form, total in squares.items()}
    return found


def _drawn(seed: int, share: float, keys: int, heads: int, dim: int) -> tuple[Tensor, ...]:
    """q, k and v, (heads, rows, dim), rounded to bf16; a share of the channels of k and of v is larger."""
    random = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(heads, n, dim, generator=random) for n in (16, keys, keys))
    for x in (k, v):
        large = torch.ones(heads * dim)
        large[torch.randperm(heads * dim, generator=random)[: round(share * heads * dim)]] = OUTLIER_SIZE
        x *= large.view(heads, 1, dim)
    return tuple(x.bfloat16().float() for x in (q, k, v))


def _ratios(squares: Tensor) -> tuple[float, float]:
    out, probabilities = (squares[:, 0] / squares[:, 1]).sqrt().tolist()
    return float(f"{out:.4g}"), float(f"{probabilities:.4g}")


def _stored(x: Tensor, form: str) -> tuple[Tensor, Any, Tensor | None]:
    stored, scale = encode(x, FORMATS[form])
    return stored, FORMATS[form], scale


def _attended(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The output and the probabilities."""
    p = torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1)
    return p @ v, p
