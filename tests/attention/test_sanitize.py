"""The set of calls for compute-sanitizer, and its parts. The calls themselves need a GPU: test_gpu.py."""

from __future__ import annotations

from collections import Counter

import pytest

from . import sanitize


@pytest.mark.parametrize("what", ["outputs", "gradients"])
@pytest.mark.parametrize("impl", ["hopper", "triton"])
@pytest.mark.parametrize("parts", [1, 3, 4])
def test_every_call_is_in_one_part(impl: str, what: str, parts: int) -> None:
    whole = Counter(map(repr, sanitize.calls(impl, what)))
    shared = (call for number in range(parts) for call in sanitize.part_of(impl, what, f"{number + 1}/{parts}"))
    assert Counter(map(repr, shared)) == whole and set(whole.values()) == {1}


@pytest.mark.parametrize("part", ["0/4", "5/4", "-1/4"])
def test_a_part_that_does_not_exist_is_refused(part: str) -> None:
    with pytest.raises(ValueError, match=f"part='{part}' is not one of 1/4 to 4/4"):
        sanitize.part_of("hopper", "outputs", part)
