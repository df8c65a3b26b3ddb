"""Which gradients the Hopper backward can make, and how it cuts a problem."""

from __future__ import annotations

from dataclasses import replace

from flashkernels.attention.hopper.backward_source import SHARED_LIMIT as SHARED_LIMIT, BackwardTile, BackwardVariant
from flashkernels.attention.hopper.backward_wide_source import QUERIES as WIDE_QUERIES, WIDEST
from flashkernels.attention.problem import AttentionProblem, BackwardProblem
from flashkernels.hardware import Gpu


def rejects(problem: BackwardProblem, gpu: Gpu | None) -> str | None:
    """Why the Hopper backward cannot serve, or None."""
    call = problem.call
    if call.device != "cuda" or gpu is None:
        return f"needs a Hopper GPU, the tensors are on {call.device}"
    if gpu.capability != (9, 0):
        return f"needs compute capability 9.0, {gpu.name} has {gpu.capability[0]}.{gpu.capability[1]}"
    if call.dtype not in ("fp16", "bf16"):
        return f"has no {call.dtype} kernel"
    for name, dim in (("head_dim", call.head_dim), ("head_dim of v", call.head_dim_v)):
        if dim % 8:
            return f"{name}={dim} is not a multiple of 8: TMA cannot address its rows"
        if not 16 <= dim <= WIDEST:
            return f"{name}={dim} is not in 16 to {WIDEST}"
    if call.mask or "mask" in problem.wanted:
        return "takes no mask tensor"
    if call.page_size:
        return "takes no paged K and V"
    if call.dropout_p:
        return "has no dropout"
    if "alibi_slopes" in problem.wanted:
        return "has no gradient of the ALiBi slopes"
    if not problem.saved:
        return "needs the output and the log-sum-exp, which this forward did not keep"
    if call.unaddressable:
        return f"TMA cannot read {call.unaddressable}"
    if call.empty:
        return "an empty problem has nothing to load"
    if (rows := places(call, MOST_QUERIES)) >= 2**31:
        return f"counts rows of queries in 32 bits; with the ends of all sequences there are {rows}"
    return None


def places(call: AttentionProblem, size: int) -> int:
    """Rows of the blocks of queries of all heads. In a ragged batch each sequence may have a block that is not full.

    >>> call = AttentionProblem(batch=2, seq_q=100, seq_k=100, heads=4, kv_heads=4, head_dim=64)
    >>> places(call, 64)
    1024
    """
    if call.varlen:
        return (call.total_q // size + call.batch) * size * call.heads
    return -(-call.seq_q // size) * size * call.heads * call.batch


def choose(problem: BackwardProblem) -> BackwardVariant:
    """The variant to compile.

    A kernel of its own for dQ computes 7 products instead of 5, but adds nothing in memory: the additions of tiles of
    64 keys, 8.6 GB at D=256 (B=4, S=4096, H=8), would take 4.8 ms at the 1.8 TB/s that the L2 was seen to add (H200,
    2026-11-15), and the products take 1.9 ms at best.

    Of a window that ends on the left only, with slopes, ptxas takes the loop for divergent (265 moves to uniform
    registers for 34 at 128 columns): it has a right end too, a far one.
    """
    call, wanted = problem.call, problem.wanted
    left, right = (side >= 0 for side in call.band)
    right = right or (left and call.alibi)
    tile = tile_of(call, problem.deterministic)
    return BackwardVariant(
        call.head_dim, call.head_dim_v, tile, fp16=call.dtype == "fp16", left=left, right=right,
        softcap=call.softcap, alibi=call.alibi, varlen=call.varlen,
        own_dq=problem.deterministic or tile.paired or tile.wide,
        want_q="q" in wanted, want_k="k" in wanted, want_v="v" in wanted,
    )  # fmt: skip


def tile_of(call: AttentionProblem, deterministic: bool = False) -> BackwardTile:
    left, right = call.band
    tile = by_dimension(
        call.head_dim, call.head_dim_v, softcap=call.softcap, left=left >= 0, right=right >= 0, alibi=call.alibi,
        varlen=call.varlen, deterministic=deterministic,
    )  # fmt: skip
    return replace(tile, cluster=2) if not deterministic and shares_loads(call) else tile


def shares_loads(call: AttentionProblem) -> bool:
    """Whether two blocks with neighbouring keys share their loads of Q and dO: not under a mask, where one of the two
    would walk 128 queries more.

    Without one it gave 1 % at 64, 80 and 96 columns (1.5 % with 16384 keys) and 3.5 % at 88. With 1024 keys it cost
    1.4 % at 64; it cost 1 to 8 % at 48, 56, 72 and 112, and gave nothing at 120 and 128 (H200, 2026-11-19).
    """
    columns, blocks = {call.head_dim, call.head_dim_v}, -(-call.seq_k // 128)
    plain = not (call.softcap or call.varlen) and call.band == (-1, -1)
    return plain and len(columns) == 1 and columns <= {64, 80, 88, 96} and blocks % 2 == 0 and blocks >= 16


MOST_QUERIES = 128  # of a block, in any tile
# Of a consumer thread's 240 registers, what operands and accumulators may take: with more, ptxas spills or serialises.
# More than a causal mask takes more for itself.
OPERANDS, CROWDED = 208, 204


def by_dimension(
    dim: int, dim_v: int, *, softcap: bool = False, left: bool = False, right: bool = False, alibi: bool = False,
    varlen: bool = False, deterministic: bool = False,
) -> BackwardTile:  # fmt: skip
    """The fastest at 64 to 128 (H200, 2026-11-16, B=4, S=4096), and their neighbours.

    Additions of dQ by the copy engine gave 2 to 14 % at 72 to 96, and 2 to 8 % under a causal mask; at 64 they cost up
    to 18 %. With tall blocks they gave 8 to 20 % at 104 to 128, and 1 to 12 % under a causal mask; at 64 2.5 %, and
    2.7 % under a causal mask, where blocks start at the diagonal (2026-11-17).

    dK and dV by the copy engine, too, gave 0 to 4 %, but at 64 without a mask cost 4 % (2026-11-18).

    K and V in registers gave 5 to 6 % at 64 and 72. Separate registers for dS gave 2 to 5 % where all columns of dQ are
    one warpgroup's, and lost as much where they are halves. At 64, halves are 3 % faster, and under a causal mask 2 %
    slower.
    """
    wide = max(dim, dim_v)
    if wide > 256:
        return BackwardTile(wide=True, queries=WIDE_QUERIES, cluster=2)
    if softcap or wide > 128:
        return BackwardTile(paired=True, q_stages=2)
    hides, crowded = left or right or varlen, left or alibi or varlen
    if not deterministic:
        if dim == dim_v == 64 and not (left or varlen):
            return BackwardTile(queries=112, staged=True, sends=right)
        # S and dP of 80 queries beside dK and dV
        if dim > 96 and dim // 2 + dim_v // 2 + 80 <= (CROWDED if left and alibi else OPERANDS):
            return BackwardTile(queries=80, q_stages=2, staged=True, sends=True)
    most = CROWDED if crowded else OPERANDS
    used = dim // 2 + dim_v // 2 + 32 + 16  # dK, dV, S and P
    halves = (dim == 64 and not hides) or used + dim // 2 > most
    used += 32 if halves else max(32, dim // 2)  # dP, and then dQ
    keys = 4 * (-(-dim // 16) + -(-dim_v // 16))
    kv_in_registers = wide <= 72 and used + keys <= most
    used += keys if kv_in_registers else 0
    separate = not halves and used + 16 <= most
    staged = dim > 64 and not halves and not deterministic
    return BackwardTile(
        halves=halves, k_in_registers=kv_in_registers, v_in_registers=kv_in_registers, separate=separate, staged=staged,
        sends=staged,
    )  # fmt: skip


def most_tiles(call: AttentionProblem, variant: BackwardVariant) -> int:
    """Tiles of all sequences and key heads, one for each cluster of blocks; of a ragged batch at most as many."""
    keys = variant.tile.keys * variant.tile.cluster
    if call.varlen:
        return (call.total_k // keys + call.batch) * call.kv_heads
    return -(-call.seq_k // keys) * call.batch * call.kv_heads
