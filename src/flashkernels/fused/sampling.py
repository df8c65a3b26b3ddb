"""Drawing tokens from logits: penalties, temperature, top-k, top-p and min-p, without sorting the vocabulary."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from flashkernels.arguments import check_strided
from flashkernels.dispatch import Impl, check_impl, leaves_the_cpu, serving
from flashkernels.fused.draws import MOST_TOKENS, draw
from flashkernels.fused.rows import DTYPES, RowProblem, check_number, gpu_of, needs_triton, row_problem
from flashkernels.hardware import Gpu
from flashkernels.jit.eager import Plans, Run

GREEDY_BELOW = 1e-5  # temperatures
MOST_NUMBER = 3e38  # what +inf counts as: sums and differences stay numbers
MOST_FP32 = torch.finfo(torch.float32).max
MOST_TOP_N = 256
CAPACITIES = (64, 1024)  # candidates that a program sorts: at least, at most
ALLOWED = tuple(dtype for dtype in DTYPES if dtype != torch.float64)
INTEGERS = (torch.int32, torch.int64)

# Best first. "auto" takes the first row that does not reject the problem. `torch` is in this file.
IMPLS = (
    Impl("triton", "flashkernels.fused.triton.sampling", rejects=needs_triton, defers=leaves_the_cpu),
    Impl("torch", "flashkernels.fused.sampling"),
)


class Sampled(NamedTuple):
    """One token for each row."""

    ids: Tensor  # (B,) int64
    logprobs: Tensor  # (B,) fp32
    top_ids: Tensor  # (B, top_n) int64, best first
    top_logprobs: Tensor  # (B, top_n) fp32

    @staticmethod
    def empty(logits: Tensor, top_n: int) -> Sampled:
        """To be filled."""
        rows, device = logits.shape[0], logits.device
        return Sampled(
            torch.empty(rows, dtype=torch.int64, device=device),
            torch.empty(rows, dtype=torch.float32, device=device),
            torch.empty((rows, top_n), dtype=torch.int64, device=device),
            torch.empty((rows, top_n), dtype=torch.float32, device=device),
        )


class Sample(NamedTuple):
    """What a call asks for, beside its tensors and numbers."""

    top_n: int
    capacity: int  # candidates that a kernel has room for
    impl: str


class Numbers(NamedTuple):
    """What all rows have, where there is no tensor with one for each."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition: float
    presence: float
    frequency: float
    seed: int
    offset: int

    @property
    def one(self) -> bool:
        """Whether one token stays, by these numbers."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    def settled(self, width: int) -> bool:
        """Whether it is known how many tokens stay: one, or all."""
        return self.one or (not 0 < self.top_k < width and self.top_p >= 1 and self.min_p <= 0)


def sample(
    logits: Tensor, *, temperature: float | Tensor = 1.0, top_k: int | Tensor = 0, top_p: float | Tensor = 1.0,
    min_p: float | Tensor = 0.0, repetition_penalty: float | Tensor = 1.0, presence_penalty: float | Tensor = 0.0,
    frequency_penalty: float | Tensor = 0.0, previous: Tensor | None = None, counts: Tensor | None = None,
    seeds: int | Tensor | None = None, offsets: int | Tensor = 0, top_n: int = 0, impl: str = "auto",
) -> Sampled:  # fmt: skip
    """Draws one token for each row of logits.

    In this order, in fp32: penalties, temperature, top-k, top-p, min-p, and a draw from what stays. Each cut is of the
    distribution that the cut before it left, renormalised. Equal tokens stay or go by their id, lower ones first.

    Every setting is a number, or a tensor (B,) on the device of the logits: fp32, and int32 or int64 for top_k, seeds
    and offsets. Tensors are not checked (that would wait for the device): what is out of range counts as the nearest
    number that is not. NaN is greedy as a temperature, and as a top_p or min_p it cuts nothing.

    Args:
        logits: (B, V), fp16, bf16 or fp32, with V up to 1048576. -inf is never drawn; NaN counts as -inf, and +inf as
            3e38.
        temperature: logits are multiplied by its inverse. Below 1e-5 the row is greedy: its largest token is taken, and
            the temperature is 1.
        top_k: the k largest tokens stay. 0, a negative number, and V or more cut nothing.
        top_p: the fewest largest tokens stay that together have at least this share of what top_k left; one at least.
        min_p: tokens stay that are at least this times as probable as the most probable one.
        repetition_penalty: logits of previous tokens are divided by it where positive, multiplied where not.
        presence_penalty, frequency_penalty: are subtracted from those, once and as often as the token is there.
        previous: (B, L) int32 or int64, the tokens that penalties are for; ids out of range, such as -1, are padding. A
            launch is prepared for each L: one that stays is best.
        counts: (B, V) int16 or int32, how often tokens were there: instead of `previous`, where someone counts anyway.
        seeds: a token is drawn by its row's seed and offset alone, whatever else is in the batch. A number n is
            n, n + 1, ... for the rows. None draws seeds from torch's generator of the device.
        offsets: of the draws of one seed, which one this is: the position of the token, for example.
        top_n: that many best tokens are returned too, up to 256.
        impl: "auto", or the name of the one implementation that must serve.

    Returns:
        ids, int64; the logarithm of their probability after penalties and temperature, before any cut; top_ids and
        top_logprobs, the same of the best tokens. A row without any number above -inf has id 0 and a log-probability of
        NaN. There are no gradients.

    >>> import torch, flashkernels as fk
    >>> logits = torch.tensor([[1.0, 3.0, 2.0], [0.0, 0.0, 9.0]])
    >>> found = fk.fused.sample(logits, temperature=0.0, top_n=2)
    >>> found.ids, found.top_ids
    (tensor([1, 2]), tensor([[1, 2],
            [2, 0]]))
    >>> fk.fused.sample(logits, top_k=2, top_p=0.9, temperature=torch.tensor([0.5, 1.0]), seeds=7).ids.shape
    torch.Size([2])
    """
    given = (temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty)
    settings, marked = (NO_ROWS, given) if PLAIN.issuperset(map(type, given)) else _rows(given)
    if seeds is None:
        _check_logits(logits)
        seeds = torch.randint(2**63 - 1, (logits.shape[0],), dtype=torch.int64, device=logits.device)
    try:
        found, capacity = _prepared(top_n, *marked) if is_compiling() else _known(top_n, *marked)
    except TypeError:
        found, capacity = _prepared(top_n, *marked)  # it names what has no hash, and what is no number
    if type(seeds) is int and type(offsets) is int and 0 <= seeds < 2**63 and 0 <= offsets < 2**63:
        seed_rows = offset_rows = None
        numbers: tuple[Any, ...] = (*found, seeds, offsets)
    else:
        (seed_rows, seed), (offset_rows, offset) = row_or_number("seeds", seeds), row_or_number("offsets", offsets)
        numbers = (*found, seed, offset)
    call = (top_n, capacity, impl)  # as `Sample` has them
    tensors: tuple[Any, ...] = (logits, previous, counts, seed_rows, offset_rows, *settings)
    run = _forward.ready(tensors, call)
    if run is not None:
        drawn: Sampled = run(numbers, *tensors)
        return drawn
    _check(top_n, *tensors)  # the same errors as eager
    check_impl(impl, IMPLS)
    heat, k, share, least, *penalties, seed, offset = numbers
    floats = [float(x) for x in (heat, share, least, *penalties)]
    return Sampled(
        *sample_op(logits, previous, counts, seed_rows, offset_rows, list(settings), floats, k, seed, offset, *call)
    )


PLAIN = frozenset((int, float))
NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
NO_ROWS = (None,) * len(NAMES)
RANGES = {"temperature": (0.0, None), "top_p": (0.0, 1.0), "min_p": (0.0, 1.0)}


def _rows(given: tuple[Any, ...]) -> tuple[tuple[Tensor | None, ...], tuple[Any, ...]]:
    """The settings that are tensors, and all of them with the class `Tensor` in the place of one."""
    rows = tuple([x if isinstance(x, Tensor) else None for x in given])
    return rows, tuple([x if row is None else Tensor for x, row in zip(given, rows, strict=True)])


def row_or_number(name: str, value: Any) -> tuple[Tensor | None, Any]:
    """seeds or offsets, checked: the tensor, or the number."""
    if isinstance(value, Tensor):
        return value, 0
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name}={value!r} must be a whole number or a tensor, got {type(value).__name__}")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(f"{name}={value} does not fit 64 bits")
    return None, value


def _prepared(top_n: Any, *marked: Any) -> tuple[tuple[float, int, float, float, float, float, float], int]:
    """The settings that are numbers, checked (a tensor's is one that changes nothing), and the candidates' room."""
    found = _checked(*marked)
    rows = tuple([x if x is Tensor else None for x in marked])
    return found, room(Numbers(*found, 0, 0), rows, top_n) if type(top_n) is int else 0


def _checked(*numbers: Any) -> tuple[float, int, float, float, float, float, float]:
    """Settings as `Numbers` has them; `Tensor` stands for one."""
    found: list[float] = []
    for name, value in zip(NAMES, numbers, strict=True):
        if value is Tensor:
            found.append(1 if name in ("temperature", "top_p", "repetition_penalty") else 0)
            continue
        if name == "top_k":
            if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
                raise TypeError(f"top_k={value!r} must be a whole number or a tensor, got {type(value).__name__}")
            found.append(int(min(max(value, 0), MOST_TOKENS)))
            continue
        check_fp32(name, value)
        low, high = RANGES.get(name, (None, None))
        if (low is not None and value < low) or (high is not None and value > high):
            raise ValueError(f"{name}={value} must be {f'from {low} to {high}' if high else f'at least {low}'}")
        if name == "repetition_penalty" and value <= 0:
            raise ValueError(f"repetition_penalty={value} must be above 0")
        found.append(value)
    heat, share, least, repetition, presence, frequency = (float(x) for x in (found[0], *found[2:]))
    heat = heat if heat >= GREEDY_BELOW else 0.0  # in fp32 it may be no less than that
    return heat, int(found[1]), share, least, repetition, presence, frequency


_known = functools.lru_cache(maxsize=1024, typed=True)(_prepared)  # 1, 1.0 and True are not equally valid


def room(numbers: Numbers, settings: tuple[Any, ...], top_n: int) -> int:
    """Room for four times the candidates that are wanted, a power of two; the most where a tensor has their number."""
    low, high = CAPACITIES
    wanted = numbers.top_k
    if settings[0] is None and numbers.temperature < GREEDY_BELOW:
        wanted = 1
    elif settings[1] is not None or wanted == 0:
        wanted = high
    return min(high, max(low, 1 << (4 * max(wanted, top_n) - 1).bit_length()))


# --- checks


def check_fp32(name: str, value: Any) -> None:
    """A number that fp32 has, but for rounding."""
    check_number(name, value)
    if isinstance(value, (int, float)) and abs(value) > MOST_FP32:
        raise ValueError(f"{name}={value} does not fit fp32")


def _check_logits(logits: Tensor) -> None:
    if not isinstance(logits, Tensor):
        raise TypeError(f"logits must be a torch.Tensor, got {type(logits).__name__}")
    check_strided("logits", logits)
    if logits.dtype not in ALLOWED:
        raise TypeError(f"logits.dtype={logits.dtype} is not supported; allowed: {', '.join(map(str, ALLOWED))}")
    if logits.dim() != 2:
        raise ValueError(f"logits has shape {tuple(logits.shape)}; expected (B, V)")
    if not 1 <= logits.shape[1] <= MOST_TOKENS:
        raise ValueError(f"logits has {logits.shape[1]} tokens; allowed are 1 to {MOST_TOKENS}")


def check_tensor(
    name: str, x: Any, shape: tuple[int, ...], dtypes: Sequence[torch.dtype], device: torch.device, of: str = "logits"
) -> None:
    """x is None, or a tensor of this shape, with one of these dtypes, on the device of the argument `of`."""
    if x is None:
        return
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.dtype not in dtypes:
        raise TypeError(f"{name}.dtype={x.dtype} is not supported; allowed: {', '.join(map(str, dtypes))}")
    if x.shape != shape:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; expected {shape}")
    if x.device != device:
        raise ValueError(f"{name}.device={x.device} differs from {of}.device={device}")


def _check(
    top_n: int, logits: Tensor, previous: Tensor | None, counts: Tensor | None, seeds: Tensor | None,
    offsets: Tensor | None, *settings: Tensor | None,
) -> None:  # fmt: skip
    _check_logits(logits)
    rows, width = logits.shape
    if type(top_n) is not int or not 0 <= top_n <= min(MOST_TOP_N, width):
        raise ValueError(f"top_n={top_n!r} must be a whole number from 0 to {min(MOST_TOP_N, width)}")
    device = logits.device
    if previous is not None and counts is not None:
        raise ValueError("previous and counts are both given; counts are instead of previous")
    if isinstance(previous, Tensor) and previous.dim() != 2:
        raise ValueError(f"previous has shape {tuple(previous.shape)}; expected ({rows}, L)")
    length = previous.shape[1] if isinstance(previous, Tensor) else 0
    check_tensor("previous", previous, (rows, length), INTEGERS, device)
    check_tensor("counts", counts, (rows, width), (torch.int16, torch.int32), device)
    check_tensor("seeds", seeds, (rows,), INTEGERS, device)
    check_tensor("offsets", offsets, (rows,), INTEGERS, device)
    for name, x in zip(NAMES, settings, strict=True):
        check_tensor(name, x, (rows,), INTEGERS if name == "top_k" else (torch.float32,), device)


# --- dispatch


def _plan(tensors: tuple[Any, ...], settings: tuple[Any, ...]) -> Run:
    """What it returns takes the fields of `Numbers` first."""
    call = Sample(*settings)
    _check(call.top_n, *tensors)
    problem, gpu = row_problem("sample", tensors[0], 1), gpu_of(tensors[0])
    prepared = serving(IMPLS, problem, gpu, call.impl).plan(problem, gpu, tensors, call)

    counts, settings = tensors[2], tensors[3:]
    if (counts is None or counts.stride(1) == 1) and all(x is None or x.is_contiguous() for x in settings):
        return prepared

    def run(
        numbers: tuple[Any, ...], logits: Tensor, previous: Tensor | None, counts: Tensor | None,
        *settings: Tensor | None,
    ) -> Any:  # fmt: skip
        beside = None if counts is None or counts.stride(1) == 1 else counts.contiguous()
        dense = (None if x is None else x.contiguous() for x in settings)
        return prepared(numbers, logits, previous, counts if beside is None else beside, *dense)

    return run


_forward = Plans(_plan)


# --- the `torch` implementation


def plan(problem: RowProblem, gpu: Gpu | None, tensors: tuple[Any, ...], call: Sample) -> Run:
    def run(
        numbers: tuple[Any, ...], logits: Tensor, previous: Tensor | None, counts: Tensor | None, seeds: Tensor | None,
        offsets: Tensor | None, *settings: Tensor | None,
    ) -> Sampled:  # fmt: skip
        rows, device = logits.shape[0], logits.device
        first_seed, same_offset = numbers[7:]

        def column(x: Tensor | None, number: float) -> Tensor:
            dtype = torch.float32 if isinstance(number, float) else torch.int64  # whatever torch's default is
            return torch.full((rows,), number, dtype=dtype, device=device)[:, None] if x is None else x[:, None]

        temperature, top_k, top_p, min_p, *penalties = map(column, settings, numbers[:7])
        top_p = torch.where(top_p < 1, top_p, 1.0)  # NaN too cuts nothing
        min_p = torch.where(min_p > 0, min_p, 0.0).clamp(max=1.0)
        if rows == 0:
            return Sampled.empty(logits, call.top_n)
        seen = _counted(previous, logits) if previous is not None else counts
        greedy = ~(temperature >= GREEDY_BELOW)
        x = _penalised(logits.float(), seen, penalties) * (1 / torch.where(greedy, 1.0, temperature))
        x = torch.where(x.isnan(), -torch.inf, x).clamp(max=MOST_NUMBER)
        dead = x.amax(1) == -torch.inf
        x = torch.where(dead[:, None], 0.0, x)
        stay = kept(x, torch.where(greedy, 1, top_k), top_p, min_p)
        seed = torch.arange(rows, device=device) + first_seed if seeds is None else seeds
        offset = torch.full((rows,), same_offset, device=device) if offsets is None else offsets
        relative = x - x.amax(1, keepdim=True)
        ids = draw(torch.where(stay, relative, -torch.inf), seed, offset, _whole(x, greedy, top_k, top_p, min_p))
        logprobs = torch.where(dead[:, None], torch.nan, relative - relative.logsumexp(1, keepdim=True))
        top_ids = torch.sort(x, dim=1, descending=True, stable=True)[1][:, : call.top_n]
        ids = torch.where(dead, 0, ids)
        chosen = logprobs.gather(1, ids[:, None])[:, 0]
        return Sampled(ids, chosen, top_ids.contiguous(), logprobs.gather(1, top_ids))

    return run


def _counted(previous: Tensor, logits: Tensor) -> Tensor:
    """(B, V), how often tokens are there."""
    rows, width = logits.shape
    counts = torch.zeros((rows, width + 1), dtype=torch.int32, device=logits.device)
    ids = torch.where((previous >= 0) & (previous < width), previous, width).long()
    return counts.scatter_add_(1, ids, torch.ones_like(ids, dtype=torch.int32))[:, :width]


def _penalised(x: Tensor, counts: Tensor | None, penalties: Sequence[Tensor]) -> Tensor:
    if counts is None:
        return x
    repetition, presence, frequency = penalties
    less = torch.where(x > 0, x / repetition, x * repetition) - frequency * counts - presence
    return torch.where(counts > 0, less, x)


def kept(x: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Which tokens of x (B, V) stay; the settings are (B, 1)."""
    width = x.shape[1]
    value, order = torch.sort(x, dim=1, descending=True, stable=True)
    rank = torch.arange(width, device=x.device)
    weight = torch.exp(value - value[:, :1])
    stay = rank < torch.where((top_k <= 0) | (top_k > width), width, top_k)
    weight = torch.where(stay, weight, 0.0)
    stay &= (top_p >= 1) | (weight.cumsum(1) - weight < top_p * weight.sum(1, keepdim=True))
    stay &= (min_p <= 0) | (value >= value[:, :1] + torch.log(min_p))
    stay |= rank == 0
    return torch.zeros_like(stay).scatter_(1, order, stay)


def _whole(x: Tensor, greedy: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """(B,): rows that no setting cuts."""
    uncut = (top_k <= 0) | (top_k >= x.shape[1])
    return (uncut & ~greedy & (top_p >= 1) & (min_p <= 0))[:, 0]


# --- the registered op: schema and fake, for torch.compile and torch.export


@torch.library.custom_op("flashkernels::sample", mutates_args=())
def sample_op(
    logits: Tensor, previous: Tensor | None, counts: Tensor | None, seeds: Tensor | None, offsets: Tensor | None,
    settings: Sequence[Tensor | None], numbers: Sequence[float], top_k: int, seed: int, offset: int, top_n: int,
    capacity: int, impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`settings` are temperature, top_k, top_p, min_p and the three penalties; `numbers` the same without top_k."""
    tensors = (logits, previous, counts, seeds, offsets, *settings)
    heat, share, least, repetition, presence, frequency = numbers
    given = (heat, top_k, share, least, repetition, presence, frequency, seed, offset)
    return tuple(_forward.find(tensors, (top_n, capacity, impl))(given, *tensors))


@sample_op.register_fake
def _fake(
    logits: Tensor, previous: Tensor | None, counts: Tensor | None, seeds: Tensor | None, offsets: Tensor | None,
    settings: Sequence[Tensor | None], numbers: Sequence[float], top_k: int, seed: int, offset: int, top_n: int,
    capacity: int, impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    ids, logprobs, top_ids, top_logprobs = Sampled.empty(logits, top_n)
    return ids, logprobs, top_ids, top_logprobs
