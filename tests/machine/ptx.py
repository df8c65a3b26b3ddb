"""PTX as the machine executes it: instructions with numbered registers, and where in the source each comes from."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

WIDE = ("b64", "u64", "s64", "f64")
TYPES = (
    "none", "pred", "b8", "u8", "s8", "b16", "u16", "s16", "f16", "bf16", "b32", "u32", "s32", "f32", "b64", "u64",
    "s64", "f64", "f16x2", "bf16x2", "u16x2", "e4m3", "e4m3x2",
)  # fmt: skip
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "lo", "ls", "hi", "hs", "equ", "neu", "ltu", "leu", "gtu", "geu",
               "num", "nan")  # fmt: skip
SPACES = ("generic", "global", "shared", "param", "local")
SHUFFLES = ("idx", "bfly", "up", "down")
VOTES = ("any", "all", "ballot", "uni")
ATOMICS = ("add", "min", "max", "or", "and", "xor", "exch", "cas", "inc")
ROUNDINGS = ("rn", "rz", "rm", "rp", "rni", "rzi", "rmi", "rpi")

NOTHING = ("membar", "fence", "setmaxnreg", "griddepcontrol", "prefetch", "wgmma.fence", "mbarrier.inval", "nanosleep",
           "discard", "applypriority")  # fmt: skip


class UnknownInstruction(ValueError):
    """PTX that the machine has no meaning for."""


@dataclass(frozen=True)
class Place:
    """A line of the source, and the call that it was inlined at."""

    file: int
    line: int
    caller: tuple[int, int] | None


@dataclass
class Instruction:
    """`op` on registers and numbers. Of a place in memory there are two operands: a base, and the offset from it."""

    op: str
    type: str = "none"
    type2: str = "none"
    mod: int = 0
    guard: str = ""  # a predicate's name
    negated: bool = False
    results: list[str] = field(default_factory=list)
    operands: list[str | int] = field(default_factory=list)
    target: str = ""
    place: Place | None = None
    text: str = ""


@dataclass
class Kernel:
    """One entry point."""

    name: str
    instructions: list[Instruction]
    registers: dict[str, str]  # type by name
    labels: dict[str, int]  # the instruction behind each
    shared: dict[str, int]  # where each variable lies
    shared_bytes: int
    dynamic: int  # where dynamic shared memory begins
    parameters: dict[str, int]  # offset of each
    cluster: int
    local_bytes: int = 0
    local: dict[str, int] = field(default_factory=dict)


def kernels(text: str) -> dict[str, Kernel]:
    """The entry points of a PTX module. Texts within quotes are of debug sections."""
    text = re.sub(r"//[^\n]*", "", text).split("\n\t.section", 1)[0]
    dynamic = dict.fromkeys(re.findall(r"\.extern \.shared[^;]*?(\w+)\[\];", text), 0)
    module_shared = re.findall(r"\n\.shared \.align (\d+) \.b8 (\w+)\[(\d+)\];", text)
    found = {}
    for match in re.finditer(r"\.entry (\w+)\(([^)]*)\)([^{]*)\{", text):
        end = _closing(text, match.end())
        found[match[1]] = _Reader(match[1], match[2], match[3], module_shared, dynamic).read(text[match.end() : end])
    return found


def files(text: str) -> dict[int, str]:
    return {int(number): name for number, name in re.findall(r'\.file\s+(\d+) "([^"]*)"', text)}


def _closing(text: str, at: int) -> int:
    depth = 1
    for match in re.compile(r"[{}]").finditer(text, at):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return match.start()
    raise ValueError("a function has no end")


_STATEMENT = re.compile(
    r"\s*(?:(?P<open>\{)|(?P<close>\})|\.loc\s(?P<loc>[^\n]*)\n|(?P<label>[\w$]+):|(?P<text>(?:[^;{}]|\{[^{}]*\})+);)",
    re.S,
)
_NAME = r"[%\w$.]+"


class _Reader:
    """Reads one function, statement by statement. Registers that a block of inline assembly declares are its own."""

    def __init__(
        self,
        name: str,
        parameters: str,
        directives: str,
        shared: Iterable[tuple[str, str, str]],
        dynamic: dict[str, int],
    ) -> None:
        cluster = re.search(r"\.reqnctapercluster (\d+)", directives)
        self.kernel = Kernel(name, [], {}, {}, {}, 0, 0, {}, int(cluster[1]) if cluster else 1)
        offset = 0
        for align, kind, symbol, size in re.findall(
            r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(\w+)(?:\[(\d+)\])?", parameters
        ):
            width = int(size) if size else _bytes(kind)
            step = int(align) if align else width
            offset = -(-offset // step) * step
            self.kernel.parameters[symbol] = offset
            offset += width
        for align, symbol, size in shared:
            self._share(symbol, int(align), int(size))
        self.dynamic = dynamic
        self.scopes: list[dict[str, str]] = []
        self.blocks = 0
        self.place: Place | None = None

    def _share(self, name: str, align: int, size: int) -> None:
        at = -(-self.kernel.shared_bytes // align) * align
        self.kernel.shared[name] = at
        self.kernel.shared_bytes = at + size

    def read(self, body: str) -> Kernel:
        at = 0
        while match := _STATEMENT.match(body, at):
            at = match.end()
            if match["open"]:
                self.scopes.append({})
                self.blocks += 1
            elif match["close"]:
                self.scopes.pop()
            elif match["loc"]:
                self._locate(match["loc"])
            elif match["label"]:
                self.kernel.labels[match["label"]] = len(self.kernel.instructions)
            else:
                self._statement(match["text"].strip())
        if body[at:].strip():
            raise UnknownInstruction(f"cannot read {body[at : at + 80]!r}")
        self.kernel.dynamic = -(-self.kernel.shared_bytes // 1024) * 1024
        self.kernel.shared |= dict.fromkeys(self.dynamic, self.kernel.dynamic)
        self.kernel.instructions.append(Instruction("ret", text="ret"))
        return self.kernel

    def _locate(self, text: str) -> None:
        numbers = text.replace(",", " ").split()
        caller = re.search(r"inlined_at (\d+) (\d+)", text)
        self.place = Place(int(numbers[0]), int(numbers[1]), (int(caller[1]), int(caller[2])) if caller else None)

    def _statement(self, text: str) -> None:
        if text.startswith(".reg"):
            _, kind, names = text.split(None, 2)
            for name in names.split(","):
                name, kind = name.strip(), kind.lstrip(".")
                many = re.fullmatch(r"(.*)<(\d+)>", name)
                for one in [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [name]:
                    if self.scopes:
                        self.scopes[-1][one] = f"{one}@{self.blocks}"
                        one = self.scopes[-1][one]
                    self.kernel.registers[one] = kind
        elif match := re.match(r"\.(shared|local)\s+(?:\.align (\d+)\s+)?\.(\w+)\s+(\w+)(?:\[(\d+)\])?$", text):
            space, align, kind, name, count = match.groups()
            size = _bytes(kind) * int(count or 1)
            if space == "shared":
                self._share(name, int(align or _bytes(kind)), size)
            else:
                self.kernel.local[name] = -(-self.kernel.local_bytes // 16) * 16
                self.kernel.local_bytes = self.kernel.local[name] + size
        elif text.startswith(".pragma"):
            return
        else:
            one = _lowered(text, self._resolved)
            one.place, one.text = self.place, text
            self.kernel.instructions.append(one)

    def _resolved(self, name: str) -> str:
        """The name of a register, an immediate or a symbol, in the scope it is used in."""
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return name


def _bytes(kind: str) -> int:
    return int(re.sub(r"\D", "", kind)) // 8


def _lowered(text: str, resolved: Callable[[str], str]) -> Instruction:
    guard = re.match(rf"@(!?)({_NAME})\s+", text)
    rest = text[guard.end() :] if guard else text
    words = rest.split(None, 1)
    code, arguments = words[0], words[1] if len(words) > 1 else ""
    one = _Lowering(code, arguments, resolved).lowered()
    if guard:
        one.guard, one.negated = resolved(guard[2]), bool(guard[1])
    return one


_OPERAND = re.compile(r"\[[^\]]*\]|\{[^}]*\}|[^,{}\[\]]+")


class _Lowering:
    """One instruction of PTX as one of the machine's."""

    def __init__(self, code: str, arguments: str, resolved: Callable[[str], str]) -> None:
        self.code, self.tokens = code, code.split(".")
        self.types = [t for t in self.tokens if t in TYPES]
        self.arguments = [a.strip() for a in _OPERAND.findall(arguments) if a.strip()]
        self.resolved = resolved

    # --- operands

    def name(self, text: str) -> str:
        return self.resolved(text.strip())

    def names(self, at: int) -> list[str]:
        """A register, or several in braces or joined by `|`."""
        text = self.arguments[at].strip("{}")
        return [self.name(part) for part in re.split(r"[,|]", text)]

    def address(self, at: int) -> list[str | int]:
        base, _, offset = self.arguments[at].strip("[]").split(",")[0].strip().partition("+")
        return [self.name(base), int(offset) if offset else 0]

    def coordinates(self, at: int) -> list[str]:
        inside = re.search(r"\{([^}]*)\}", self.arguments[at])
        assert inside
        return [self.name(part) for part in inside[1].split(",")]

    def has(self, *tokens: str) -> bool:
        return all(token in self.tokens for token in tokens)

    def pick(self, among: tuple[str, ...]) -> int:
        return next((among.index(token) for token in self.tokens[1:] if token in among), 0)

    # --- instructions

    def lowered(self) -> Instruction:
        kind = self.types[-1] if self.types else "none"
        if (
            any(self.code == name or self.code.startswith(name + ".") for name in NOTHING)
            and "async" not in self.tokens
        ):
            return Instruction("nop")
        if self.code.startswith("fence.proxy.async"):
            return Instruction("fence.async")
        special = getattr(self, "_" + self.code.split(".")[0], None)
        if special:
            made: Instruction = special(kind)
            return made
        raise UnknownInstruction(f"no meaning for {self.code}")

    def plain(self, op: str, kind: str, mod: int = 0, type2: str = "none") -> Instruction:
        results = self.names(0)
        operands: list[str | int] = [name for i in range(1, len(self.arguments)) for name in self.names(i)]
        return Instruction(op, kind, type2, mod, results=results, operands=operands)

    def _alu(self, kind: str) -> Instruction:
        op = self.tokens[0] + "".join(f".{part}" for part in ("lo", "hi", "wide") if part in self.tokens[1:2])
        return self.plain(op + (".pred" if kind == "pred" else ""), kind)

    _add = _sub = _mul = _mad = _fma = _div = _rem = _min = _max = _abs = _neg = _and = _or = _xor = _not = _alu
    _shl = _shr = _clz = _popc = _brev = _bfi = _bfe = _prmt = _lop3 = _selp = _alu
    _ex2 = _lg2 = _rcp = _tanh = _sqrt = _rsqrt = _alu

    def _mov(self, kind: str) -> Instruction:
        results, operands = self.names(0), self.names(1)
        if kind == "pred":
            return self.plain("mov.pred", kind)
        if len(results) > 1:
            return Instruction("unpack", kind, results=results, operands=list(operands))
        if len(operands) > 1:
            return Instruction("pack", kind, results=results, operands=list(operands))
        return self.plain("mov", kind)

    def _cvta(self, kind: str) -> Instruction:
        if "shared" not in self.tokens and "local" not in self.tokens:
            return self.plain("mov", kind)
        window = SHARED_WINDOW if "shared" in self.tokens else LOCAL_WINDOW
        made = self.plain("sub" if "to" in self.tokens else "add", kind)
        made.operands.append(str(window))
        return made

    def _cvt(self, kind: str) -> Instruction:
        return self.plain(
            "cvt", self.types[0], self.pick(ROUNDINGS) | 16 * ("satfinite" in self.tokens), self.types[-1]
        )

    def _setp(self, kind: str) -> Instruction:
        made = self.plain("setp", kind, COMPARISONS.index(self.tokens[1]))
        if len(made.results) > 1 or len(made.operands) > 2:
            raise UnknownInstruction(f"no meaning for {self.code} with a second predicate")
        return made

    def _space(self) -> int:
        token = next((t.split("::")[0] for t in self.tokens[1:] if t.split("::")[0] in SPACES), "generic")
        return SPACES.index(token)

    def _ld(self, kind: str) -> Instruction:
        return Instruction("ld", kind, mod=self._space(), results=self.names(0), operands=self.address(1))

    def _st(self, kind: str) -> Instruction:
        return Instruction("st", kind, mod=self._space(), operands=[*self.address(0), *self.names(1)])

    def _atom(self, kind: str) -> Instruction:
        mod = self._space() | 16 * ATOMICS.index(next(t for t in self.tokens if t in ATOMICS))
        operands = [*self.address(1), *(n for i in range(2, len(self.arguments)) for n in self.names(i))]
        return Instruction("atom", kind, mod=mod, results=self.names(0), operands=operands)

    def _red(self, kind: str) -> Instruction:
        mod = self._space() | 16 * ATOMICS.index(next(t for t in self.tokens if t in ATOMICS))
        return Instruction("red", kind, mod=mod, operands=[*self.address(0), *self.names(1)])

    def _shfl(self, kind: str) -> Instruction:
        made = self.plain("shfl", kind, self.pick(SHUFFLES))
        made.results = [*made.results, "_"][:2]
        return made

    def _vote(self, kind: str) -> Instruction:
        return self.plain("vote", kind, self.pick(VOTES))

    def _bar(self, kind: str) -> Instruction:
        if "warp" in self.tokens:
            return Instruction("bar.warp", operands=list(self.names(0)))
        if "red" in self.tokens:
            if "or" not in self.tokens:
                raise UnknownInstruction(f"no meaning for {self.code}")
            made = self.plain("bar.red", "pred")
            if len(made.operands) == 2:
                made.operands.insert(1, "ALL_THREADS")
            return made
        operands: list[str | int] = [name for i in range(len(self.arguments)) for name in self.names(i)]
        if len(operands) == 1:
            operands.append("ALL_THREADS")
        return Instruction("bar.arrive" if "arrive" in self.tokens else "bar.sync", operands=operands)

    def _barrier(self, kind: str) -> Instruction:
        if "cluster" in self.tokens:
            return Instruction("cluster.arrive" if "arrive" in self.tokens else "cluster.wait")
        return self._bar(kind)

    def _bra(self, kind: str) -> Instruction:
        return Instruction("bra", target=self.arguments[0])

    def _ret(self, kind: str) -> Instruction:
        return Instruction("ret")

    _exit = _ret

    def _mapa(self, kind: str) -> Instruction:
        return self.plain("mapa", kind)

    def _mbarrier(self, kind: str) -> Instruction:
        if "init" in self.tokens:
            return Instruction("mbarrier.init", operands=[*self.address(0), *self.names(1)])
        if "try_wait" in self.tokens:
            return Instruction(
                "mbarrier.wait", "pred", results=self.names(0), operands=[*self.address(1), *self.names(2)]
            )
        if "arrive" not in self.tokens or self.arguments[0] != "_":
            raise UnknownInstruction(f"no meaning for {self.code}")
        if "expect_tx" in self.tokens:
            return Instruction("mbarrier.expect", operands=[*self.address(1), *self.names(2)])
        return Instruction("mbarrier.arrive", operands=self.address(1))

    def _ldmatrix(self, kind: str) -> Instruction:
        return Instruction(
            "ldmatrix", kind, mod=int("trans" in self.tokens), results=self.names(0), operands=self.address(1)
        )

    def _stmatrix(self, kind: str) -> Instruction:
        return Instruction(
            "stmatrix", kind, mod=int("trans" in self.tokens), operands=[*self.address(0), *self.names(1)]
        )

    def _movmatrix(self, kind: str) -> Instruction:
        return self.plain("movmatrix", kind)

    def _mma(self, kind: str) -> Instruction:
        if self.tokens[3] != "m16n8k16" or self.tokens[-1] != "f32":
            raise UnknownInstruction(f"no meaning for {self.code}")
        return self.plain("mma", self.types[1])

    def _wgmma(self, kind: str) -> Instruction:
        if "commit_group" in self.tokens:
            return Instruction("wgmma.commit")
        if "wait_group" in self.tokens:
            return Instruction("wgmma.wait", mod=int(self.arguments[0]))
        shape = re.search(r"m64n(\d+)k(\d+)", self.code)
        assert shape
        # accumulators, A, B, scale-d, then numbers: signs of A and B, and whether each is transposed
        numbers = [int(x) for x in self.arguments[4:]]
        if numbers[:2] != [1, 1]:
            raise UnknownInstruction(f"no meaning for {self.code} with a sign")
        turned = [*numbers[2:], 0, 0] if len(self.names(1)) == 1 else [0, *numbers[2:], 0]
        mod = int(shape[1]) | turned[0] << 12 | turned[1] << 13
        operands = [*self.names(1), *self.names(2), *self.names(3)]
        return Instruction("wgmma", self.types[-1], mod=mod, results=self.names(0), operands=list(operands))

    def _cp(self, kind: str) -> Instruction:
        if "bulk" in self.tokens and "commit_group" in self.tokens:
            return Instruction("bulk.commit")
        if "bulk" in self.tokens and "wait_group" in self.tokens:
            return Instruction("bulk.wait", mod=int(self.arguments[0]) | 16 * ("read" in self.tokens))
        if self.has("mbarrier", "noinc"):
            return Instruction("copy.arrive", operands=self.address(0))
        if "bulk" not in self.tokens:
            if "mbarrier" in self.tokens or len(self.arguments) != 3:
                raise UnknownInstruction(f"no meaning for {self.code}")
            return Instruction("copy", operands=[*self.address(0), *self.address(1), *self.names(2)])
        if "tensor" in self.tokens and "bulk_group" not in self.tokens:
            # to, [map, {coordinates}], [barrier], perhaps a mask of blocks
            mask = [self.name(self.arguments[3])] if len(self.arguments) > 3 else ["0"]
            return Instruction(
                "tma.load", operands=[*self.address(0), *self.address(1), *self.address(2), *mask, *self.coordinates(1)]
            )
        if "tensor" in self.tokens:
            return Instruction("tma.store", operands=[*self.address(0), *self.address(1), *self.coordinates(0)])
        if self.tokens[1] == "reduce":
            if not self.has("add", "f32"):
                raise UnknownInstruction(f"no meaning for {self.code}")
            return Instruction("bulk.reduce", operands=[*self.address(0), *self.address(1), *self.names(2)])
        if self.tokens[3].startswith("shared"):
            return Instruction(
                "bulk.load", operands=[*self.address(0), *self.address(1), *self.address(3), *self.names(2)]
            )
        raise UnknownInstruction(f"no meaning for {self.code}")


SHARED_WINDOW, LOCAL_WINDOW = 1 << 62, 1 << 61
