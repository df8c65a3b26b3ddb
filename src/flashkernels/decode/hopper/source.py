"""The CUDA source of one variant of the decode: headers of this folder and of the attention's, and its constants."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from flashkernels.formats import FORMATS
from flashkernels.jit.headers import constants, texts

OWN_HEADERS = (
    "decode_params", "decode_numbers", "decode_formats", "decode_steps", "decode_schedule", "decode_warp",
    "decode_finish", "decode_ends", "rows_layout", "rows_schedule",
)  # fmt: skip
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
    """Warps of a block, blocks of an SM, keys of a step in sixteens, and steps that are loaded ahead.

    heads: 0 where every warp copies for itself, 16 bytes a lane. Otherwise the KV heads of a block: one more warp
    copies their rows together, stages are the block's, and blocks have equal shares of the keys.

    >>> HopperDecodeTile(warps=8, per_sm=1, sub=1, stages=3).name
    'hopper-w8-p1-k16-s3'
    >>> HopperDecodeTile(warps=16, per_sm=1, sub=1, stages=4, heads=4).name
    'hopper-w16-p1-k16-s4-h4'
    """

    warps: int
    per_sm: int
    sub: int
    stages: int
    heads: int = 0

    @property
    def name(self) -> str:
        more = f"-h{self.heads}" if self.heads else ""
        return f"hopper-w{self.warps}-p{self.per_sm}-k{16 * self.sub}-s{self.stages}{more}"

    @property
    def threads(self) -> int:
        return 32 * (self.warps + (self.heads > 0))

    def pieces(self, sms: int, kv_heads: int) -> int:
        """That the work is cut into, at most. Each has room for two parts of units in the workspace, and a counter."""
        return max(sms, kv_heads // self.heads) if self.heads else max(sms * PIECES, kv_heads)


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
    scale_heads: int = 0  # KV heads whose scales are copied together

    @property
    def tiles(self) -> int:
        """Query rows, in eights."""
        return -(-self.group // 8)

    @property
    def scale_bytes(self) -> int:
        """Of a key's scales as they are copied: at least 4 by a lane."""
        least = 2 if self.tile.heads else 4
        return max(least, 2 * FORMATS[self.format].groups(self.head_dim)) if self.scales == "token" else 0

    @property
    def rows(self) -> int:
        """Rows of sums that a part of a unit has."""
        return self.group * max(1, self.tile.heads)

    @property
    def part_floats(self) -> int:
        """Of a part of a unit in the workspace: sums, maximum and weight of each row."""
        return -(-self.rows * (self.head_dim_v + 2) // 4) * 4

    @property
    def loaded(self) -> int:
        """Bytes of a step of a warp."""
        return 16 * self.tile.sub * ROW * (chunks(self.format, self.head_dim) + chunks(self.format, self.head_dim_v))

    @property
    def stage(self) -> int:
        """Bytes of a stage of a block whose rows are copied together: an odd number of sixteens apart."""
        rows = (self.tile.heads * stored_bytes(self.format, n) for n in (self.head_dim, self.head_dim_v))
        pitches = sum(n if n % 32 else n + 16 for n in rows)
        return self.tile.sub * (16 * pitches + 32 * self.scale_heads * self.scale_bytes)

    @property
    def shared(self) -> int:
        """Bytes of shared memory; decode_formats.cuh and rows_layout.cuh assert the same."""
        tile = self.tile
        if tile.heads:
            size = tile.stages * self.stage
            size += tile.warps * self.group * (4 * (self.head_dim_v + 4) + 8)
            size += 4 * (2 * MOST_SEQUENCES + 1) + 4 * (tile.warps + 1) + 4
            return -(-size // 8) * 8 + 8 * (2 * tile.stages + 1)
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
        "K_SLOT": v.k_slot, "V_SLOT": v.v_slot,
    }  # fmt: skip
    numbers |= {"HEADS": tile.heads, "SCALE_HEADS": v.scale_heads} if tile.heads else {"LEAST": LEAST}
    flags = {
        "FP16": v.q_fp16 or not plain, "FP8": False, "Q_FP16": v.q_fp16, "HEAD_SCALES": v.scales == "head",
        "LEFT": v.left, "SOFTCAP": v.softcap, "ALIBI": v.alibi,
    }  # fmt: skip
    return constants(numbers, flags)


@cache
def files() -> dict[str, str]:
    """The headers, by the names that they include one another with."""
    here = Path(__file__).parent
    return texts(here, OWN_HEADERS) | texts(here.parents[1] / "attention" / "hopper", SHARED_HEADERS)


def program(variant: DecodeVariant) -> tuple[str, str, dict[str, str]]:
    """Name, text and headers, as `jit.nvrtc.compile` takes them."""
    name = "rows.cu" if variant.tile.heads else "decode.cu"
    text = (Path(__file__).parent / name).read_text()
    return name, text, {**files(), "config.cuh": config(variant)}
