"""What is wrong with a run, in words: each rule looks at a profile and says what it costs and what to do next.

A finding's `saves` is the part of the wall time that mending it would remove, by the estimate that stands in its rule;
by Amdahl's law the run is then 1 / (1 - saves) times as fast. Findings may overlap: savings do not add up.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from statistics import median

from flashkernels.profiling.bounds import Gap
from flashkernels.profiling.costs import Cost, is_elementwise, is_product
from flashkernels.profiling.profile import TF32, Profile
from flashkernels.profiling.roofs import roofs_of
from flashkernels.profiling.trace import Call, Frame, Kernel, Mark, Op, Span, overlap, union

SHORT_US = 20.0  # kernels below it end before the host has launched the next ones
GRAPH_GAP_US = 1.0  # what a node of a CUDA graph still waits: assumed, not measured
PINNED_BYTES_PER_US = 25e3  # PCIe 4.0 x16 has 31.5 GB/s: assumed that copies from pinned memory reach 80 % of it
GOOD_ATTENTION = 0.5  # of the roofline: what a fused attention kernel should reach
LARGEST_HEAD, FLASH_HEAD = 512, 256  # of fk.attention, of torch's flash attention
SMALL_OCCUPANCY = 0.15
TAIL = 0.25  # of the last wave's slots idle, with few waves
CONFLICTS = 0.2  # of the wavefronts of shared memory


@dataclass(frozen=True)
class Finding:
    """One thing to mend: what was seen, its share of the wall time, and what mending it would save of that."""

    rule: str
    words: str
    step: str  # what to do next
    share: float
    saves: float

    @property
    def speedup(self) -> float:
        """Of the whole run, by Amdahl's law."""
        return 1 / (1 - min(self.saves, 0.999))

    def as_dict(self) -> dict[str, object]:
        return asdict(self) | {"speedup": self.speedup}


@dataclass(frozen=True)
class Rule:
    name: str
    find: Callable[[Profile], Iterator[Finding]]


def diagnose(profile: Profile) -> list[Finding]:
    """All findings, the most worthwhile first."""
    if not profile.wall:
        return []
    found = [finding for rule in RULES for finding in rule.find(profile)]
    return sorted(found, key=lambda finding: -finding.saves)


# --- the host is too slow for the GPU


def launch_gaps(profile: Profile) -> Iterator[Finding]:
    """A CUDA graph launches all of its nodes at once: pauses shrink to GRAPH_GAP_US each."""
    short = [gap for gap in profile.gaps if gap.cause == "launch" and not gap.kernel.graph]
    times = [k.duration for k in profile.trace.kernels if k.kind == "kernel" and not k.graph]
    idle = sum(gap.length for gap in short)
    share = idle / profile.wall
    if len(short) < 20 or not times or share < 0.1 or median(times) > SHORT_US:
        return
    yield Finding(
        "launch-gaps",
        f"{share:.0%} of wall time is gaps between {median(times):.1f} µs kernels",
        "capture a CUDA graph: torch.cuda.graph(...), or torch.compile(mode='reduce-overhead')",
        share,
        max(0.0, idle - GRAPH_GAP_US * len(short)) / profile.wall,
    )


def synchronising(profile: Profile) -> Iterator[Finding]:
    """After a wait for the GPU its queue is empty: the pause that follows is what the wait costs."""
    places: dict[str, list[float]] = defaultdict(list)
    host = [gap for gap in profile.gaps if gap.kernel.kind != "cpu"]
    starts = [gap.span.start for gap in host]
    counted: set[int] = set()  # pauses, each for the first wait that ends in it
    for call, where in sorted(_waits(profile), key=lambda wait: wait[0].end):
        i = bisect_right(starts, call.end) - 1
        # the pause in which the wait ends, or that starts as it ends
        near = [j for j in (i, i + 1) if 0 <= j < len(host) and _meets(host[j], call.end)]
        places[where].append(host[near[0]].length if near and near[0] not in counted else 0.0)
        counted.update(near[:1])
    for where, lost in places.items():
        share = sum(lost) / profile.wall
        if len(lost) >= 3 and share >= 0.02:
            yield Finding(
                "sync-in-loop",
                f"synchronising {where}, {len(lost)} times; the GPU idles {share:.0%} of wall time after it",
                "keep the value on the GPU and read it once after the loop, or every N-th step",
                share,
                share,
            )


def _meets(gap: Gap, moment: float) -> bool:
    return gap.span.start - 5 <= moment <= gap.span.end


def data_loader(profile: Profile) -> Iterator[Finding]:
    waits = union((m.start, m.end) for m in profile.trace.marks if "DataLoader" in m.name and "__next__" in m.name)
    if not waits:
        return
    if profile.trace.on_gpu:
        idle = sum(overlap(gap.span, waits) for gap in profile.gaps)
        who = "the GPU waits"
    else:
        idle, who = sum(overlap(profile.trace.window, [span]) for span in waits), "the loop waits"
    share = idle / profile.wall
    if share >= 0.05:
        yield Finding(
            "data-loader",
            f"data loader: {who} {share:.0%} for the next batch",
            "DataLoader(num_workers=..., pin_memory=True, persistent_workers=True, prefetch_factor=4), or lighter "
            "transforms",
            share,
            share,
        )


def slow_host(profile: Profile) -> Iterator[Finding]:
    """Long pauses that neither a wait for the GPU nor a data loader explains."""
    waits = [Span(m.start, m.end) for m in profile.trace.marks if "DataLoader" in m.name and "__next__" in m.name]
    ends = sorted(call.end for call, _ in _waits(profile))
    loading = union(waits)
    rest: list[tuple[Gap, float]] = []
    for gap in profile.gaps:
        i = bisect_left(ends, gap.span.start - 5)
        waited = i < len(ends) and ends[i] <= gap.span.end
        if gap.cause == "host" and not waited:
            rest.append((gap, gap.length - overlap(gap.span, loading)))
    idle = sum(length for _, length in rest)
    share = idle / profile.wall
    if share < 0.15:
        return
    where = _busiest(profile, [gap for gap, _ in rest])
    yield Finding(
        "slow-host",
        f"the GPU waits {share:.0%} of wall time for the host{f', most of it in {where}' if where else ''}",
        "move that work off the loop, overlap it, or enlarge the batch"
        + ("" if where else "; profile with --stacks to see which function it is"),
        share,
        share,
    )


# --- copies


def pageable_copies(profile: Profile) -> Iterator[Finding]:
    """Pinned memory is copied at the speed of the bus; pageable memory goes through a small pinned buffer first."""
    copies = [k for k in profile.trace.kernels if k.kind == "copy" and "pageable" in k.name.lower()]
    time, moved = sum(k.duration for k in copies), sum(k.bytes for k in copies)
    share = time / profile.wall
    if share < 0.02:
        return
    best = min(time, moved / PINNED_BYTES_PER_US)
    yield Finding(
        "pageable-copies",
        f"host copies from pageable memory: {share:.0%} of wall time for {len(copies)} copies, {moved / 1e6:.0f} MB at "
        f"{moved / time / 1e3:.1f} GB/s",
        "pin the host's tensors (pin_memory=True) and copy with non_blocking=True",
        share,
        (time - best) / profile.wall,
    )


# --- the wrong kernel


def sdpa_math(profile: Profile) -> Iterator[Finding]:
    """torch's plain attention writes the S x S matrix; estimated against GOOD_ATTENTION of the roofline."""
    calls: dict[int, float] = defaultdict(float)
    for kernel in profile.trace.kernels:
        index = kernel.op
        while index is not None and profile.trace.ops[index].name != "aten::_scaled_dot_product_attention_math":
            index = profile.trace.ops[index].parent
        if index is not None and kernel.kind == "kernel":
            calls[index] += kernel.duration
    by_reason: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for index, time in calls.items():
        op = profile.trace.ops[index]
        by_reason[_why_math(op)].append((time, min(time, _attention_floor(profile, op) / GOOD_ATTENTION)))
    for reason, times in by_reason.items():
        share = sum(time for time, _ in times) / profile.wall
        if share >= 0.02:
            yield Finding(
                "sdpa-math",
                f"SDPA math path {reason}: {share:.0%} of wall time",
                "use fk.attention(q, k, v, layout='bhsd', ...)",
                share,
                sum(time - best for time, best in times) / profile.wall,
            )


def _why_math(op: Op) -> str:
    dim = op.dims[0][-1] if op.dims and op.dims[0] else 0
    if dim > FLASH_HEAD:
        return f"because head_dim {dim}"
    if dim % 8:
        return f"because head_dim {dim} is not a multiple of 8"
    if op.types and op.types[0] == "double":
        return "because of fp64"
    return "(why: call it under torch.nn.attention.sdpa_kernel(SDPBackend.FLASH_ATTENTION))"


def _attention_floor(profile: Profile, op: Op) -> float:
    """µs that the roofline allows for the call; infinite where it is not known, so that nothing is promised."""
    if len(op.dims) < 3 or any(len(d) != 4 for d in op.dims[:3]) or max(op.dims[0][-1], op.dims[2][-1]) > LARGEST_HEAD:
        return math.inf
    from flashkernels.profiling.costs import TYPES

    (b, h, sq, d), (_, hk, sk, _), dv = op.dims[0], op.dims[1], op.dims[2][-1]
    name, size = TYPES.get(op.types[0], ("", 0))
    cost = Cost(2 * b * h * sq * sk * (d + dv), (b * h * sq + b * hk * sk) * (d + dv) * size, name)
    roofs = roofs_of(cost, profile.gpu)
    return roofs.floor if roofs else math.inf


def tf32_off(profile: Profile) -> Iterator[Finding]:
    """Tensor cores multiply fp32 as TF32; estimated at the same share of the roof that the fp32 kernels reach."""
    gpu = profile.gpu
    plain: list[tuple[Kernel, Cost]] = []
    for kernel, owner, cost in zip(profile.trace.kernels, profile.owners, profile.costs, strict=True):
        if owner is None or cost is None or kernel.kind != "kernel" or not is_product(profile.trace.ops[owner]):
            continue
        if cost.dtype == "fp32" and not TF32.search(kernel.name):
            plain.append((kernel, cost))
    time = sum(kernel.duration for kernel, _ in plain)
    share = time / profile.wall
    if gpu is None or share < 0.1 or gpu.peak.get("tf32", 0) <= gpu.peak["fp32"]:
        return
    left = 0.0
    for kernel, cost in plain:
        now, then = roofs_of(cost, gpu), roofs_of(Cost(cost.flops, cost.bytes, "tf32"), gpu)
        assert now and then
        left += kernel.duration * min(1.0, then.floor / now.floor) if now.floor else kernel.duration
    yield Finding(
        "tf32-off",
        f"TF32 is off and {share:.0%} of time is fp32 matmul",
        "torch.set_float32_matmul_precision('high'), or bf16 autocast, where 10 bits of mantissa are enough",
        share,
        (time - left) / profile.wall,
    )


def tiny_elementwise(profile: Profile) -> Iterator[Finding]:
    """Elementwise kernels in a row can be one kernel: of each chain, one is left."""
    chains, count, time = 0, 0, 0.0
    running = False
    for kernel in (k for k in profile.trace.kernels if k.kind == "kernel"):
        mine = any(is_elementwise(op) for op in profile.trace.ancestors(kernel.op))
        if mine:
            chains += not running
            count += 1
            time += kernel.duration
        running = mine
    share = time / profile.wall
    if count < 20 or time / count > SHORT_US or count < 2 * chains:
        return
    idle = sum(gap.length for gap in profile.gaps if any(map(is_elementwise, profile.trace.ancestors(gap.kernel.op))))
    share = (time + idle) / profile.wall
    if share >= 0.1:
        yield Finding(
            "tiny-elementwise",
            f"{count} elementwise kernels of {time / count:.1f} µs, in chains of {count / chains:.1f}, take "
            f"{share:.0%} of wall time",
            "fuse them: torch.compile, or fk.rms_norm, fk.swiglu, fk.rope where they are that",
            share,
            (1 - chains / count) * share,
        )


# --- kernels that do not fill the GPU


def few_blocks(profile: Profile) -> Iterator[Finding]:
    """A grid smaller than the GPU leaves multiprocessors idle; a bit over full waves, most of the last one."""
    if profile.gpu is None:
        return
    groups: dict[tuple[str, tuple[int, ...]], list[Kernel]] = defaultdict(list)
    for kernel in profile.trace.kernels:
        if kernel.kind == "kernel" and kernel.grid:
            groups[kernel.name, kernel.grid].append(kernel)
    for (name, grid), kernels in groups.items():
        time = sum(k.duration for k in kernels)
        share, blocks = time / profile.wall, math.prod(grid)
        if share < 0.1 or time / len(kernels) < SHORT_US:  # shorter ones are launches first of all
            continue
        sms, resident = profile.gpu.sms, _resident(kernels[0], profile)
        waves = blocks / (sms * resident) if resident else 0.0
        if blocks < sms:
            unused = 1 - blocks / sms
            words = f"{blocks} blocks for {sms} multiprocessors: {unused:.0%} of the GPU idles in"
        elif 1 < waves < 8 and 1 - waves / math.ceil(waves) >= TAIL:
            unused = 1 - waves / math.ceil(waves)
            words = f"{waves:.2f} waves: the last one leaves {unused:.0%} of the GPU's time unused in"
        else:
            continue
        step = "split the work finer (keys, rows, K of a product), use smaller tiles, or enlarge the batch"
        yield Finding("few-blocks", f"{words} {short(name)}, {share:.0%} of wall time", step, share, share * unused)


def _resident(kernel: Kernel, profile: Profile) -> int:
    """Blocks of a kernel that fit on a multiprocessor at once; 0: not known."""
    gpu, threads = profile.gpu, math.prod(kernel.block)
    if gpu is None or not threads or not kernel.registers:
        return 0
    by_registers = gpu.registers_per_sm // (kernel.registers * threads)
    by_shared = gpu.shared_per_sm // (kernel.shared + 1024) if kernel.shared else 32  # 1 KiB is the system's
    return max(1, min(by_registers, by_shared, gpu.threads_per_sm // threads, 32))


def low_occupancy(profile: Profile) -> Iterator[Finding]:
    """Few warps cannot hide the latency of memory; tensor-core kernels need few and are left out."""
    for row in profile.rows:
        share = row.time / profile.wall
        if row.occupancy is None or row.occupancy >= SMALL_OCCUPANCY or row.bound != "latency":
            continue
        if share >= 0.1 and row.time / row.count >= SHORT_US:
            yield Finding(
                "low-occupancy",
                f"{short(row.name)} keeps {row.occupancy:.0%} of the warps that fit and is far from both roofs",
                "fewer registers or less shared memory for a block, or more blocks; flashkernels ncu shows the stalls",
                share,
                share * 0.5,  # assumed: twice as many warps hide twice the latency
            )


def counters(profile: Profile) -> Iterator[Finding]:
    """What Nsight Compute counted: conflicts of shared memory, and what warps wait for."""
    for row in profile.rows:
        share = row.time / profile.wall
        if not row.counters or share < 0.02:
            continue
        conflicts = row.counters.get("bank_conflicts", 0.0)
        if conflicts >= CONFLICTS:
            yield Finding(
                "bank-conflicts",
                f"{conflicts:.0%} of the shared memory accesses of {short(row.name)} are bank conflicts",
                "swizzle or pad the tile by 16 bytes a row",
                share,
                share * conflicts,
            )


# --- places


def _waits(profile: Profile) -> list[tuple[Call | Mark, str]]:
    """Where the host waits for the GPU, each with its place in words: marks of the session, which know the line, and
    other calls of the runtime, with the function around them."""
    marked = [m for m in profile.trace.marks if m.name.startswith("fk:sync ")]
    waits: list[tuple[Call | Mark, str]] = [
        (m, m.name.removeprefix("fk:sync ").replace(" ", " in ", 1)) for m in marked
    ]
    covered = union((m.start, m.end) for m in marked)
    by_id = {op.id: i for i, op in enumerate(profile.trace.ops) if op.id}
    calls = [call for call in profile.trace.calls if "Synchronize" in call.name]
    calls = [call for call in calls if not overlap((call.start, call.end), covered)]
    for call, frame in zip(calls, _frames_at(profile, calls), strict=True):
        names = [op.name for op in profile.trace.ancestors(by_id.get(call.op))]
        what = ".item()" if "aten::item" in names else ".cpu()" if {"aten::to", "aten::copy_"} & {*names} else call.name
        waits.append((call, f"{what} in {_place(frame)}" if frame else what))
    return waits


def _frames_at(profile: Profile, calls: list[Call]) -> list[Frame | None]:
    """For each call, in the order of time, the innermost function of the program itself that is running."""
    frames = [frame for frame in profile.trace.frames if not _library(frame)]
    stacks: dict[object, list[Frame]] = defaultdict(list)
    found: list[Frame | None] = []
    i = 0
    for call in calls:
        while i < len(frames) and frames[i].start <= call.start:
            _pop(stacks[frames[i].thread], frames[i].start).append(frames[i])
            i += 1
        running = _pop(stacks[call.thread], call.start)
        found.append(running[-1] if running else None)
    return found


def _pop(stack: list[Frame], now: float) -> list[Frame]:
    """The stack without the functions that have returned."""
    while stack and stack[-1].end < now:
        stack.pop()
    return stack


def _busiest(profile: Profile, waited: list[Gap]) -> str:
    """The function of the program that runs longest in these pauses, the innermost of equals."""
    spans = [gap.span for gap in waited]
    times: dict[tuple[str, int, str], float] = defaultdict(float)
    for frame in profile.trace.frames:
        if not _library(frame):
            times[frame.file, frame.line, frame.function] += overlap((frame.start, frame.end), spans)
    if not times or not max(times.values()):
        return ""
    longest = max(times.values())
    file, line, function = [key for key, time in times.items() if time >= 0.9 * longest][-1]
    return f"{file}:{line} ({function})"


def _library(frame: Frame) -> bool:
    return any(part in frame.file for part in ("torch/", "site-packages", "<frozen", "flashkernels/", "/lib/python"))


def _place(frame: Frame) -> str:
    return f"{frame.file}:{frame.line} ({frame.function})"


def short(name: str, width: int = 60) -> str:
    """A kernel's name without return type, namespaces' noise and arguments.

    >>> short("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float> >(int, float)")
    'vectorized_elementwise_kernel<4, CUDAFunctor_add<float> >'
    """
    name = name.removeprefix("void ").replace("(anonymous namespace)::", "").replace("at::native::", "")
    depth = 0
    for i, letter in enumerate(name):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0 and i and "(" not in name[:i] and not name.startswith("Mem"):
            name = name[:i]
            break
    return name if len(name) <= width else f"{name[: width - 1]}…"


RULES = (
    Rule("launch-gaps", launch_gaps),
    Rule("sync-in-loop", synchronising),
    Rule("data-loader", data_loader),
    Rule("slow-host", slow_host),
    Rule("pageable-copies", pageable_copies),
    Rule("sdpa-math", sdpa_math),
    Rule("tf32-off", tf32_off),
    Rule("tiny-elementwise", tiny_elementwise),
    Rule("few-blocks", few_blocks),
    Rule("low-occupancy", low_occupancy),
    Rule("bank-conflicts", counters),
)
