"""NVTX ranges around our ops and torch's, with their shapes, for Nsight.

`python -m flashkernels.profiling.ranges script.py ...` runs a program inside them. Nsight and
torch's profiler cannot both listen to the GPU, so ranges are for runs under Nsight.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from flashkernels.jit.eager import watched


@contextmanager
def nvtx_ranges() -> Iterator[None]:
    """Every op inside is an NVTX range named after it, `flashkernels::attention, sizes = [[4, 4096, 28, 72], ...]`."""
    if not torch.cuda.is_available():
        raise ValueError("NVTX ranges need an NVIDIA GPU; torch sees none here")
    with watched(), torch.autograd.profiler.emit_nvtx(record_shapes=True):
        yield


def main() -> None:
    from flashkernels.profiling.program import Program

    program = Program(sys.argv[1:])
    with nvtx_ranges():
        code = program.run()
    sys.exit(code)


if __name__ == "__main__":
    main()
