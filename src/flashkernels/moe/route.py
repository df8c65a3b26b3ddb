"""Routing: scores, the k best experts of every token, and the tokens regrouped by expert, in one call."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashkernels.arguments import check_count, check_flag
from flashkernels.dispatch import Impl, check_impl, lacks_triton, leaves_the_cpu, serving
from flashkernels.fused.rows import DTYPES, check_choice, check_number, gpu_of
from flashkernels.hardware import Gpu
from flashkernels.jit.eager import Plans, Run, unwatched
from flashkernels.moe import reference
from flashkernels.moe.hopper.route_tiles import HopperRouteTile, forced_tile, rejects as needs_hopper
from flashkernels.moe.plan import BLOCKS, MOST_EXPERTS, MOST_ITEMS, MOST_K, Plan, block_rows, plan_of, sizes
from flashkernels.moe.problem import Choice, RouteProblem

SCORES = ("softmax", "sigmoid")
GROUP_SCORES = ("top2", "max")


def needs_triton(problem: RouteProblem, gpu: Gpu | None) -> str | None:
    return lacks_triton(problem.device, problem.dtype, gpu)


# Best first. "auto" takes the first row that does not reject the problem. `torch` is in this file.
IMPLS = (
    Impl("hopper", "flashkernels.moe.hopper.route", rejects=needs_hopper),
    Impl("triton", "flashkernels.moe.triton.route", rejects=needs_triton, defers=leaves_the_cpu),
    Impl("torch", "flashkernels.moe.route"),
)


class Routing(NamedTuple):
    """What `route` returns."""

    weights: Tensor  # (T, k) fp32
    ids: Tensor  # (T, k) int32
    plan: Plan | None


class Call(NamedTuple):
    """What a routing asks for, beside its tensors. Its first fields are those of a `Choice`."""

    k: int
    sigmoid: bool
    renormalise: bool
    groups: int
    top_groups: int
    top2: bool
    scale: float
    first: int  # of the experts that the plan has
    last: int
    block: int  # rows of a tile; 0: no plan
    impl: str
    apart: bool = False  # tensors of the plan that do not share their memory, as registered ops must
    tile: HopperRouteTile | None = None  # the one that `use_tile` gives

    @property
    def choice(self) -> Choice:
        return Choice(*self[:7])


class Regroup(NamedTuple):
    """What a regrouping asks for, beside its tensors."""

    experts: int
    first: int
    last: int
    block: int
    impl: str
    apart: bool = False


def route(
    logits: Tensor, k: int, *, score: str = "softmax", renormalise: bool = True, bias: Tensor | None = None,
    groups: int = 1, top_groups: int = 1, group_score: str = "top2", scale: float = 1.0, used: Tensor | None = None,
    span: tuple[int, int] | None = None, plan: bool = True, block: int | None = None, impl: str = "auto",
) -> Routing:  # fmt: skip
    """The k best experts of every token, their weights, and the tokens regrouped by expert.

    `s = softmax(logits)` or `sigmoid(logits)`, in fp32; ids are the k largest of `s + bias`, the largest first, equal
    ones by the lower id; `weights = scale * s[ids]`, divided by their sum where `renormalise`. Without a bias experts
    are chosen by their logits, which have the same order as `s` without its rounding.

    Args:
        logits: (T, E), fp16, bf16, fp32 (fp64 on the `torch` implementation); 1 <= E <= 1024. -inf hides an expert: its
            s is 0, and without a bias it is chosen last. A NaN counts as larger than all numbers, so its expert is
            chosen, and the weights that it reaches are NaN: with softmax or `renormalise` those of the token, else its
            own. A token that is -inf everywhere has weights of 0, and without a bias experts 0 to k - 1.
        k: experts of a token, at most 16.
        bias: (E,), added for the choice alone (DeepSeek-V3), in the precision of s, or None. It decides of hidden
            experts, too.
        groups, top_groups: experts come in so many equal groups, and only the best groups are chosen from. A group is
            worth the sum of its two best (`group_score="top2"`, DeepSeek-V3) or its best ("max", DeepSeek-V2).
        used: int32 tensor of one element on the device of the logits: only so many tokens are routed. The others get
            ids -1 and weight 0. With it, a CUDA graph captured for the most tokens serves any number of them.
        span: (first, last): the plan has only the experts first <= e < last, and numbers them from 0; the other items
            are dropped from it (expert parallelism). Ids keep their numbers.
        plan: without it only weights and ids are made.
        block: rows of a tile in the plan's schedule, 16, 32, 64 or 128; by default as suits the average load.
        impl: "auto", or the name of the one implementation that must serve.

    Returns:
        `Routing(weights (T, k) fp32, ids (T, k) int32, plan)`. Gradients flow from the weights to the logits. The same
        bit for bit in every run. At most two launches on a GPU, one on Hopper or where T * k <= 1024; never a host
        sync.

    >>> import torch, flashkernels as fk
    >>> weights, ids, plan = fk.moe.route(torch.tensor([[1.0, 3.0, 3.0], [0.0, -1.0, 2.0]]), 2)
    >>> ids.tolist(), plan.counts.tolist(), plan.permutation.tolist()
    ([[1, 2], [2, 0]], [1, 1, 2], [3, 0, 1, 2])
    """
    tile = None if torch.compiler.is_compiling() else forced_tile()  # then the op asks, when it runs
    ends = tuple(span) if isinstance(span, list) else span
    settings = (k, score, renormalise, groups, top_groups, group_score, scale, ends, plan, block, impl, tile)
    run = _routings.ready((logits, bias, used), settings)
    if run is not None:
        made: Routing = run(logits, bias, used)
        return made
    call = call_of(logits, *settings)
    _check(logits, bias, used, call)  # the same errors as eager
    weights, ids, *parts = route_op(logits, bias, used, *call[:11])
    return Routing(weights, ids, plan_of(parts, call.block) if plan else None)


def call_of(
    logits: Tensor, k: int, score: str, renormalise: bool, groups: int, top_groups: int, group_score: str, scale: float,
    span: tuple[int, ...] | None, plan: bool, block: int | None, impl: str, tile: HopperRouteTile | None,
) -> Call:  # fmt: skip
    """What `route` asks for."""
    check_choice("score", score, SCORES)
    check_choice("group_score", group_score, GROUP_SCORES)
    check_logits(logits)
    first, last = _checked_span(span, logits.shape[1])
    if block is not None:
        check_count("block", block)
    rows = block if block is not None else block_rows(logits.shape[0] * k, last - first) if type(k) is int else 0
    if rows not in BLOCKS:
        check_choice("block", block, (None, *BLOCKS))
    top2 = group_score == "top2"
    return Call(
        k, score == "sigmoid", renormalise, groups, top_groups, top2, scale, first, last, rows if plan else 0, impl,
        tile=tile,
    )  # fmt: skip


def regroup(
    ids: Tensor, experts: int, *, used: Tensor | None = None, span: tuple[int, int] | None = None,
    block: int | None = None, check: bool = False, impl: str = "auto",
) -> Plan:  # fmt: skip
    """The plan of a routing that was made elsewhere.

    Args:
        ids: (T, k) int32 or int64, experts of each token. An id outside of 0 <= id < experts belongs to no expert: its
            item is dropped, which is also the way to drop one on purpose (-1).
        experts: how many there are, at most 1024.
        used, span, block, impl: as in `route`.
        check: raise where an id of a token in use is out of range (-1 is not); waits for the device.

    >>> import torch, flashkernels as fk
    >>> fk.moe.regroup(torch.tensor([[2, 0], [2, -1]]), 3).inverse.tolist()
    [[1, 0], [2, -1]]
    """
    check_ids(ids, experts)
    if used is not None:
        check_used(used, ids)
    if check:
        _check_range(ids, experts, used)
    first, last = _checked_span(span, experts)
    rows = block if block is not None else block_rows(ids.numel(), last - first)
    check_choice("block", rows, BLOCKS)
    call = Regroup(experts, first, last, rows, impl)
    found = _regrouped((ids, used), call) if unwatched((ids, used)) else regroup_op(ids, used, *call[:-1])
    return plan_of(found, rows)


def presorted(counts: Tensor, rows: int, *, block: int | None = None) -> Plan:
    """The plan of tokens that are sorted by expert already, such as an all-to-all delivers.

    Args:
        counts: (E,) integers, the rows of each expert; one below 0 counts as 0. They may sum to less than `rows`. Where
            they sum to more, as after an all-to-all that did not fit, the rows past the last are dropped, and the
            plan's counts say so.
        rows: how many there are at most: the size of the tensor that holds them.

    >>> import torch, flashkernels as fk
    >>> plan = fk.moe.presorted(torch.tensor([2, 0, 1]), 4)
    >>> plan.offsets.tolist(), plan.permutation.tolist()
    ([0, 2, 2, 3], [0, 1, 2, -1])
    """
    if not isinstance(counts, Tensor) or counts.dim() != 1 or counts.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"counts must be a vector of int32 or int64, got {_described(counts)}")
    if not 1 <= counts.shape[0] <= MOST_EXPERTS:
        raise ValueError(f"counts has {counts.shape[0]} experts; allowed are 1 to {MOST_EXPERTS}")
    check_count("rows", rows)
    _check_items(rows, 1)
    chosen = block_rows(rows, counts.shape[0]) if block is None else block
    check_choice("block", chosen, BLOCKS)
    offsets = torch.nn.functional.pad(counts.clamp(min=0).cumsum(0).clamp(max=rows), (1, 0))
    counts = offsets.diff()  # less than was asked for, where the rows do not suffice
    places = torch.arange(rows, device=counts.device)
    places = torch.where(places < offsets[-1], places, -1)
    tiles, tile_offsets = reference.schedule(counts, rows, chosen)
    found = (counts, offsets, places, places[:, None], tiles, tile_offsets)
    return plan_of((x.to(torch.int32) for x in found), chosen)


# --- checks


def _described(x: Any) -> str:
    return f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


def check_logits(logits: Tensor) -> None:
    if not isinstance(logits, Tensor):
        raise TypeError(f"logits must be a torch.Tensor, got {type(logits).__name__}")
    if logits.dtype not in DTYPES:
        raise TypeError(f"logits.dtype={logits.dtype} is not supported; allowed: {', '.join(map(str, DTYPES))}")
    if logits.dim() != 2:
        raise ValueError(f"logits has shape {tuple(logits.shape)}; expected (tokens, experts)")
    if not 1 <= logits.shape[1] <= MOST_EXPERTS:
        raise ValueError(f"logits has {logits.shape[1]} experts; allowed are 1 to {MOST_EXPERTS}")


def _checked_span(span: Any, experts: int) -> tuple[int, int]:
    if span is None:
        return 0, experts
    whole = isinstance(span, (tuple, list)) and [*map(type, span)] == [int, int]
    if not whole or not 0 <= span[0] < span[1] <= experts:
        raise ValueError(f"span={span!r} is not a range (first, last) of the {experts} experts, in whole numbers")
    return span[0], span[1]


def _check_items(tokens: int, k: int) -> None:
    if tokens * k > MOST_ITEMS:
        raise ValueError(f"{tokens} tokens with k={k} are {tokens * k} items; allowed are {MOST_ITEMS}")


def check_used(used: Tensor, other: Tensor) -> None:
    if not isinstance(used, Tensor) or used.dtype != torch.int32 or used.numel() != 1:
        raise TypeError(f"used must be an int32 tensor of one element, got {_described(used)}")
    if used.device != other.device:
        raise ValueError(f"used.device={used.device} differs from that of the routing, {other.device}")


def _check(logits: Tensor, bias: Tensor | None, used: Tensor | None, call: Call) -> None:
    experts = logits.shape[1]
    if type(call.k) is not int or not 1 <= call.k <= min(MOST_K, experts):
        raise ValueError(f"k={call.k!r} must be a whole number from 1 to {min(MOST_K, experts)} with {experts} experts")
    if type(call.groups) is not int or call.groups < 1 or experts % call.groups:
        raise ValueError(f"groups={call.groups!r} does not divide the {experts} experts")
    if type(call.top_groups) is not int or not 1 <= call.top_groups <= call.groups:
        raise ValueError(f"top_groups={call.top_groups!r} must be from 1 to groups={call.groups}")
    if call.groups > 1 and call.top_groups * (experts // call.groups) < call.k:
        raise ValueError(f"k={call.k} experts are more than top_groups={call.top_groups} groups have")
    check_number("scale", call.scale)
    check_flag("renormalise", call.renormalise)
    check_impl(call.impl, IMPLS)
    if bias is not None:
        if not isinstance(bias, Tensor) or bias.dtype not in DTYPES:
            raise TypeError(f"bias must be a floating-point tensor, got {_described(bias)}")
        if bias.shape != (experts,):
            raise ValueError(f"bias has shape {tuple(bias.shape)}; expected ({experts},), one for each expert")
        if bias.device != logits.device:
            raise ValueError(f"bias.device={bias.device} differs from logits.device={logits.device}")
    if used is not None:
        check_used(used, logits)


def check_ids(ids: Tensor, experts: int) -> None:
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"ids must be an int32 or int64 tensor, got {_described(ids)}")
    if ids.dim() != 2 or not 1 <= ids.shape[1] <= MOST_K:
        raise ValueError(f"ids has shape {tuple(ids.shape)}; expected (tokens, k) with k from 1 to {MOST_K}")
    if type(experts) is not int or not 1 <= experts <= MOST_EXPERTS:
        raise ValueError(f"experts={experts!r} must be a whole number from 1 to {MOST_EXPERTS}")


def _check_range(ids: Tensor, experts: int, used: Tensor | None) -> None:
    if used is not None:
        ids = ids[: max(0, int(used))]
    if ids.numel():
        lowest, highest = int(ids.min()), int(ids.max())
        if lowest < -1 or highest >= experts:
            worst = lowest if lowest < -1 else highest
            raise ValueError(f"ids has {worst}; allowed are -1 (dropped) and 0 to {experts - 1}")


# --- dispatch


def _plan(tensors: tuple[Any, ...], call: Any) -> Run:
    logits, bias, used = tensors
    _check(logits, bias, used, call)
    tokens, experts = logits.shape
    _check_items(tokens, call.k)
    kind = DTYPES[logits.dtype], logits.device.type
    problem = RouteProblem(tokens, experts, call.k, *kind, call.block > 0, call.groups)
    gpu = gpu_of(logits)
    return serving(IMPLS, problem, gpu, call.impl).route_plan(problem, gpu, tensors, call)


def _plan_regroup(tensors: tuple[Any, ...], call: Any) -> Run:
    ids, _ = tensors
    tokens, k = ids.shape
    _check_items(tokens, k)
    problem = RouteProblem(tokens, call.experts, k, "fp32", ids.device.type, given=True)
    gpu = gpu_of(ids)
    return serving(IMPLS, problem, gpu, call.impl).regroup_plan(problem, gpu, tensors, call)


def _plan_routing(tensors: tuple[Any, ...], settings: tuple[Any, ...]) -> Run:
    """`route` itself. Its settings are those of `call_of`: to make a `Call` of them takes longer."""
    call = call_of(tensors[0], *settings)
    parts_of, block = forward.find(tensors, call), call.block

    def run(logits: Tensor, bias: Tensor | None, used: Tensor | None) -> Routing:
        weights, ids, *parts = parts_of(logits, bias, used)
        return Routing(weights, ids, plan_of(parts, block) if block else None)

    return run


forward, _regrouped, _routings = Plans(_plan), Plans(_plan_regroup), Plans(_plan_routing)


# --- the `torch` implementation


def route_plan(problem: RouteProblem, gpu: Gpu | None, tensors: tuple[Any, ...], call: Call) -> Run:
    def run(logits: Tensor, bias: Tensor | None, used: Tensor | None) -> tuple[Tensor, ...]:
        weights, ids = reference.choose(logits, bias, used, call.choice)
        if not call.block:
            return weights, ids
        plan = reference.regroup(ids, used, problem.experts, (call.first, call.last), call.block)
        return weights, ids, *plan[:6]

    return run


def regroup_plan(problem: RouteProblem, gpu: Gpu | None, tensors: tuple[Any, ...], call: Regroup) -> Run:
    def run(ids: Tensor, used: Tensor | None) -> tuple[Tensor, ...]:
        return reference.regroup(ids, used, problem.experts, (call.first, call.last), call.block)[:6]

    return run


# --- the registered ops: schema, fake and autograd, for torch.compile, torch.export and training


@torch.library.custom_op("flashkernels::moe_route", mutates_args=())
def route_op(
    logits: Tensor, bias: Tensor | None, used: Tensor | None, k: int, sigmoid: bool, renormalise: bool, groups: int,
    top_groups: int, top2: bool, scale: float, first: int, last: int, block: int, impl: str,
) -> list[Tensor]:  # fmt: skip
    """weights, ids and, where block > 0, the six tensors of the plan."""
    tile = forced_tile()
    call = Call(k, sigmoid, renormalise, groups, top_groups, top2, scale, first, last, block, impl, True, tile)
    return [*forward((logits, bias, used), call)]


@route_op.register_fake
def _fake(
    logits: Tensor, bias: Tensor | None, used: Tensor | None, k: int, sigmoid: bool, renormalise: bool, groups: int,
    top_groups: int, top2: bool, scale: float, first: int, last: int, block: int, impl: str,
) -> list[Tensor]:  # fmt: skip
    tokens = logits.shape[0]
    weights = logits.new_empty((tokens, k), dtype=torch.promote_types(logits.dtype, torch.float32))
    shapes = sizes(tokens, k, last - first, block) if block else {}
    whole = [logits.new_empty((tokens, k), dtype=torch.int32)]
    return [weights, *whole, *(logits.new_empty(shape, dtype=torch.int32) for shape in shapes.values())]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    logits, *_ = inputs
    ctx.call = Choice(*inputs[3:10])
    ctx.save_for_backward(logits, output[1])


def _gradients(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    logits, ids = ctx.saved_tensors
    dlogits = None if grads[0] is None else reference.logit_gradients(grads[0], logits, ids, ctx.call)
    return (dlogits, *(None,) * 13)


route_op.register_autograd(_gradients, setup_context=_setup)


@torch.library.custom_op("flashkernels::moe_regroup", mutates_args=())
def regroup_op(
    ids: Tensor, used: Tensor | None, experts: int, first: int, last: int, block: int, impl: str
) -> list[Tensor]:
    return [*_regrouped((ids, used), Regroup(experts, first, last, block, impl, True))]


@regroup_op.register_fake
def _fake_regroup(
    ids: Tensor, used: Tensor | None, experts: int, first: int, last: int, block: int, impl: str
) -> list[Tensor]:
    shapes = sizes(ids.shape[0], ids.shape[1], last - first, block)
    return [ids.new_empty(shape, dtype=torch.int32) for shape in shapes.values()]
