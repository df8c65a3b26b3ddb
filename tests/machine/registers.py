"""A kernel's registers as numbers, and its instructions as the machine reads them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.machine.ptx import TYPES, WIDE, Instruction, Kernel, UnknownInstruction


@dataclass
class Code:
    """A kernel as the machine has it: numbers only."""

    instructions: list[int]  # nine numbers each: `Instruction` of program.h
    operands: list[int]
    words: int  # of 32 bits, of a lane
    predicates: int
    constants: list[tuple[int, int]]  # word, its bits
    specials: dict[str, int]  # word of each
    symbols: list[tuple[str, int, int]]  # kind, offset, first word


# Which operands are places in memory.
ADDRESSES = {
    **dict.fromkeys(("ld", "st", "atom", "red", "ldmatrix", "stmatrix", "copy.arrive"), (0,)),
    **dict.fromkeys(("mbarrier.init", "mbarrier.wait", "mbarrier.arrive", "mbarrier.expect"), (0,)),
    **dict.fromkeys(("tma.load", "bulk.load"), (0, 2, 4)),
    **dict.fromkeys(("tma.store", "bulk.reduce", "copy"), (0, 2)),
}


def encode(kernel: Kernel, names: list[str]) -> Code:
    """With as few registers as the lives of PTX's allow: thousands would not fit a CPU's cache."""
    return _Encoder(kernel, {name: i for i, name in enumerate(names)}).encoded()


class _Encoder:
    def __init__(self, kernel: Kernel, ops: dict[str, int]) -> None:
        self.kernel, self.ops = kernel, ops
        self.constants: dict[tuple[int, bool], int] = {}
        self.specials: dict[str, int] = {}
        self.symbols: dict[str, tuple[str, int, int]] = {}
        self.words = 0
        self.predicates = 2  # the first is false, the second true

    def encoded(self) -> Code:
        kernel = self.kernel
        instructions: list[int] = []
        operands: list[int] = []
        self.slots = self._allocated()
        for one in kernel.instructions:
            if one.op == "ld" and kernel.registers.get(one.results[0]) in WIDE:
                one.type2 = "b64"
        for one in kernel.instructions:
            if one.op not in self.ops:
                raise UnknownInstruction(f"the machine cannot {one.op}: {one.text}")
            guard = 0 if not one.guard else (self._slot(one.guard) + 1) * (-1 if one.negated else 1)
            start = len(operands)
            operands += [self._slot(name) for name in one.results]
            operands += self._encoded_operands(one)
            target = kernel.labels[one.target] if one.target else 0
            instructions += [
                self.ops[one.op], TYPES.index(one.type), TYPES.index(one.type2), one.mod, guard, len(one.results),
                len(operands) - start - len(one.results), start, target,
            ]  # fmt: skip
        constants = [(word, bits >> 32 * i & 0xFFFFFFFF) for (bits, wide), first in self.constants.items()
                     for i, word in enumerate(range(first, first + 1 + wide))]  # fmt: skip
        return Code(instructions, operands, self.words, self.predicates, constants, self.specials,
                    list(self.symbols.values()))  # fmt: skip

    def _encoded_operands(self, one: Instruction) -> list[int]:
        encoded: list[int] = []
        places = ADDRESSES.get(one.op, ())
        for i, operand in enumerate(one.operands):
            if i in places:
                name = str(operand)
                known = self.kernel.registers.get(name)
                wide = known in WIDE or (known is None and not name.lstrip("-").isdigit())
                encoded += [self._value(name, wide=wide), int(wide)]
            elif isinstance(operand, int):
                encoded.append(operand)
            elif one.op.endswith(".pred") and operand not in self.kernel.registers:
                encoded.append(int(bool(_immediate(operand))))  # the predicates that are false and true
            else:
                encoded.append(self._value(operand, wide=self._is_wide(one, i)))
        return encoded

    def _is_wide(self, one: Instruction, i: int) -> bool:
        """Whether an immediate in this place has 64 bits."""
        if one.op in ("mul.wide", "cvt"):
            return one.op == "cvt" and one.type2 in WIDE
        if one.op == "mad.wide":
            return i == 2
        if one.op in ("shl", "shr"):
            return i == 0 and one.type in WIDE
        if one.op in ("bfi", "bfe"):
            return one.type in WIDE and i < (2 if one.op == "bfi" else 1)
        return one.type in WIDE and one.op not in ("shfl", "vote", "pack", "unpack", "wgmma")

    def _slot(self, name: str) -> int:
        return -1 if name == "_" else self.slots[name]

    def _value(self, name: str, wide: bool) -> int:
        if name in self.slots:
            return self.slots[name]
        if name in self.kernel.registers:
            return self._never_written(name)
        if name == "_":
            return -1
        if name.startswith("%") or name == "ALL_THREADS":
            if name not in self.specials:
                self.specials[name] = self._words(1)
            return self.specials[name]
        for kind, where in (
            ("shared", self.kernel.shared),
            ("param", self.kernel.parameters),
            ("local", self.kernel.local),
        ):
            if name in where:
                if name not in self.symbols:
                    self.symbols[name] = (kind, where[name], self._words(2))
                return self.symbols[name][2]
        bits = _immediate(name) & (2**64 - 1 if wide else 2**32 - 1)
        if (bits, wide) not in self.constants:
            self.constants[bits, wide] = self._words(2 if wide else 1)
        return self.constants[bits, wide]

    def _never_written(self, name: str) -> int:
        """Read only: whatever is there will do, and zero is the same in every run."""
        return (
            0 if self.kernel.registers[name] == "pred" else self._value("0", wide=self.kernel.registers[name] in WIDE)
        )

    def _words(self, count: int) -> int:
        self.words += count
        return self.words - count

    def _allocated(self) -> dict[str, int]:
        """A slot for each register: they share one where their lives, stretched over all code between, do not meet."""
        lives = _lives(self.kernel)
        slots: dict[str, int] = {}
        free: dict[str, list[int]] = {"pred": [], "narrow": [], "wide": []}
        by_end: dict[int, list[tuple[str, int]]] = {}
        starts: dict[int, list[str]] = {}
        for name, (start, _) in lives.items():
            starts.setdefault(start, []).append(name)
        for at in range(len(self.kernel.instructions)):
            for name in starts.get(at, ()):
                kind = self.kernel.registers[name]
                pool = "pred" if kind == "pred" else "wide" if kind in WIDE else "narrow"
                if free[pool]:
                    slot = free[pool].pop()
                elif pool == "pred":
                    slot, self.predicates = self.predicates, self.predicates + 1
                else:
                    slot = self._words(2 if pool == "wide" else 1)
                slots[name] = slot
                by_end.setdefault(lives[name][1], []).append((pool, slot))
            for pool, slot in by_end.pop(at, ()):
                free[pool].append(slot)
        return slots


def _immediate(text: str) -> int:
    if text.startswith("0f"):
        return int(text[2:], 16)
    if text.startswith("0d"):
        return int(text[2:], 16)
    try:
        return int(text.rstrip("U"), 0)
    except ValueError:
        raise UnknownInstruction(f"no meaning for the operand {text!r}") from None


def _uses(one: Instruction) -> Iterator[str]:
    yield from (x for x in one.operands if isinstance(x, str))
    if one.guard:
        yield one.guard
        yield from one.results  # kept where the guard is false
    if one.op == "wgmma":
        yield from one.results


def _lives(kernel: Kernel) -> dict[str, tuple[int, int]]:
    """First and last instruction of each register that is written."""
    code = kernel.instructions
    numbers = {name: i for i, name in enumerate(kernel.registers)}
    names = list(kernel.registers)
    starts = sorted({0, *kernel.labels.values(), *(i + 1 for i, one in enumerate(code) if one.op in ("bra", "ret"))})
    starts = [start for start in starts if start < len(code)]
    ends = [*starts[1:], len(code)]
    block_of = {start: i for i, start in enumerate(starts)}
    reads, writes, after = [], [], []
    for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
        read = written = 0
        for one in code[start:end]:
            for name in _uses(one):
                if (number := numbers.get(name)) is not None and not written >> number & 1:
                    read |= 1 << number
            for name in one.results:
                if (number := numbers.get(name)) is not None:
                    written |= 1 << number
        last = code[end - 1]
        next_blocks = [block_of[kernel.labels[last.target]]] if last.op == "bra" else []
        if (last.op not in ("bra", "ret") or last.guard) and i + 1 < len(starts):
            next_blocks.append(i + 1)
        reads.append(read), writes.append(written), after.append(next_blocks)
    live_in, live_out = [0] * len(starts), [0] * len(starts)
    changed = True
    while changed:
        changed = False
        for i in reversed(range(len(starts))):
            out = 0
            for successor in after[i]:
                out |= live_in[successor]
            into = reads[i] | out & ~writes[i]
            if out != live_out[i] or into != live_in[i]:
                live_out[i], live_in[i], changed = out, into, True
    spans: dict[str, tuple[int, int]] = {}

    def reach(name: str, at: int) -> None:
        first, last = spans.get(name, (at, at))
        spans[name] = min(first, at), max(last, at)

    for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
        for edge, at in ((live_in[i], start), (live_out[i], end - 1)):
            while edge:
                lowest = edge & -edge
                reach(names[lowest.bit_length() - 1], at)
                edge ^= lowest
        for at in range(start, end):
            for name in (*_uses(code[at]), *code[at].results):
                if name in numbers:
                    reach(name, at)
    return spans
