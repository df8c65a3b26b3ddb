"""Runs a suite: every contestant is checked against the oracle, then the right ones are timed side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import flashkernels as fk
from flashkernels.attention.api import IMPLS
from flashkernels.attention.cases import Case, inputs
from flashkernels.attention.problem import AttentionProblem
from flashkernels.attention.triton import tiles
from flashkernels.bench import check, timing
from flashkernels.bench.peers import Peer, Unsupported
from flashkernels.bench.results import Row
from flashkernels.bench.suites import Suite
from flashkernels.dispatch import verdicts
from flashkernels.hardware import Gpu, detect
from flashkernels.tiling import TilingError, use_tile

HEAT_SECONDS, REHEAT_SECONDS = 1.5, 0.3
STANDARD = "triton-standard"  # the triton kernel, padding to a power of two: what we measure our tiles against


class BenchError(RuntimeError):
    """The run cannot go on; the message names the contestant and the case."""


@dataclass(frozen=True)
class Contestant:
    """Someone to time: ours or a peer. `prepare` gives the call, or raises `Unsupported`."""

    name: str
    peer: bool
    prepare: Callable[[Any, tuple[Any, ...], dict[str, Any]], timing.Call]


@dataclass(frozen=True)
class Subject:
    """What the runner needs to know of an op: inputs of a case, what they should give, what plain torch makes of them,
    how far a result is from the truth, and the parameters that a row has."""

    inputs: Callable[[Any, str], tuple[tuple[Any, ...], dict[str, Any]]]
    oracle: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
    plain: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
    error: Callable[[Any, Any, Any], float]
    params: Callable[[Any, Suite], dict[str, Any]]
    # The arguments and others like them, so many that what they hold is read again only when the L2 has lost it. Where
    # there is this, calls of a graph take turns with them; else the L2 is flushed before each call.
    turns: Callable[[Any, tuple[Any, ...]], list[tuple[Any, ...]]] | None = None


def attention() -> Subject:
    return Subject(
        inputs=lambda case, device: inputs(case, device=device),
        oracle=check.oracle,
        plain=check.plain,
        error=lambda found, reference, case: check.relative_error(found, reference),
        params=_params,
    )


# Those of ours that take part in a case, on a GPU or none: the ones named, or by default the best.
Ours = Callable[[Any, "Gpu | None", "Sequence[str] | None"], "list[Contestant]"]


def run(
    suite: Suite, peers: Sequence[Peer], *, impls: Sequence[str] | None = None, rounds: int = 5,
    contestants: Ours | None = None, subject: Subject | None = None,
) -> Iterator[list[Row]]:  # fmt: skip
    """Measures one case after the other and yields its rows. Attention's, unless the last two are another op's."""
    gpu = detect() if suite.device == "cuda" else None
    if gpu:
        timing.heat(HEAT_SECONDS)
    for case in suite.cases:
        mine = (contestants or ours)(case, gpu, impls)
        yield measure(case, suite, [*mine, *theirs(peers)], gpu, rounds, subject)


def choose(names: str) -> tuple[str, ...]:
    """Our implementations by a comma-separated list of their names.

    >>> choose("triton, torch")
    ('triton', 'torch')
    """
    return named(names, [*(impl.name for impl in IMPLS), STANDARD])


def named(names: str, known: Sequence[str]) -> tuple[str, ...]:
    """The names of a comma-separated list, all of which must be known."""
    wanted = tuple(name.strip() for name in names.split(","))
    for name in wanted:
        if name not in known:
            raise ValueError(f"impls={name!r} is not one of {', '.join(map(repr, known))}")
    return wanted


def ours(case: Case, gpu: Gpu | None, impls: Sequence[str] | None = None) -> list[Contestant]:
    """Our implementations that take part: those of `impls` that can serve the case, or those that "auto" may take.

    Of the latter, on a GPU the oracle takes part only where nothing else serves; on the CPU the Triton kernel never
    does, because the time of its interpreter says nothing.
    """
    if impls is not None:
        able = [impl.name for impl in IMPLS if impl.rejects(case.problem, gpu) is None]
        names = [name for name in able if name in impls]
    else:
        able = names = [verdict.name for verdict in verdicts(IMPLS, case.problem, gpu) if verdict.reason is None]
        if gpu is None:
            names = [name for name in able if name != "triton"]
        elif len(able) > 1:
            names = [name for name in able if name != "torch"]
    contestants = [Contestant(name, False, partial(_our_call, impl=name)) for name in names]
    wanted = impls is None or STANDARD in impls
    if wanted and "triton" in able and gpu and _differs_from_standard(case, gpu):
        contestants.append(Contestant(STANDARD, False, partial(_our_call, impl="triton", strategy="standard")))
    return contestants


def theirs(peers: Sequence[Peer]) -> list[Contestant]:
    return [Contestant(peer.name, True, peer.prepare) for peer in peers]


def launch_costs(device: str, impls: Sequence[str] | None = None) -> dict[str, float]:
    """CPU microseconds of one eager `fk.attention` call, at a size that costs the device next to nothing.

    One figure for each implementation of ours that takes part; the first is the one that "auto" takes.
    """
    dtype = "fp32" if device == "cpu" else "bf16"
    problem = AttentionProblem(
        batch=1, seq_q=64, seq_k=64, heads=1, kv_heads=1, head_dim=64, causal=True, dtype=dtype, device=device
    )
    case = Case("launch", problem)
    gpu = detect() if device == "cuda" else None
    return costs(case, ours(case, gpu, impls), attention(), device)


def costs(
    case: Any, contestants: Sequence[Contestant], subject: Subject, device: str, calls: int = 50
) -> dict[str, float]:
    """CPU microseconds of one eager call of each."""
    args, kwargs = subject.inputs(case, device)
    found = {}
    for contestant in contestants:
        call = contestant.prepare(case, args, kwargs)
        with call.scope():
            found[contestant.name] = round(timing.launch_cost(call.run, device=device, calls=calls), 2)
    return found


def l2_of(case: Any, suite: Suite) -> timing.L2:
    """The suite's, unless the case has its own."""
    return getattr(case, "l2", None) or suite.l2


def measure(
    case: Any, suite: Suite, contestants: Sequence[Contestant], gpu: Gpu | None, rounds: int,
    subject: Subject | None = None,
) -> list[Row]:  # fmt: skip
    """One row a contestant: first everyone is checked, then those who are right take turns under the clock."""
    subject = subject or attention()
    launch = getattr(case, "launch", suite.launch)  # some suites compare ways to launch
    l2 = l2_of(case, suite)
    args, kwargs = subject.inputs(case, suite.device)
    turns: list[tuple[Any, ...]] = []
    if subject.turns and suite.device == "cuda" and launch == "graph" and l2 == "cold":
        turns = subject.turns(case, args)
    reference = subject.oracle(case, args, kwargs)
    reference_error = subject.error(subject.plain(case, args, kwargs), reference, case)
    errors: dict[str, float] = {}
    samplers: dict[str, timing.Sampler] = {}
    reasons: dict[str, str] = {}
    for contestant in contestants:
        name = contestant.name
        try:
            call = contestant.prepare(case, args, kwargs)
            with call.scope():
                errors[name] = subject.error(call.run(), reference, case)
            if not errors[name] <= check.tolerance(reference_error):  # a NaN fails too
                reasons[name] = f"error {errors[name]:.2g} is over {check.tolerance(reference_error):.2g}"
            else:
                if turns:
                    call = timing.in_turns([contestant.prepare(case, each, kwargs) for each in turns])
                samplers[name] = timing.sampler(call, device=suite.device, l2=l2, launch=launch, turns=len(turns))
        except Unsupported as unsupported:
            reasons[name] = str(unsupported)
        except Exception as error:  # someone else's code may raise anything, and must not end the run
            reasons[name] = _in_words(error)
            _still_alive(name, case, error)
    del reference
    if gpu:
        timing.heat(REHEAT_SECONDS)  # the first calls, off the clock, may have compiled for seconds: the chip is cool
    times: dict[str, timing.Times] = {}
    for name, outcome in timing.interleave(samplers, rounds).items():
        if isinstance(outcome, timing.Times):
            times[name] = outcome
        else:
            reasons[name] = _in_words(outcome)
            _still_alive(name, case, outcome)

    rows = []
    for contestant in contestants:
        name = contestant.name
        figures: dict[str, Any] = {"reference_error": reference_error}
        if errors.get(name, float("nan")) == errors.get(name):
            figures["error"] = errors[name]
        if name in times:
            figures |= _figures(case, times[name], gpu)
        else:
            figures |= {"ok": False, "reason": reasons[name]}
        params = subject.params(case, suite)
        rows.append(Row(suite.op, suite.name, case.name, params, impl=name, peer=contestant.peer, **figures))
    if gpu:
        samplers.clear()  # graphs hold memory
        torch.cuda.empty_cache()
    return rows


def _differs_from_standard(case: Case, gpu: Gpu) -> bool:
    """Whether padding to a power of two is possible, and not what the kernel chooses anyway."""
    try:
        chosen, standard = (
            tiles.choose(case.problem, gpu, gpu.has_tma, strategy).tile for strategy in (None, "standard")
        )
    except TilingError:
        return False
    return (chosen.parts, chosen.parts_v) != (standard.parts, standard.parts_v)


def _our_call(
    case: Case, args: tuple[Any, ...], kwargs: dict[str, Any], *, impl: str, strategy: str | None = None
) -> timing.Call:
    attend = fk.attention_varlen if case.lengths else fk.attention
    scope = partial(use_tile, strategy) if strategy else nullcontext
    return timing.Call(lambda: attend(*args, impl=impl, **kwargs), scope)


def _figures(case: Any, times: timing.Times, gpu: Gpu | None) -> dict[str, Any]:
    seconds, flops, traffic = times.p50 / 1e3, case.flops(), case.problem.bytes()
    figures: dict[str, Any] = {
        "ms_p50": times.p50,
        "ms_p99": times.p99,
        "tflops": flops / seconds / 1e12,
        "tbps": traffic / seconds / 1e12,
    }
    multiplied = getattr(case.problem, "compute", case.problem.dtype)  # quantised weights differ from the rest
    if gpu and multiplied in gpu.peak:
        compute, memory = flops / gpu.peak[multiplied], traffic / gpu.bandwidth
        figures |= {"roofline": max(compute, memory) / seconds, "bound": "compute" if compute >= memory else "memory"}
    return figures


def _params(case: Case, suite: Suite) -> dict[str, Any]:
    """Everything that changes the figure; features that a case does not use are left out."""
    p = case.problem
    params: dict[str, Any] = {"batch": p.batch, "seq": p.seq_q}
    if p.seq_k != p.seq_q:
        params["seq_k"] = p.seq_k
    params |= {"heads": p.heads, "kv_heads": p.kv_heads, "head_dim": p.head_dim}
    if p.head_dim_v != p.head_dim:
        params["head_dim_v"] = p.head_dim_v
    params["causal"] = p.causal
    features = {
        "window": list(p.window) if p.window != (-1, -1) else None,
        "softcap": case.softcap,
        "alibi": p.alibi,
        "sinks": p.sinks,
        "mask": p.mask,
        "lengths": list(case.lengths),
    }
    params |= {name: value for name, value in features.items() if value}
    return params | {"dtype": p.dtype, "launch": suite.launch, "l2": suite.l2}


def _in_words(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    first = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {first}"[:300]


def _still_alive(name: str, case: Any, error: Exception) -> None:
    """An illegal access breaks the CUDA context for everyone: then no later figure would mean anything."""
    if not torch.cuda.is_available():
        return
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError as broken:
        raise BenchError(f"{name} on {case.name} has broken the CUDA context: {error}") from broken
