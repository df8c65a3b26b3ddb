"""Finds the loops of a disassembled kernel: which instructions run once per key block."""

from __future__ import annotations

import re

MATRIX = ("HGMMA", "HMMA", "UTCHMMA")  # sm_90; sm_80, 89 and 120; sm_100
_LABEL = re.compile(r"(\.L\w+):")
# ptxas leaves some loops by a CALL that never returns
_BRANCH = re.compile(r"(@!?U?P\d+ +)?(BRA\S*|CALL\.REL\.NOINC) +(!?U?P\d+, +)*`\((\.L\w+)\)")
_END = re.compile(r"\*/ +(EXIT|RET\S*) ")


def matrix(lines: list[str]) -> list[str]:
    return [line for line in lines if re.search(rf"\b({'|'.join(MATRIX)})\b", line)]


def spills(lines: list[str]) -> list[str]:
    """Registers that go to local memory or come back. Storing RZ there is no spill, but the argument of a call."""
    return [line for line in lines if re.search(r"\b(LDL\S* |STL\S* \[.*\], )R\d", line)]


def loops(sass: str) -> list[list[str]]:
    """The lines of every natural loop: of an edge back to a block through which all ways to the edge lead.

    A branch back alone is not a loop: waits that mostly need not wait are put behind the kernel's end and jump back.
    """
    blocks, labels = _blocks(sass)
    after = [_successors(blocks, labels, i) for i in range(len(blocks))]
    before: list[list[int]] = [[] for _ in blocks]
    for i, targets in enumerate(after):
        for j in targets:
            before[j].append(i)
    dominators = _dominators(before)
    bodies: dict[int, set[int]] = {}
    for tail, targets in enumerate(after):
        for head in targets:
            if head in dominators[tail]:
                body = bodies.setdefault(head, {head})
                ahead = [tail]
                while ahead:
                    block = ahead.pop()
                    if block not in body:
                        body.add(block)
                        ahead += before[block]
    return [[line for i in sorted(body) for line in blocks[i]] for body in bodies.values()]


def key_loops(sass: str) -> list[list[str]]:
    """The loops over key blocks: those with matrix instructions, less the nest that only runs where V holds NaN."""
    found = [body for body in loops(sass) if matrix(body)]
    return [body for body in found if not any(other is not body and set(body) & set(other) for other in found)]


def _blocks(sass: str) -> tuple[list[list[str]], dict[str, int]]:
    blocks: list[list[str]] = [[]]
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            if blocks[-1]:
                blocks.append([])
            labels[label[1]] = len(blocks) - 1
        elif re.match(r"\s+/\*[0-9a-f]{4,}\*/", line):
            blocks[-1].append(line)
            if _BRANCH.search(line) or _END.search(line):
                blocks.append([])
    return blocks, labels


def _successors(blocks: list[list[str]], labels: dict[str, int], i: int) -> list[int]:
    last = blocks[i][-1] if blocks[i] else ""
    branch = _BRANCH.search(last)
    found = [labels[branch[4]]] if branch and branch[4] in labels else []
    goes_on = not _END.search(last) and (branch is None or branch[1] or branch[3])
    return found + ([i + 1] if goes_on and i + 1 < len(blocks) else [])


def _dominators(before: list[list[int]]) -> list[set[int]]:
    """For every block, the blocks through which each way from the entry leads."""
    everything = set(range(len(before)))
    found = [{0}] + [everything] * (len(before) - 1)
    changed = True
    while changed:
        changed = False
        for i in range(1, len(before)):
            new = {i} | (set.intersection(*(found[j] for j in before[i])) if before[i] else set())
            if new != found[i]:
                found[i], changed = new, True
    return found


def waits(loop: list[str]) -> int:
    """How often a loop waits for matrix products of sm_90."""
    return sum("WARPGROUP.DEPBAR" in line for line in loop)
