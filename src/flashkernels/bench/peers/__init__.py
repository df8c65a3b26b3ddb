"""The rivals: one visible table. An adapter is imported only when its row is asked for.

An adapter has one function for each row, which takes a case with its inputs and returns the `Call` to time; its result
has the layout of `fk.attention`. What the rival cannot compute exactly as we define it raises `Unsupported` with the
reason: no rival is timed on different work.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

from flashkernels.bench.timing import Call


class Unsupported(Exception):
    """The contestant cannot compute this case; the message says why."""


@dataclass(frozen=True)
class Peer:
    """One row: the name in the results, "module:function" of its adapter, and what it needs."""

    name: str
    adapter: str
    library: str = "torch"  # the module that must be importable
    cuda: bool = False
    slow: bool = False  # compiles for minutes: only on request
    op: str = "attention"
    gradients: bool = False  # autograd goes through its call: also a rival of attention_backward

    def available(self, device: str) -> str | None:
        """Why this peer cannot run on this machine, or None."""
        if self.cuda and device != "cuda":
            return "needs a CUDA device"
        try:
            found = importlib.util.find_spec(self.library) is not None
        except ModuleNotFoundError:  # its parent package is missing
            found = False
        return None if found else f"{self.library} is not installed"

    def prepare(self, case: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The call to time; raises `Unsupported` where the peer cannot express the case."""
        module, _, function = self.adapter.partition(":")
        call: Call = getattr(importlib.import_module(f"{__name__}.{module}"), function)(case, args, kwargs)
        return call


PEERS = (
    Peer("naive", "naive:prepare"),
    Peer("sdpa-flash", "sdpa:flash", gradients=True),
    Peer("sdpa-cudnn", "sdpa:cudnn", cuda=True, gradients=True),
    Peer("sdpa-efficient", "sdpa:efficient", cuda=True, gradients=True),
    Peer("sdpa-math", "sdpa:math"),
    # FA4 alone also makes a package called flash_attn, so flash-attn is recognised by its own module.
    Peer("flash-attn", "flash_attn:prepare", library="flash_attn.flash_attn_interface", cuda=True, gradients=True),
    Peer("fa4", "fa4:prepare", library="flash_attn.cute", cuda=True, gradients=True),
    Peer("flex", "flex:prepare", library="triton", cuda=True, slow=True, gradients=True),
    Peer("flashinfer", "flashinfer:prepare", library="flashinfer", cuda=True, slow=True),
    Peer("cudnn-dense", "dense_decode:prepare", cuda=True, op="decode"),
    Peer("torch-moe", "torch_moe:prepare", op="moe"),
    Peer("triton-kernels", "triton_kernels:prepare", library="triton_kernels", cuda=True, op="moe"),
    Peer("eager", "torch_fused:prepare", op="fused"),  # torch; one of ours has that name
    Peer("compile", "torch_fused:compiled", library="triton", cuda=True, op="fused"),
    Peer("liger", "liger:prepare", library="liger_kernel", cuda=True, op="fused"),
)


def choose(names: str, op: str = "attention") -> tuple[Peer, ...]:
    """Peers of an op by a comma-separated list, or "all", "none", or "fast": those that do not compile for minutes.

    >>> [peer.name for peer in choose("flex,naive")]
    ['naive', 'flex']
    """
    if names == "none":
        return ()
    theirs = [peer for peer in PEERS if peer.op == op or (op == "attention_backward" and peer.gradients)]
    if names in ("all", "fast"):
        return tuple(peer for peer in theirs if names == "all" or not peer.slow)
    wanted = [name.strip() for name in names.split(",")]
    known = [peer.name for peer in theirs]
    for name in wanted:
        if name not in known:
            raise ValueError(f"peers={name!r} is not one of 'all', 'fast', 'none', {', '.join(map(repr, known))}")
    return tuple(peer for peer in PEERS if peer.name in wanted)


def require(possible: bool, reason: str) -> None:
    """Raises `Unsupported(reason)` unless possible."""
    if not possible:
        raise Unsupported(reason)
