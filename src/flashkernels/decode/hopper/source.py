"""The CUDA source of one variant of the decode: headers of this folder and of the attention's, and its constants."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from flashkernels.formats import FORMATS

OWN_HEADERS = ("decode_params", "decode_formats", "decode_schedule")
SHARED_HEADERS = ("prelude", "mbarrier")  # of attention/hopper
KINDS = {"bf16": 0, "fp16": 0, "fp8": 1, "int8": 2, "int4": 3}
MOST_SEQUENCES = 1024
ROW = 128  # bytes of a chunk of a row
# Pieces of work. With one for each of 132 blocks these ended within 28 % of one another, with 12 within 11 % (H200,
# 2026-11-15, bf16, B=128, 4096 keys: 520 and 512 µs). Less than 8 steps for each warp lost 8 to 19 %.
LEAST = 8  # steps of each warp in a piece, at least, where there are more pieces than blocks
PIECES = 12  # of an SM, at most


@dataclass(frozen=True)
class HopperDecodeTile:
    """Warps of a block, blocks of an SM, keys of a warp's step in sixteens, and steps that it loads ahead.

    >>> HopperDecodeTile(warps=8, per_sm=1, sub=1, stages=3).name
    'hopper-w8-p1-k16-s3'
    """

    warps: int
    per_sm: int
    sub: int
    stages: int

    @property
    def name(self) -> str:
        return f"hopper-w{self.warps}-p{self.per_sm}-k{16 * self.sub}-s{self.stages}"


@dataclass(frozen=True)
class DecodeVariant:
    """All that the compiler sees of a problem."""

    head_dim: int
    head_dim_v: int
    group: int  # query heads of a KV head
    format: str
    tile: HopperDecodeTile
    k_slot: int  # bytes from one key to the next of a page
    v_slot: int
    q_fp16: bool = False
    scales: str = ""  # "token", "head" or none
    left: bool = False
    softcap: bool = False
    alibi: bool = False

    @property
    def tiles(self) -> int:
        """Query rows, in eights."""
        return -(-self.group // 8)

    @property
    def scale_bytes(self) -> int:
        """Of a key's scales as they are copied: at least 4."""
        return max(4, 2 * FORMATS[self.format].groups(self.head_dim)) if self.scales == "token" else 0

    @property
    def loaded(self) -> int:
        """Bytes of a step of a warp."""
        return 16 * self.tile.sub * ROW * (chunks(self.format, self.head_dim) + chunks(self.format, self.head_dim_v))

    @property
    def shared(self) -> int:
        """Bytes of shared memory; decode_params.cuh asserts the same."""
        tile = self.tile
        rings = tile.warps * tile.stages
        size = rings * self.loaded
        size += -(-rings * 2 * 16 * tile.sub * self.scale_bytes // 16) * 16
        size += tile.warps * self.group * (4 * (self.head_dim_v + 4) + 8)
        size += 4 * (2 * MOST_SEQUENCES + 1) + 4 * (tile.warps + 1) + 4 * 4
        return -(-size // 8) * 8 + 8 * rings


def stored_bytes(format: str, dim: int) -> int:
    form = FORMATS[format]
    return form.stored(dim) * form.dtype.itemsize


def chunks(format: str, dim: int) -> int:
    """Chunks of a row."""
    return -(-stored_bytes(format, dim) // ROW)


def config(variant: DecodeVariant) -> str:
    """`config.cuh`: the variant as constants."""
    v, tile = variant, variant.tile
    plain = v.format in ("bf16", "fp16")
    numbers = {
        "D": v.head_dim, "DV": v.head_dim_v, "GROUP": v.group, "TILES": v.tiles, "KIND": KINDS[v.format],
        "WARPS": tile.warps, "PER_SM": tile.per_sm, "SUB": tile.sub, "STAGES": tile.stages,
        "SCALE_BYTES": v.scale_bytes, "MOST_SEQUENCES": MOST_SEQUENCES, "SHARED_MEMORY": v.shared,
        "K_SLOT": v.k_slot, "V_SLOT": v.v_slot, "LEAST": LEAST,
    }  # fmt: skip
    flags = {
        "FP16": v.q_fp16 or not plain, "FP8": False, "Q_FP16": v.q_fp16, "HEAD_SCALES": v.scales == "head",
        "LEFT": v.left, "SOFTCAP": v.softcap, "ALIBI": v.alibi,
    }  # fmt: skip
    lines = ["#pragma once"]
    lines += [f"constexpr int {name} = {value};" for name, value in numbers.items()]
    lines += [f"constexpr bool {name} = {str(value).lower()};" for name, value in flags.items()]
    return "\n".join(lines) + "\n"


@cache
def files() -> dict[str, str]:
    """The headers, by the names that they include one another with."""
    here = Path(__file__).parent
    shared = here.parents[1] / "attention" / "hopper"
    found = dict.fromkeys(OWN_HEADERS, here) | dict.fromkeys(SHARED_HEADERS, shared)
    return {f"{name}.cuh": (folder / f"{name}.cuh").read_text() for name, folder in found.items()}


def program(variant: DecodeVariant) -> tuple[str, str, dict[str, str]]:
    """Name, text and headers, as `jit.nvrtc.compile` takes them."""
    text = (Path(__file__).parent / "decode.cu").read_text()
    return "decode.cu", text, {**files(), "config.cuh": config(variant)}
