"""The CUDA source of one variant of the backward: headers of this folder, and two more that are written for it.

`config.cuh` holds everything that is decided before compiling; `mma.cuh` the wgmma instructions for its exact sizes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from flashkernels.attention.hopper import backward_wide_source as wide
from flashkernels.attention.hopper.source import SHARED_LIMIT as SHARED_LIMIT
from flashkernels.jit.headers import constants, texts

HEADERS = (
    "prelude", "counter", "mbarrier", "tma", "stores", "wgmma", "work", "backward_params", "backward_layout",
    "backward_places", "backward_schedule", "backward_finite", "backward_rows", "backward_keys", "backward_queries",
    "backward_tile", "backward_operands", "backward_split", "backward_tall", "backward_pair", "backward_dq",
)  # fmt: skip
WIDE_HEADERS = (
    "prelude", "mbarrier", "tma", "stores", "wgmma", "backward_params", "backward_places", "backward_finite",
    "backward_rows", "backward_keys", "backward_queries", "backward_wide_place", "backward_wide_layout",
)  # fmt: skip
THREADS = 384
OWN_QUERIES, OWN_KEYS = 128, 64  # of a block, in the kernel that makes dQ alone
REGISTERS = (24, 240)  # of a producer and a consumer thread


@dataclass(frozen=True)
class BackwardTile:
    """How the Hopper backward cuts its problem: some queries at a time, against the keys that two warpgroups hold.

    >>> BackwardTile(halves=True, separate=True).name
    'split-q3-halves-separate'
    """

    paired: bool = False  # both warpgroups on the same 64 keys; else 64 keys each
    q_stages: int = 3
    halves: bool = False  # split: each warpgroup makes one half of dQ's columns (tall, to 64 columns: of a block's
    # queries); else all of every other block's
    k_in_registers: bool = False  # not paired: K is an operand in registers,
    v_in_registers: bool = False  # and V
    separate: bool = False  # split: P and dS have registers of their own
    queries: int = 64  # of a block; with more, tall, dQ is made on its side
    staged: bool = False  # not paired: dQ goes through shared memory, and the copy engine adds it
    sends: bool = False  # staged: so do dK and dV, and it writes them
    skips: bool = False  # split, under a causal mask: a warpgroup passes over a first block of which it sees nothing
    cluster: int = 1  # blocks with neighbouring keys that share their loads of Q and dO: not under a mask, unless wide
    wide: bool = False  # 64 queries or keys a block, and a kernel for each gradient: heads over 256

    @property
    def keys(self) -> int:
        return 64 if self.paired or self.wide else 128

    @property
    def tall(self) -> bool:
        return self.queries > 64 and not self.wide

    @property
    def name(self) -> str:
        held = "k" * self.k_in_registers + "v" * self.v_in_registers
        flags = (
            ("halves", self.halves), ("register" if held == "kv" else f"{held}_register", bool(held)),
            ("separate", self.separate), ("skips", self.skips), ("staged", self.staged),
            ("sends", self.sends), (f"cluster{self.cluster}", self.cluster > 1),
        )  # fmt: skip
        kind = "paired" if self.paired else f"tall{self.queries}" if self.tall else "split"
        kinds = ("wide",) if self.wide else (kind, f"q{self.q_stages}")
        return "-".join((*kinds, *(name for name, on in flags if on)))


@dataclass(frozen=True)
class BackwardVariant:
    """All that the compiler sees of a problem."""

    head_dim: int
    head_dim_v: int
    tile: BackwardTile
    fp16: bool = False
    left: bool = False
    right: bool = False
    softcap: bool = False
    alibi: bool = False
    varlen: bool = False
    own_dq: bool = False  # dQ by a kernel of its own, without additions in memory
    want_q: bool = True
    want_k: bool = True
    want_v: bool = True
    every_lane: bool = False  # arrives where one would for its warp: racecheck sees no `__syncwarp` that ptxas drops

    @property
    def dq_first(self) -> int:
        """Columns of dQ that the first of a pair makes: whole chunks of 64."""
        return -(-self.head_dim // 64) // 2 * 64 if self.tile.paired else 0

    @property
    def dq_columns(self) -> int:
        """Columns of dQ that a warpgroup makes; of a pair, the second. A half stays in a chunk of 64, or is one.

        Of dQ on its side, rows.
        """
        if self.tile.halves and self.tile.tall:
            return self.tile.queries // 2
        if self.tile.halves:
            return self.head_dim // 2 if self.head_dim <= 64 else 64
        return self.tile.queries if self.tile.tall else self.head_dim - self.dq_first

    @property
    def shares_dq(self) -> bool:
        """Both warpgroups make some of each block's dQ, or neither; else they take turns."""
        if not self.adds_dq:
            return True
        return self.tile.halves or (self.head_dim > 64 if self.tile.tall else self.dq_first > 0)

    @property
    def adds_dq(self) -> bool:
        return self.want_q and not self.own_dq

    @property
    def key_box(self) -> int:
        """Keys that one load of K or V brings."""
        return wide.BOX if self.tile.wide else 64 if self.own_dq else self.tile.keys

    @property
    def query_box(self) -> int:
        """Queries that one load of Q or dO brings: of a cluster's block, each loads a part."""
        return wide.BOX if self.tile.wide else self.tile.queries // self.tile.cluster

    @property
    def own_queries(self) -> int:
        """Queries of a block, or of a cluster of blocks, of the kernel that makes dQ alone."""
        return wide.ROWS * self.tile.cluster if self.tile.wide else OWN_QUERIES

    @property
    def own_stages(self) -> tuple[int, int]:
        """Buffers of 64 keys of K and of V in the kernel that makes dQ alone."""
        for stages in ((4, 4), (3, 3), (3, 2), (2, 2), (2, 1)):
            if self._own_shared(*stages) <= SHARED_LIMIT:
                return stages
        raise AssertionError("two buffers of K and one of V always fit")

    @property
    def own_shared(self) -> int:
        """Bytes of shared memory of that kernel; backward_dq.cuh asserts the same."""
        return self._own_shared(*self.own_stages)

    def _own_shared(self, k_stages: int, v_stages: int) -> int:
        k_row, v_row = (128 * -(-dim // 64) for dim in (self.head_dim, self.head_dim_v))
        size = OWN_QUERIES * (k_row + v_row) + 64 * (k_stages * k_row + v_stages * v_row)
        return size + 8 * (k_stages + 2 + 2 * k_stages + 2 * v_stages + 1)

    @property
    def sums(self) -> int:
        """Sums of dQ of a block."""
        return self.tile.queries * (-(-self.head_dim // 16) * 16 if self.tile.tall else self.head_dim)

    @property
    def kernels(self) -> dict[str, int]:
        """Those with matrix products, and the bytes of shared memory that a block of each takes."""
        own = {"gradient_of_queries": self.own_shared} if self.own_dq and not self.tile.wide else {}
        return {"backward": self.shared, **own}

    @property
    def shared(self) -> int:
        """Bytes of shared memory of `backward`; backward_layout.cuh asserts the same."""
        if self.tile.wide:
            return max(wide.rings(self, name).shared for name in wide.GRADIENTS)
        tile, block = self.tile, self.tile.queries
        k_row, v_row = (128 * -(-dim // 64) for dim in (self.head_dim, self.head_dim_v))
        size = tile.keys * (k_row + v_row) + block * (tile.q_stages * k_row + 2 * v_row)
        size += 2 * block * tile.keys * 2  # dS
        size += 128 * block if tile.paired else 0  # P
        size += 512 * self.dq_columns if tile.staged else 0
        size += 4 * block * (tile.q_stages + 2)  # statistics
        size += 8 * (6 + 2 * tile.q_stages + 12)  # barriers
        return -(-size // 16) * 16 + 64 + 16


def config(variant: BackwardVariant) -> str:
    """`config.cuh`: the variant as constants."""
    v, tile = variant, variant.tile
    if tile.wide:
        return _wide_config(v)
    numbers = {
        "D": v.head_dim, "DV": v.head_dim_v, "BLOCK": tile.queries, "KEYS": tile.keys, "Q_STAGES": tile.q_stages,
        "CLUSTER": tile.cluster, "DQ_COLUMNS": v.dq_columns, "DQ_FIRST": v.dq_first,
        "DS_WRITERS": 4 if tile.paired else 8, "DS_READERS": 8 if v.shares_dq else 4, "SHARED_MEMORY": v.shared,
        "RELEASES": 32 if v.every_lane else 1, "KEY_BOX": v.key_box, "OWN_SHARED_MEMORY": v.own_shared,
    }  # fmt: skip
    numbers["PRODUCER_REGISTERS"], numbers["CONSUMER_REGISTERS"] = REGISTERS
    numbers["OWN_K_STAGES"], numbers["OWN_V_STAGES"] = v.own_stages
    flags = {
        "FP16": v.fp16, "FP8": False, "LEFT": v.left, "RIGHT": v.right, "SOFTCAP": v.softcap, "ALIBI": v.alibi,
        "VARLEN": v.varlen, "WANT_Q": v.adds_dq, "WANT_K": v.want_k, "WANT_V": v.want_v, "PAIRED": tile.paired,
        "HALVES": tile.halves, "K_IN_REGISTERS": tile.k_in_registers, "V_IN_REGISTERS": tile.v_in_registers,
        "SEPARATE": tile.separate, "TALL": tile.tall,
        "STAGED": tile.staged, "SENDS": tile.sends, "SHARES_DQ": v.shares_dq, "SKIPS": tile.skips and v.right,
    }  # fmt: skip
    return constants(
        numbers, flags, f"#define PAIRED_CONSUMERS {int(tile.paired)}", f"#define TALL_BLOCKS {int(tile.tall)}",
        f"#define DQ_KERNEL {int(v.own_dq)}", f"#define CLUSTERED {int(tile.cluster > 1)}",
    )  # fmt: skip


def _wide_config(v: BackwardVariant) -> str:
    numbers = {
        "D": v.head_dim, "DV": v.head_dim_v, "BLOCK": v.tile.queries, "CLUSTER": v.tile.cluster, **wide.numbers(v),
    }  # fmt: skip
    numbers["PRODUCER_REGISTERS"], numbers["CONSUMER_REGISTERS"] = REGISTERS
    flags = {
        "FP16": v.fp16, "FP8": False, "LEFT": v.left, "RIGHT": v.right, "SOFTCAP": v.softcap, "ALIBI": v.alibi,
        "VARLEN": v.varlen, "WANT_Q": False, "TALL": False,
    }  # fmt: skip
    return constants(numbers, flags)


def mma(variant: BackwardVariant) -> str:
    """`mma.cuh`: wgmma for this variant's exact sizes. N may be any multiple of 8, so a head of 72 costs 72 in dK."""
    kind = "f16" if variant.fp16 else "bf16"
    # Name, N, A in registers, and which operands are reduced along their columns.
    block, turned = variant.tile.queries, variant.tile.tall
    if variant.tile.wide:
        return _wrappers(kind, wide.products(variant))
    products = [
        ("mma_scores", block, False, ""), ("mma_scores_registers", block, True, ""),
        ("mma_dk", variant.head_dim, True, "b"), ("mma_dv", variant.head_dim_v, True, "b"),
        ("mma_own_dq", variant.head_dim, True, "b"),
        *(("mma_dq", n, False, "a" if turned else "b") for n in sorted({variant.dq_first, variant.dq_columns} - {0})),
    ]  # fmt: skip
    return _wrappers(kind, [
        (*product, first)
        for product in products
        for first in ((False,) if product[0] in ("mma_dk", "mma_dv", "mma_own_dq") else (True, False))
    ])  # fmt: skip


def _wrappers(kind: str, products: Iterable[tuple[str, int, bool, str, bool]]) -> str:
    return '#pragma once\n#include "prelude.cuh"\n' + "\n".join(
        _wrapper(name, n, kind, registers=registers, by_column=by_column, first=first)
        for name, n, registers, by_column, first in products
    )


def _wrapper(name: str, n: int, kind: str, *, registers: bool, by_column: str, first: bool) -> str:
    """One function around m64 x n x k16: d (+)= a * b, with a in registers or shared memory, b in shared memory.

    The first step of an accumulator only writes it. Were it an input too, its old value would stay alive around the
    loop, and accumulators that are never alive together could not share registers.
    """
    count = n // 2
    a_major, b_major = (int(operand in by_column) for operand in "ab")
    outputs = ", ".join(f'"{"=" if first else "+"}f"(d[{i}])' for i in range(count))
    destination = ", ".join(f"%{i}" for i in range(count))
    if registers:
        operands, declared, majors = 4, "const u32* a", f", {b_major}"
        a = "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}"
        inputs = ", ".join(f'"r"(a[{i}])' for i in range(4))
    else:
        operands, declared, majors = 1, "u64 a", f", {a_major}, {b_major}"
        a, inputs = f"%{count}", '"l"(a)'
    instruction = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind}"
    return f"""
// d {"=" if first else "+="} a * b; 64 x {n}
DEVICE void {name}{"_first" if first else ""}(float (&d)[{count}], {declared}, u64 b) {{
  asm volatile("{{.reg .pred p; setp.{"ne" if first else "eq"}.b32 p, 0, 0;\\n"
    "{instruction} {{{destination}}}, {a}, %{count + operands}, p, 1, 1{majors};}}\\n"
    : {outputs}
    : {inputs}, "l"(b));
}}
"""


@cache
def files() -> dict[str, str]:
    """The headers of this folder, by the names that they include one another with."""
    return texts(Path(__file__).parent, dict.fromkeys((*HEADERS, *WIDE_HEADERS)))


def headers(variant: BackwardVariant) -> dict[str, str]:
    names = WIDE_HEADERS if variant.tile.wide else HEADERS
    mine = {f"{name}.cuh": files()[f"{name}.cuh"] for name in names}
    return {**mine, "config.cuh": config(variant), "mma.cuh": mma(variant)}


def program(variant: BackwardVariant) -> tuple[str, str, dict[str, str]]:
    """Name, text and headers of the variant's program."""
    name = "backward_wide.cu" if variant.tile.wide else "backward.cu"
    return name, (Path(__file__).parent / name).read_text(), headers(variant)
