"""Kernels of the Hopper implementation, broken on purpose, on the machine of tests/machine: it finds each fault.

So that a kernel which passes there has none of these. Unbroken, the same calls pass. (The tests that GPUs run, run
there as well: tests/machine/plugin.py.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.machine.hopper import on_the_machine

import flashkernels as fk

from . import gradients, oracle
from .cases import Shape, keywords, qkv

MANY = Shape(b=1, sq=1300, sk=400, h=2, hkv=1, d=64)  # several tiles a block
TALL = Shape(b=1, sq=330, sk=330, h=2, hkv=1, d=128)
WIDE = Shape(b=1, sq=300, sk=330, h=2, hkv=1, d=264)


def forward(features: str, shape: Shape, edit: Callable[[str], str] | None = None, seed: int = 2) -> None:
    named, inputs = keywords(features, shape), qkv(shape, torch.bfloat16)
    with on_the_machine(sms=2, edit=edit, seed=seed):
        out, lse = fk.attention(*inputs, impl="hopper", return_lse=True, **named)
    oracle.assert_correct(out, lse, *inputs, **named)


def backward(features: str, shape: Shape, edit: Callable[[str], str] | None = None, seed: int = 2) -> None:
    with on_the_machine(sms=2, edit=edit, seed=seed):
        gradients.check(*qkv(shape, torch.bfloat16), impl="hopper", **keywords(features, shape))


def wide(features: str, shape: Shape, edit: Callable[[str], str] | None = None, seed: int = 2) -> None:
    """Gradients of heads over 256: of a forward that is not broken."""
    inputs, named = gradients.leaves(*qkv(shape, torch.bfloat16)), keywords(features, shape)
    with on_the_machine(sms=2):
        out = fk.attention(*inputs, impl="hopper", **named)
    with on_the_machine(sms=2, edit=edit, seed=seed):
        got = torch.autograd.grad(out, inputs, gradients.weights_like(out)[0].to(out))
    gradients.assert_same_gradients(got, *gradients.expected(inputs, with_lse=False, features=named), torch.bfloat16)


@dataclass(frozen=True)
class Fault:
    """`old` in the kernel's text, `new` in its place, and what the machine says of it."""

    name: str
    run: Callable[..., None]
    old: str
    new: str
    words: str
    features: str = "causal"


FAULTS = (
    Fault(
        "outputs sent without a fence", forward, "publish_shared();\n    __syncwarp();\n    if (lane == 0 && !again)",
        "__syncwarp();\n    if (lane == 0 && !again)", "without fence.proxy.async",
    ),
    Fault(
        "outputs overwritten while they leave", forward, "if (lane == 0) await_reads();  // of the tile before", "",
        "race.*asynchronous read",
    ),
    Fault(
        "a block that ends before its outputs have left", forward, "if (OUT_CHUNKS && lane == 0) await_reads();", "",
        "has not waited for a copy",
    ),
    Fault(
        "K loaded before it is free", forward, "mbarrier::wait(smem + K_EMPTY + 8 * k.stage, k.phase);", "",
        "more arrivals|race",
    ),
    Fault(
        "V used before it is there", forward, "await_v() { mbarrier::wait(smem + V_FULL + 8 * v.stage, v.phase); }",
        "await_v() {}", "race",
    ),
    Fault(
        "K handed back while it is read", forward, "wgmma::wait<LATE_GROUPS + 1>();\n    release_operands",
        "release_operands", "race",
    ),
    Fault("a key too many", forward, "at >= rows.end[r] - key", "at > rows.end[r] - key", "out: "),
    Fault(
        "dS used without a fence", backward, "publish_shared();\n    const u32 from = ds_rows",
        "const u32 from = ds_rows", "without fence.proxy.async",
    ),
    Fault("dS overwritten before it is read", backward, "await_empty(DS_EMPTY, done);", "", "race"),
    Fault("dS used before it is there", backward, "await(DS_FULL, n);\n", "", "race"),
    Fault(
        "dQ overwritten while it leaves", backward, "if (lane == 0) await_reads();\n      __syncwarp();\n    }", "}",
        "race.*asynchronous read",
    ),
    Fault(
        "a barrier that nobody arrives at", backward, "if (HIDES && group == 0) named_barrier::arrive(2, 256);", "",
        "all warps wait.*a named barrier 2",
    ),
    Fault(
        "K and V that come one arrival early", backward, "mbarrier::init(smem + KV_EMPTY, 8 * RELEASES)",
        "mbarrier::init(smem + KV_EMPTY, 7 * RELEASES)", "race|more arrivals",
    ),
    Fault("a key too few", backward, "at > high[r]", "at >= high[r]", "worst error|norm of the error", "window"),
    Fault(
        "W overwritten while the other warpgroup's products read it", wide,
        "named_barrier::arrive(W_FREE + 1 - share, 256);\n      named_barrier::sync(W_FREE + share, 256);", "", "race",
    ),
    Fault("W used before it is there", wide, "named_barrier::sync(EXCHANGE, 256);\n      issue", "issue", "race"),
    Fault(
        "W used without a fence", wide, "words[4 * i + 3]);\n    publish_shared();", "words[4 * i + 3]);",
        "without fence.proxy.async",
    ),
    Fault("slots handed back while they are read", wide, "wgmma::wait<RUNNING>();", "", "race|reads"),
    Fault("rows used before they are there", wide, "mbarrier::wait(smem + L::OWN_FULL, 0);", "", "race"),
    Fault("statistics of the next step too early", wide, "2 * share + (n & 1)", "2 * share", "race"),
    Fault(
        "slots that one block of a cluster hands back for both", wide, "if (lane < CLUSTER) mbarrier::arrive_in",
        "if (lane == 0) mbarrier::arrive_in", "all warps wait|more arrivals|race",
    ),
    Fault("a query too many", wide, "to > high[r] || ", "", "worst error|norm of the error|NaN", "window"),
)  # fmt: skip


SHAPES = {forward: MANY, backward: TALL, wide: WIDE}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_found(fault: Fault) -> None:
    found = []

    def edit(text: str) -> str:
        found.append(text.count(fault.old))
        return text.replace(fault.old, fault.new)

    with pytest.raises(AssertionError, match=f"(?s){fault.words}"):
        fault.run(fault.features, SHAPES[fault.run], edit)
    assert sum(found) >= 1, "the kernel has no such line any more"


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    ("run", "features"),
    [(forward, "causal"), (backward, "causal"), (backward, "window"), (wide, "causal"), (wide, "window")],
    ids=["forward", "backward", "backward-window", "wide", "wide-window"],
)
def test_unbroken_kernels_pass(run: Any, features: str, seed: int) -> None:
    """With copies that come late, at once, and in any order."""
    run(features, SHAPES[run], seed=seed)
