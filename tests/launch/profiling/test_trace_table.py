"""Table of the operators of a trace."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from trainload.launching.profiling.step_trace import StepTrace, span
from trainload.launching.profiling.trace_table import operators_of


def event(name: str, begin: float, took: float, cat: str = "cpu_op", tid: int = 1) -> Any:
    return {"name": name, "ts": begin, "dur": took, "cat": cat, "pid": 1, "tid": tid, "ph": "X"}


def written(path: Path, *events: Any) -> Path:
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    return path


def test_time_is_counted_once(tmp_path: Path) -> None:
    trace = written(
        tmp_path / "trace.json.gz",
        event("step 4", 0, 100, "user_annotation"),
        event("outer", 10, 50),
        event("inner", 20, 30),
        event("outer", 70, 20),
        event("step 5", 100, 40, "user_annotation"),
        event("inner", 30, 90, tid=2),
        event("a thread's name", 0, 500, "other"),
    )
    found = {each.name: each for each in operators_of(trace, 2, is_gpu=False)}
    assert {name: each.seconds for name, each in found.items()} == pytest.approx(
        {"inner": 60e-6, "step": 35e-6, "outer": 20e-6}
    )
    assert {name: each.calls for name, each in found.items()} == {
        "inner": 1,
        "step": 1,
        "outer": 1,
    }


def test_the_kernels_of_a_gpu_are_listed_alone(tmp_path: Path) -> None:
    trace = written(
        tmp_path / "trace.json.gz",
        event("aten::mm", 0, 100),
        event("gemm", 50, 30, "kernel", tid=7),
        event("gemm", 90, 30, "kernel", tid=7),
    )
    (kernel,) = operators_of(trace, 1, is_gpu=True)
    assert (kernel.name, kernel.calls) == ("gemm", 2)
    assert kernel.seconds == pytest.approx(60e-6)


def test_it_reads_the_traces_of_torch(tmp_path: Path) -> None:
    trace, value = StepTrace(torch.device("cpu"), 3, 7), torch.randn(200, 200)
    trace.start()
    for step in (7, 8):
        with span(f"step {step}"):
            value = value @ value
    trace.stop()
    trace.export(tmp_path / "trace.json.gz")
    found = {each.name: each for each in operators_of(tmp_path / "trace.json.gz", 2, is_gpu=False)}
    assert found["aten::mm"].calls == 1
    assert found["aten::mm"].seconds > 0
    assert found["step"].calls == 1
    content = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))
    assert (content["rank"], content["step"]) == (3, 7)
    assert content["host"]
