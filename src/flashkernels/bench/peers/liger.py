"""Liger's kernels for training. Some write into their input: they get a copy, made off the clock."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

from flashkernels.bench.peers import Unsupported
from flashkernels.bench.timing import Call
from flashkernels.fused.cases import Case

# "gemma" computes in fp32 and rounds once, as we do; gradients must not be written over those that come in
ROUNDED_ONCE = (1e-6, 0.0, "gemma", False)  # eps, offset, casting mode, in place


def prepare(case: Case, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    if case.op == "rms_norm":
        x, weight, *residual = args
        name = "liger_fused_add_rms_norm" if residual else "liger_rms_norm"
        return Call(partial(_function(name), x, *residual, weight, *ROUNDED_ONCE))
    if case.op == "layer_norm":
        return Call(partial(_function("liger_layer_norm"), *args, 1e-5))
    if case.op == "rope":
        return _rope(*args)
    if case.op == "swiglu":
        gate, up = (half.contiguous() for half in args[0].chunk(2, -1))
        return Call(partial(_function("liger_swiglu"), gate, up))
    if case.op == "softmax":
        return Call(partial(_function("liger_softmax"), *args))
    if case.op == "cross_entropy":
        return Call(partial(_function("liger_cross_entropy"), *args))
    if case.op == "linear_cross_entropy":
        return Call(partial(_function("liger_fused_linear_cross_entropy"), *args))
    raise Unsupported(f"has no {case.op}")


def _rope(q: Any, k: Any, cos: Any, sin: Any) -> Call:
    turn = _function("liger_rope")
    heads_first = [x.clone().transpose(1, 2) for x in (q, k)]
    tables = [table.repeat(1, 2)[None].to(q.dtype) for table in (cos, sin)]

    def run() -> tuple[Any, ...]:
        return tuple(x.transpose(1, 2) for x in turn(*heads_first, *tables)[:2])

    return Call(run)


def _function(name: str) -> Any:
    module = importlib.import_module("liger_kernel.transformers.functional")
    if not hasattr(module, name):
        raise Unsupported(f"this version has no {name}")
    return getattr(module, name)
