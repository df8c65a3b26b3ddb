"""`fk.profile()`: records what runs inside it, and then says where the time went."""

from __future__ import annotations

import tempfile
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from flashkernels.jit.eager import watched
from flashkernels.profiling import syncs, trace
from flashkernels.profiling.profile import Profile, profile_of


class Session:
    """A recording, made by `profile`. After the `with` block `print(session)` tells the story and `session.profile` has
    the figures."""

    def __init__(self, path: Path | None, stacks: bool) -> None:
        self.path, self.stacks = path, stacks
        self._profile: Profile | None = None
        self._open = ExitStack()
        self._recorder: Any = None

    def __enter__(self) -> Session:
        if self._recorder is not None:
            raise RuntimeError("this session has already recorded: make another with fk.profile()")
        self._open.enter_context(watched())  # our ops show up with their shapes
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._open.enter_context(syncs.marked())
        self._recorder = torch.profiler.profile(activities=activities, record_shapes=True, with_stack=self.stacks)
        try:
            self._recorder.start()
        except BaseException:
            self._open.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._open.close()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._recorder.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = self.path or Path(folder) / "trace.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            self._recorder.export_chrome_trace(str(path))
            self._profile = profile_of(trace.read(path))

    def step(self, name: str = "step", items: int = 1) -> AbstractContextManager[Any]:
        """Marks one step, of `items` tokens or samples; steps called prefill and decode are set against each other."""
        if not name.replace("-", "_").isidentifier():
            raise ValueError(f"name={name!r} must be one word of letters, digits, - and _")
        if items < 1:
            raise ValueError(f"items={items} must be at least 1")
        return torch.profiler.record_function(f"fk:step {name} x{items}")

    @property
    def profile(self) -> Profile:
        if self._profile is None:
            raise RuntimeError("the session has not ended: read its profile after the `with` block")
        return self._profile

    def __str__(self) -> str:
        return str(self.profile)


def profile(trace: str | Path | None = None, *, stacks: bool = False) -> Session:
    """Records the `with` block: kernels against the roofs, idle time, latency of marked steps, and what to mend.

    Args:
        trace: where to write the Chrome trace, for Perfetto; None writes none. A name that ends in .gz is compressed.
        stacks: also record Python functions. Slows the host; shows which of them the GPU waits for.

    Returns:
        A `Session`: `session.step(...)` marks steps inside the block; after it `print(session)` and `session.profile`.
        On a GPU the block ends when the GPU is done. Without one, torch's ops on the CPU are recorded.

    >>> import torch, flashkernels as fk
    >>> with fk.profile() as session:
    ...     with session.step("decode", items=4):
    ...         _ = torch.ones(64, 64) @ torch.ones(64, 64)
    >>> row = next(row for row in session.profile.rows if row.name == "aten::mm")
    >>> row.count, row.cost.flops
    (1, 524288.0)
    """
    return Session(None if trace is None else Path(trace), stacks)
