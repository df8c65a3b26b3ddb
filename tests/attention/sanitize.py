"""A dozen small calls that between them take every branch of the GPU kernel, for compute-sanitizer.

    compute-sanitizer --tool memcheck --error-exitcode 1 python -m tests.attention.sanitize

Each tensor is an allocation of its own (PYTORCH_NO_CUDA_MEMORY_CACHING=1), so that a read past its end
is out of bounds and not merely inside the allocator's block.
"""

from __future__ import annotations

import os

import torch

import flashkernels as fk

from . import oracle
from .cases import EVERYTHING, Shape, keywords, qkv, ragged

CASES = (
    # odd lengths and head dimensions, so that every tile has an end
    ("plain", Shape(b=2, sq=130, sk=131, h=2, hkv=1, d=64), torch.bfloat16),
    ("causal", Shape(b=1, sq=77, sk=201, h=3, hkv=1, d=72), torch.bfloat16),
    ("causal", Shape(b=1, sq=201, sk=77, h=2, hkv=2, d=40), torch.float16),
    ("window", Shape(b=1, sq=150, sk=150, h=2, hkv=1, d=96, dv=33), torch.bfloat16),
    ("left+softcap", Shape(b=1, sq=65, sk=200, h=2, hkv=1, d=7), torch.bfloat16),
    ("alibi2d+sinks", Shape(b=2, sq=65, sk=129, h=2, hkv=1, d=128), torch.bfloat16),
    ("boolmask", Shape(b=2, sq=67, sk=131, h=2, hkv=1, d=112), torch.bfloat16),
    ("floatmask+causal", Shape(b=2, sq=67, sk=131, h=2, hkv=1, d=48), torch.float32),
    ("plain", Shape(b=1, sq=33, sk=97, h=1, hkv=1, d=255), torch.bfloat16),
    ("causal", Shape(b=1, sq=33, sk=97, h=1, hkv=1, d=320), torch.bfloat16),
    ("causal", Shape(b=1, sq=33, sk=97, h=1, hkv=1, d=512), torch.float16),
    ("+".join((*EVERYTHING, "boolmask")), Shape(b=1, sq=90, sk=75, h=3, hkv=1, d=80), torch.bfloat16),
    ("+".join((*EVERYTHING, "floatmask")), Shape(b=1, sq=1, sk=300, h=4, hkv=2, d=160), torch.bfloat16),
)


def main() -> None:
    os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")  # read at the first allocation
    for features, shape, dtype in CASES:
        inputs, named = qkv(shape, dtype, device="cuda"), keywords(features, shape, "cuda")
        out, lse = fk.attention(*inputs, return_lse=True, impl="triton", **named)
        torch.cuda.synchronize()
        oracle.assert_correct(out, lse, *inputs, **named)
        print(f"ok  {shape}  {features}  {str(dtype).removeprefix('torch.')}", flush=True)
    for dim in (64, 72):
        shape = Shape(b=4, h=3, hkv=1, d=dim)
        batch = ragged([50, 0, 1, 133], [70, 9, 0, 133], shape, torch.bfloat16, device="cuda")
        named = keywords(EVERYTHING, shape, "cuda")
        out, lse = fk.attention_varlen(*batch.args, return_lse=True, impl="triton", **named)
        torch.cuda.synchronize()
        oracle.assert_correct_varlen(out, lse, *batch.tensors, **named)
        print(f"ok  varlen d{dim}  {'+'.join(EVERYTHING)}", flush=True)


if __name__ == "__main__":
    main()
