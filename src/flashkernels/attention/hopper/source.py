"""The CUDA source of one variant: the headers of this folder, and two more that are written for it.

`config.cuh` holds everything that is decided before compiling; `mma.cuh` the wgmma instructions for its exact sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from flashkernels.attention.hopper import wide_source
from flashkernels.jit.headers import constants, texts

HEADERS = (
    "prelude", "counter", "mbarrier", "tma", "stores", "wgmma", "params", "layout", "work", "schedule", "mask",
    "softmax", "careful", "epilogue", "queries", "values",
)  # fmt: skip
SHARED_LIMIT = 232448  # bytes a block may have on sm_90
# Of a producer and a consumer thread, by consumer warpgroups.
REGISTERS = {1: (0, 0), 2: (24, 240), 3: (32, 160), 4: (24, 112)}


@dataclass(frozen=True)
class HopperTile:
    """How the Hopper kernel cuts its problem. A block has `groups` consumer warpgroups of 64 rows each.

    >>> HopperTile(groups=2, block_n=128).name
    '128x128-s2'
    """

    groups: int
    block_n: int
    stages: int = 2  # of K and of V; of wide heads, slots of a warpgroup
    cluster: int = 1  # blocks that share their loads of K and V
    pingpong: bool = False  # warpgroups take turns on the tensor cores
    q_in_registers: bool = False
    wide_v: bool = False  # V in 64-column chunks even where narrower ones fit exactly
    wide_k: bool = False  # K and Q likewise
    q_stages: int = 1  # 2: the next tile's Q is loaded while this one's is in use
    late: int = 0  # steps of P·V (16 keys, 32 of FP8) whose P has one set of registers, not two: more keys fit

    @property
    def name(self) -> str:
        flags = (
            ("pingpong", self.pingpong), ("register", self.q_in_registers), ("wide_v", self.wide_v),
            ("wide_k", self.wide_k), (f"q{self.q_stages}", self.q_stages > 1),
            (f"cluster{self.cluster}", self.cluster > 1), (f"late{self.late}", self.late > 0),
        )  # fmt: skip
        return "-".join((f"{64 * self.groups}x{self.block_n}", f"s{self.stages}", *(name for name, on in flags if on)))


@dataclass(frozen=True)
class Variant:
    """All that the compiler sees of a problem."""

    head_dim: int
    head_dim_v: int
    tile: HopperTile
    fp16: bool = False
    fp8: bool = False
    left: bool = False
    right: bool = False
    softcap: bool = False
    alibi: bool = False
    sinks: bool = False
    negative: bool = False  # the scale is not positive
    varlen: bool = False
    paged: bool = False
    split: bool = False
    pack: int = 1  # query heads that share a row block
    every_lane: bool = False  # says that a tile is read, not one for its warp: racecheck sees no `__syncwarp`

    @property
    def wide(self) -> bool:
        """Whether wide.cu serves, not forward.cu. Its tiles have one warpgroup's rows and two tiles of keys."""
        return max(self.head_dim, self.head_dim_v) > 256

    @property
    def chunks(self) -> tuple[int, int, int, int, int]:
        """Bytes of a K chunk's row, full chunks, bytes of the last one (0: none); bytes of a V chunk's row, and chunks.

        A chunk's row is 128, 64 or 32 bytes: what is swizzled in shared memory.
        """
        if self.wide:
            return wide_source.chunks(self)
        tile, element = self.tile, 1 if self.fp8 else 2
        k_row = -(-self.head_dim * element // 32) * 32
        v_row = tile.block_n if self.fp8 else -(-self.head_dim_v * element // 32) * 32
        rest = k_row % 128
        k_width, k_chunks, k_rest = 128, k_row // 128, rest
        if tile.wide_k or rest == 96:  # 96 = 64 + 32 would take two more tensor maps
            k_chunks, k_rest = -(-k_row // 128), 0
        elif k_row < 128:
            k_width = 64 if k_row % 64 == 0 else 32
            k_chunks, k_rest = k_row // k_width, 0
        wide_v = tile.wide_v and not self.fp8
        v_width = 128 if wide_v or v_row % 128 == 0 else 64 if v_row % 64 == 0 else 32
        return k_width, k_chunks, k_rest, v_width, -(-v_row // v_width)

    @property
    def shared(self) -> int:
        """Bytes of shared memory; layout.cuh asserts the same."""
        if self.wide:
            return wide_source.shared(self)
        return self._inputs + self.out_chunks * self._out_chunk

    @property
    def out_chunks(self) -> int:
        """Chunks of 64 output columns that go through shared memory, where the copy engine takes them: as many as there
        is room for. It writes boxes of one head, so not of packed ones, nor past the end of one of many sequences."""
        if self.wide or self.varlen or self.pack > 1:
            return 0
        return max(0, min(-(-self.head_dim_v // 64), (SHARED_LIMIT - self._inputs) // self._out_chunk))

    @property
    def _out_chunk(self) -> int:
        return 64 * 128 * self.tile.groups

    @property
    def _inputs(self) -> int:
        """Bytes of shared memory without those of outputs."""
        k_width, k_chunks, k_rest, v_width, v_chunks = self.chunks
        tile, row = self.tile, k_width * k_chunks + k_rest
        v_rows = self.head_dim_v if self.fp8 else tile.block_n
        size = _tiles(64 * row) * tile.groups * tile.q_stages
        size += tile.stages * (_tiles(tile.block_n * row) + _tiles(v_rows * v_width * v_chunks))
        size += 8 * (2 * tile.groups * tile.q_stages + 4 * tile.stages) + 32  # barriers
        return -(-size // 16) * 16 + 64 + 16 * tile.groups

    @property
    def threads(self) -> int:
        return wide_source.THREADS if self.wide else 128 * (self.tile.groups + 1)

    @property
    def queries(self) -> int:
        """Query positions of one tile."""
        return 64 // self.pack * self.tile.groups


def _tiles(size: int) -> int:
    return -(-size // 1024) * 1024


def config(variant: Variant) -> str:
    """`config.cuh`: the variant as constants."""
    v, tile = variant, variant.tile
    names = ("K_WIDTH", "K_CHUNKS", "K_REST", "V_WIDTH", "V_CHUNKS")
    numbers = {
        "D": v.head_dim, "DV": v.head_dim_v, "BLOCK_N": tile.block_n, "GROUPS": tile.groups, "STAGES": tile.stages,
        "Q_STAGES": tile.q_stages, "CLUSTER": tile.cluster, "PACK": v.pack, **dict(zip(names, v.chunks, strict=True)),
        "LATE": tile.late, "OUT_CHUNKS": v.out_chunks, "SHARED_MEMORY": v.shared, "O_COLUMNS": v.head_dim_v,
        "RELEASES": 32 if v.every_lane else 1,
    }  # fmt: skip
    numbers["PRODUCER_REGISTERS"], numbers["CONSUMER_REGISTERS"] = REGISTERS[tile.groups]
    if v.wide:
        numbers |= wide_source.numbers(v)
    flags = {
        "FP16": v.fp16, "FP8": v.fp8, "LEFT": v.left, "RIGHT": v.right, "SOFTCAP": v.softcap, "ALIBI": v.alibi,
        "SINKS": v.sinks, "NEGATIVE": v.negative, "VARLEN": v.varlen, "PAGED": v.paged, "SPLIT": v.split,
        "PINGPONG": tile.pingpong, "Q_IN_REGISTERS": tile.q_in_registers,
    }  # fmt: skip
    return constants(numbers, flags, f"#define CLUSTERED {int(tile.cluster > 1)}")


def mma(variant: Variant) -> str:
    """`mma.cuh`: wgmma for this variant's exact sizes. N may be any multiple of 8, so a head of 72 costs 72 in P·V."""
    kind = "e4m3" if variant.fp8 else "f16" if variant.fp16 else "bf16"
    block_n, dv = variant.tile.block_n, variant.head_dim_v
    if variant.wide:
        half = wide_source.columns(dv)
        return "#pragma once\n#include \"prelude.cuh\"\n" + "\n".join([
            _wrapper("mma_qk", block_n // 2, kind, registers=False, by_column=False, accumulate=False),
            _wrapper("mma_pv", half, kind, registers=True, by_column=True, accumulate=True),
        ])  # fmt: skip
    return "#pragma once\n#include \"prelude.cuh\"\n" + "\n".join([
        _wrapper("mma_qk", block_n, kind, registers=False, by_column=False, accumulate=False),
        _wrapper("mma_qk_registers", block_n, kind, registers=True, by_column=False, accumulate=False),
        _wrapper("mma_pv", dv, kind, registers=True, by_column=True, accumulate=True),
    ])  # fmt: skip


def _wrapper(name: str, n: int, kind: str, *, registers: bool, by_column: bool, accumulate: bool) -> str:
    """One function around m64 x n x k16: d (+)= a * b, with a in registers or shared memory, b in shared memory."""
    count = n // 2
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    destination = ", ".join(f"%{i}" for i in range(count))
    fp8 = kind == "e4m3"  # whose operands lie along their rows only
    if registers:
        operands, declared, majors = 4, "const u32* a", "" if fp8 else f", {int(by_column)}"
        a = "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}"
        inputs = ", ".join(f'"r"(a[{i}])' for i in range(4))
    else:
        operands, declared, majors = 1, "u64 a", "" if fp8 else f", 0, {int(by_column)}"
        a, inputs = f"%{count}", '"l"(a)'
    b, flag = f"%{count + operands}", f"%{count + operands + 1}"
    signature = f"float (&d)[{count}], {declared}, u64 b" + ("" if accumulate else ", int add")
    setup = "setp.eq.b32 p, 0, 0;" if accumulate else f"setp.ne.b32 p, {flag}, 0;"
    last = "" if accumulate else ', "r"(add)'
    instruction = f"wgmma.mma_async.sync.aligned.m64n{n}k{32 if fp8 else 16}.f32.{kind}.{kind}"
    return f"""
// d {"+=" if accumulate else "= a * b, or with `add` d +="} a * b; 64 x {n}
DEVICE void {name}({signature}) {{
  asm volatile("{{.reg .pred p; {setup}\\n"
    "{instruction} {{{destination}}}, {a}, {b}, p, 1, 1{majors};}}\\n"
    : {outputs}
    : {inputs}, "l"(b){last});
}}
"""


@cache
def files() -> dict[str, str]:
    """The headers of this folder, by the names that they include one another with."""
    return texts(Path(__file__).parent, HEADERS)


def headers(variant: Variant) -> dict[str, str]:
    written = {"config.cuh": config(variant), "mma.cuh": mma(variant)}
    if not variant.wide:
        return {**files(), **written}
    layout = (Path(__file__).parent / "wide_layout.cuh").read_text()
    return {**{name: text for name, text in files().items() if name != "values.cuh"}, "layout.cuh": layout, **written}


def main_file() -> str:
    return (Path(__file__).parent / "forward.cu").read_text()


def program(variant: Variant) -> tuple[str, str, dict[str, str]]:
    """Name, text and headers of the variant's program."""
    if variant.wide:
        return "wide.cu", (Path(__file__).parent / "wide.cu").read_text(), headers(variant)
    return "forward.cu", main_file(), headers(variant)
