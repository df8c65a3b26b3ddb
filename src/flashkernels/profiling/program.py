"""Runs a Python program inside this process, so that a session can record it."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


class Program:
    """`python script.py ...`, `python -m module ...` or `python -c code`; the word `python` may be left out.

    >>> program = Program(["python", "-c", "import sys; sys.exit(3)"])
    >>> program.run()
    3
    """

    def __init__(self, command: Sequence[str]) -> None:
        words = list(command)
        if words and _is_python(words[0]):
            words = words[1:]
        if not words:
            raise ValueError("no program is given: write it after --, as in: flashkernels profile -- python script.py")
        self.kind, self.target, self.arguments = "script", words[0], words[1:]
        if words[0] in ("-m", "-c"):
            if len(words) < 2:
                raise ValueError(f"python {words[0]} needs a word after it")
            self.kind, self.target, self.arguments = words[0], words[1], words[2:]
        elif words[0].startswith("-"):
            raise ValueError(f"option {words[0]} of python is not supported; -m and -c are")
        elif not Path(self.target).exists():
            raise ValueError(f"{self.target}: there is no such script; only Python programs can be profiled")

    def run(self) -> int:
        """Runs it as the main program and returns its exit code; what it raises otherwise goes on to the caller."""
        with _main(self):
            try:
                if self.kind == "-m":
                    runpy.run_module(self.target, run_name="__main__", alter_sys=True)
                elif self.kind == "-c":
                    exec(compile(self.target, "<string>", "exec"), {"__name__": "__main__"})
                else:
                    runpy.run_path(self.target, run_name="__main__")
            except SystemExit as end:
                if end.code is None or isinstance(end.code, int):
                    return end.code or 0
                print(end.code, file=sys.stderr)  # as Python itself does with words
                return 1
        return 0


def _is_python(word: str) -> bool:
    name = os.path.basename(word).removesuffix(".exe")
    return name == "python" or (name.startswith("python") and name[6:].replace(".", "").isdigit())


@contextmanager
def _main(program: Program) -> Iterator[None]:
    """sys.argv and sys.path as the program would find them."""
    argv, path = sys.argv, sys.path[:]
    first = os.path.dirname(os.path.abspath(program.target)) if program.kind == "script" else os.getcwd()
    sys.argv = [program.target if program.kind == "script" else program.kind, *program.arguments]
    sys.path.insert(0, first)
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path
