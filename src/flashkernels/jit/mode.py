"""How kernels run in this process."""

from __future__ import annotations

import os


def interpreting() -> bool:
    """Whether Triton kernels run in its CPU interpreter (TRITON_INTERPRET=1 when triton was imported)."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
