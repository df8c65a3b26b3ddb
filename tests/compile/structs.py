"""What a struct of CUDA C++ declares, to compare with its counterpart in ctypes."""

from __future__ import annotations

import re

# A pointer of any type is 8 bytes.
BYTES = {"TensorMap": 128, "Strides": 24, "i64": 8, "int": 4, "float": 4}


def declared(text: str) -> list[tuple[str, int]]:
    """Name and size of each field of `Params`, in its order."""
    body = re.search(r"struct Params \{(.*?)\n\};", text, re.S)
    assert body is not None
    fields: list[tuple[str, int]] = []
    for statement in re.sub(r"//.*", "", body[1]).split(";"):
        words = re.match(r"\s*(?:const )?(?:unsigned )?(\w+)\b(.*)", statement, re.S)
        names = words[2].split(",") if words else []
        fields += [(name.strip(" *\n"), 8 if "*" in name else BYTES[words[1]]) for name in names]
    return fields
