"""The `aligned` implementation, of calls whose rows cannot be read 16 bytes at a time: it copies them to rows that can,
filled up with zeros to a multiple of 8 columns, and another implementation serves the copies.

Such rows are those of 97 columns of 16 bits, or of tensors whose strides are no multiples of 16 bytes. TMA does not
address them, and Triton reads them an element at a time. Columns of zeros add nothing to a score; those of the output
are zeros, and are cut off. H200, 2026-11-16, B=4, S=4096, 21 heads of 97: 489 TFLOPS, where 37 without copies; one
query of each head and 4096 keys: 0.16 ms, where 0.56 (`docs/notes/aligned.md`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flashkernels.attention.problem import AttentionProblem, BackwardProblem
from flashkernels.attention.tensors import Run, Tensors, addressed, empty_output
from flashkernels.dispatch import lacks_triton, leaves_the_cpu, serving
from flashkernels.hardware import Gpu
from flashkernels.tiling import override


def rejects(problem: AttentionProblem, gpu: Gpu | None) -> str | None:
    """Why there is nothing to copy, or no copy to be made; or None."""
    if problem.element_bytes != 2:
        return f"copies rows of 16-bit numbers, not of {problem.dtype}"
    if not problem.narrow:
        return "rows can be read 16 bytes at a time as they are"
    if max(problem.head_dim, problem.head_dim_v) > 512:
        return f"head_dim={max(problem.head_dim, problem.head_dim_v)} is over 512"
    if problem.page_size:
        return "would copy all pages of a cache at every call"
    if problem.empty:
        return "an empty problem has nothing to copy"
    if max(problem.total_q * problem.heads, problem.total_k * problem.kv_heads) >= 1 << 31:
        return "has no numbers for over 2 ** 31 rows"
    return lacks_triton(problem.device, problem.dtype, gpu)


def defers(problem: AttentionProblem, gpu: Gpu | None) -> str | None:
    """Why "auto" should leave the call alone."""
    if override() is not None:
        return "use_tile asks for a tile of the call as it is"
    return leaves_the_cpu(problem, gpu)


def rejects_gradients(problem: BackwardProblem, gpu: Gpu | None) -> str | None:
    """The same of the gradients."""
    if not problem.saved:
        return "needs the output and the log-sum-exp, which this forward did not keep"
    return rejects(problem.call, gpu)


def plan(problem: AttentionProblem, gpu: Gpu | None, tensors: Tensors) -> Run:
    """Plans the copies, and what serves them."""
    from flashkernels.attention.api import IMPLS  # the table that has this module
    from flashkernels.attention.triton.copy import copier

    device, wide = tensors.q.device.index, problem.widened()
    to_q, to_k = (copier(x, wide.head_dim, device) for x in (tensors.q, tensors.k))
    to_v = copier(tensors.v, wide.head_dim_v, device)
    first = tensors._replace(q=to_q(tensors.q), k=to_k(tensors.k), v=to_v(tensors.v))
    wide = addressed(wide, first)
    inner = serving(IMPLS, wide, gpu, "auto" if gpu else "triton").plan(wide, gpu, first)
    like = empty_output(first.q.to("meta"), wide.head_dim_v, problem.layout)
    cut = copier(like, problem.head_dim_v, device, problem.layout)

    def run(tensors: tuple[Any, ...], softmax_scale: float, softcap: float) -> tuple[Tensor, Tensor | None]:
        q, k, v, *rest = tensors
        out, lse = inner((to_q(q), to_k(k), to_v(v), *rest), softmax_scale, softcap)
        return cut(out), lse

    return run
