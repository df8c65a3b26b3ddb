"""Profiles of a real GPU: kernels with their ops and costs, graphs, waits with their lines."""

from __future__ import annotations

import inspect
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flashkernels as fk
from flashkernels.attention.problem import AttentionProblem

pytestmark = pytest.mark.gpu


def test_attention_is_joined_with_the_work_of_its_problem() -> None:
    q = torch.randn(4, 4096, 16, 128, device="cuda", dtype=torch.bfloat16)
    fk.attention(q, q, q, causal=True)
    with fk.profile() as session:
        for _ in range(5):
            fk.attention(q, q, q, causal=True)
    rows = [row for row in session.profile.rows if row.op == "flashkernels::attention"]
    problem = AttentionProblem(batch=4, seq_q=4096, seq_k=4096, heads=16, kv_heads=16, head_dim=128, causal=True)
    assert sum(row.cost.flops for row in rows if row.cost) == pytest.approx(5 * problem.flops())
    assert rows[0].bound == "compute" and rows[0].compute is not None and 0.3 < rows[0].compute <= 1.05


def test_a_product_is_joined_with_its_work() -> None:
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    x @ x
    with fk.profile() as session:
        for _ in range(10):
            x @ x
    row = session.profile.rows[0]
    assert row.op == "aten::mm" and row.count == 10 and row.bound == "compute"
    assert session.profile.latency.busy is not None and session.profile.latency.busy > 0.5


def test_nodes_of_a_graph_are_told_apart() -> None:
    x, graph = torch.randn(512, 512, device="cuda", dtype=torch.bfloat16), torch.cuda.CUDAGraph()
    (x @ x).relu()
    torch.cuda.synchronize()
    with fk.profile() as session:
        with torch.cuda.graph(graph):
            (x @ x).relu()
        for _ in range(3):
            graph.replay()
    rows = [row for row in session.profile.rows if row.graph]
    assert {row.op for row in rows} >= {"aten::mm"} and any("relu" in row.op or "clamp" in row.op for row in rows)
    (product,) = [row for row in rows if row.op == "aten::mm"]
    assert product.cost is not None and product.cost.flops == pytest.approx(3 * 2 * 512**3)


def test_a_wait_in_a_loop_is_found_with_its_line() -> None:
    x = torch.randn(1024, 1024, device="cuda")
    x @ x
    with fk.profile() as session:
        for _ in range(20):
            line = inspect.currentframe().f_lineno + 1
            (x @ x).sum().item()
    (finding,) = [finding for finding in session.profile.findings if finding.rule == "sync-in-loop"]
    assert f"test_gpu.py:{line}" in finding.words and "20 times" in finding.words


def test_steps_end_with_the_gpu() -> None:
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    x @ x
    torch.cuda.synchronize()
    with fk.profile() as session, session.step("prefill", items=8192):
        x @ x
    (steps,) = session.profile.latency.steps
    assert steps.times[0] >= session.profile.rows[0].time


@pytest.mark.skipif(shutil.which("ncu") is None, reason="ncu is not installed")
def test_ncu_runs_and_gives_counters_or_says_how(tmp_path: Path) -> None:
    script = tmp_path / "product.py"
    script.write_text("import torch\nx = torch.randn(2048, 2048, device='cuda')\nfor _ in range(3):\n    x @ x\n")
    command = [sys.executable, "-m", "flashkernels", "ncu", "--kernel", "gemm|xmma|nvjet", "--count", "1", "--"]
    done = subprocess.run([*command, sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "DRAM %" in done.stdout or "NVreg_RestrictProfilingToAdminUsers=0" in done.stderr
