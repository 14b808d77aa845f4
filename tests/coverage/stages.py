"""Runs a case through all stages."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tests.coverage.case import Case
from tests.coverage.eager import ROW, SEED, STEP, Step, eager_step, is_static, resized
from tests.coverage.elsewhere import Values, one_worker
from tests.laws.isolated import Environment
from torch import Tensor
from torch.fx import GraphModule

import trainload
from trainload.autograd_trace.graphs import StepGraph
from trainload.capture.job.definition import Job
from trainload.capture.job.inputs import leaves_of
from trainload.capture.job.leading_rows import arranged
from trainload.core.errors import DataError, RequestError
from trainload.launching.run.journal import read_events
from trainload.packaging.derived import read_derived
from trainload.packaging.package import Package, open_package
from trainload.sharding.plans.device_step_graphs import derived_key

STAGES = (
    "captured",
    "loss",
    "gradients",
    "dynamic batch",
    "compiled",
    "bfloat16",
    "saved",
    "loaded",
    "joint",
    "two workers",
)
PASSED, FAILED, REFUSED, SKIPPED = "passed", "failed", "refused", "skipped"
NOT_RUN = "not run"
INTERPRETED = "interpreted"
"""State of the stage "compiled" if the run interpreted a graph.

The graph could not be compiled, or its results differed.
"""
ROWS_COMPARED, ROWS_AGAIN, ROWS_SHARED = 11, 13, 6
"""Numbers of rows of the comparison with eager, of a second one, and of the two-worker step.

The first two are primes, see `StatelessDraws`.
"""
FULL, LOW, AUTOCAST = 3e-5, 5e-3, 2e-2
"""Maximum relative L2 difference of a loss or gradient.

The values are for computations in float32, with parts in 16 bits, and under autocast to bfloat16,
which computes almost everything in 16 bits (rounding errors are up to 0.004).
"""
FURTHER = 1.5
"""Maximum ratio of our distance from eager in float32 to that of eager under autocast.

A difference above the tolerance is accepted if the ratio is at most this.
"""
NOISE = 1e-2
"""Lower bound of a gradient's norm in comparisons, as a fraction of the norm of all gradients.

Some gradients are zero up to rounding errors (a bias before a norm).
"""
ELSEWHERE = Path(__file__).with_name("elsewhere.py")
Outcome = dict[str, Any]


def run_case(case: Case, folder: Path, environment: Environment) -> Outcome:
    """Run every stage.

    Args:
        case: the case.
        folder: a new folder for it.
        environment: where the package is opened without the case's source.

    Returns:
        {"stages": {stage: {"state", "seconds", "error"}}, ...}: plain data.
    """
    stages, extra = before_elsewhere(case, folder)
    if "two_rows" in extra:
        try:
            environment.run(ELSEWHERE.read_text(), folder.parent, folder)
        except AssertionError as error:  # the process died
            (folder / "answer.json").write_text(
                json.dumps(
                    {"loaded": {"error": f"the process died: {str(error)[-300:]}", "seconds": 0.0}}
                )
            )
        after_elsewhere(case, folder, stages, extra)
    return outcome(stages, extra)


def outcome(stages: Mapping[str, Outcome], extra: Mapping[str, Any]) -> Outcome:
    """Return the record of a case, including stages that were not reached.

    It contains no paths of this machine.
    """
    left = {"state": SKIPPED, "seconds": 0.0, "error": ""}
    named = {name: dict(stages.get(name, left)) for name in STAGES}
    return {
        **extra,
        "stages": {
            n: {**e, "seconds": round(e["seconds"], 2), "error": without_folders(e["error"])}
            for n, e in named.items()
        },
    }


def with_every_stage(found: Outcome) -> Outcome:
    """Return the record of a case, including stages that did not exist when it was run."""
    lacking: Outcome = {"state": NOT_RUN, "seconds": 0.0, "error": ""}
    return {**found, "stages": {name: found["stages"].get(name, lacking) for name in STAGES}}


def lacks_a_stage(found: Outcome) -> bool:
    """Return whether the record of a case lacks the result of a stage."""
    return any(stage["state"] == NOT_RUN for stage in found["stages"].values())


def without_folders(text: str) -> str:
    """Shorten the paths in a message to start in the repository or in site-packages."""
    return re.sub(
        r"[^\s\"'`]*/(?:site-packages|tests(?=/coverage/)|src(?=/trainload/))/", _shortened, text
    )


def _shortened(found: re.Match[str]) -> str:
    folder = found[0].rstrip("/").rpartition("/")[2]
    return "" if folder == "site-packages" else f"{folder}/"


def before_elsewhere(case: Case, folder: Path) -> tuple[dict[str, Outcome], dict[str, Any]]:
    """Run the stages that have access to the case's source.

    The other stages can follow if the second result contains "two_rows".
    """
    stages: dict[str, Outcome] = {}
    folder.mkdir()
    start = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            job = arranged(case.job())
            made = time.perf_counter() - start
            trainload.freeze(job, folder / "case.tl")
            package = open_package(folder / "case.tl")
    except RequestError as error:
        stage = stage_of(error.__traceback__)
        if stage != "captured":
            stages["captured"] = {"state": PASSED, "seconds": 0.0, "error": ""}
        state = REFUSED if stage == "captured" else FAILED
        stages[stage] = {
            "state": state,
            "seconds": time.perf_counter() - start,
            "error": str(error),
        }
        return stages, {}
    except Exception as error:  # noqa: BLE001 - whatever a freeze raises is what the table tells
        stage = stage_of(error.__traceback__)
        if stage != "captured":
            stages["captured"] = {"state": PASSED, "seconds": 0.0, "error": ""}
        text = f"{type(error).__name__}: {error}"
        stages[stage] = {"state": FAILED, "seconds": time.perf_counter() - start, "error": text}
        return stages, {}
    stages["captured"] = {
        "state": PASSED,
        "seconds": time.perf_counter() - start - made,
        "error": "",
    }
    stages["saved"] = {"state": PASSED, "seconds": 0.0, "error": ""}
    step = read_derived(package, derived_key("train", torch.device("cpu")))
    assert step is not None
    tolerance = LOW if computes_low(step.module) else FULL
    batch = {name: leaf.detach().contiguous() for name, leaf in leaves_of(job.batch).items()}
    static = is_static(job)
    rows = next(iter(batch.values())).shape[0] if static else ROWS_COMPARED
    expected = compare(case, package, step, batch, rows, tolerance, stages, ("loss", "gradients"))
    if expected is None:
        return stages, {}
    if static:
        stages["dynamic batch"] = {
            "state": SKIPPED,
            "seconds": 0.0,
            "error": "the case fixes its number of rows",
        }
    else:
        compare(case, package, step, batch, ROWS_AGAIN, tolerance, stages, ("dynamic batch",))
    stages["compiled"] = compiled(package, batch, rows, folder)
    stages["bfloat16"] = in_bfloat16(case, folder, rows, values_of(expected))
    request = {
        "rows": rows,
        "two_rows": 0 if static else ROWS_SHARED,
        "seed": SEED,
        "step": STEP,
        "tolerance": tolerance * 2,
        "scale": 1.0 / expected.weight,
    }
    (folder / "request.json").write_text(json.dumps({**request, "mixes_rows": case.mixes_rows}))
    save_file(batch, folder / "batch.safetensors")
    save_file(
        {name: value.contiguous() for name, value in values_of(expected).items()},
        folder / "eager.safetensors",
    )
    return stages, {
        "two_rows": request["two_rows"],
        "tolerance": tolerance,
        "random": expected.random,
    }


def after_elsewhere(
    case: Case, folder: Path, stages: dict[str, Outcome], extra: dict[str, Any]
) -> None:
    """Read the results of the other process, and compare its joint graph's values with eager's."""
    answer = json.loads((folder / "answer.json").read_text())
    for name in ("loaded", "joint", "two workers"):
        if name in answer:
            entry = answer[name]
            stages[name] = {"state": FAILED if entry["error"] else PASSED, **entry}
    if answer.get("foreign"):
        stages["loaded"] = {
            "state": FAILED,
            "seconds": 0.0,
            "error": f"the process could import {', '.join(answer['foreign'])}",
        }
    if stages.get("joint", {}).get("state") == PASSED:
        eager = load_file(folder / "eager.safetensors")
        problem = difference(eager, load_file(folder / "joint.safetensors"), extra["tolerance"])
        if problem:
            stages["joint"] |= {"state": FAILED, "error": problem}
    if "two_workers_apart" in answer:
        extra["two_workers_apart"] = answer["two_workers_apart"]
    if not extra["two_rows"]:
        stages["two workers"] = {
            "state": SKIPPED,
            "seconds": 0.0,
            "error": "the case fixes its number of rows",
        }


def compiled(package: Package, batch: Mapping[str, Tensor], rows: int, folder: Path) -> Outcome:
    """Train a package, compiled, for two steps of `rows` rows.

    The run compares each graph with the interpreted one.
    """
    start = time.perf_counter()
    save_file(resized(batch, rows), folder / "rows.safetensors")
    run_dir = folder / "compiled"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plan = trainload.plan(package, trainload.Cluster(), "single", global_batch=rows)
            # a cache for this case's process only
            os.environ["TRAINLOAD_CACHE_DIR"] = str(folder / "cache")
            trainload.launch(
                package,
                plan,
                folder / "rows.safetensors",
                run_dir=run_dir,
                backend="local",
                steps=2,
            )
    except DataError as error:  # data files cannot hold tensors of this dtype
        return {"state": SKIPPED, "seconds": time.perf_counter() - start, "error": str(error)}
    except Exception as error:  # noqa: BLE001 - whatever it raises is what the table tells
        return {
            "state": FAILED,
            "seconds": time.perf_counter() - start,
            "error": f"{type(error).__name__}: {error}",
        }
    finally:
        shutil.rmtree(folder / "cache", ignore_errors=True)
    told = [
        str(event.data["message"])
        for event in read_events(run_dir)
        if event.kind == "warning" and event.data.get("interpreted")
    ]
    return {
        "state": INTERPRETED if told else PASSED,
        "seconds": time.perf_counter() - start,
        "error": "; ".join(told),
    }


def in_bfloat16(case: Case, folder: Path, rows: int, precise: Mapping[str, Tensor]) -> Outcome:
    """Freeze the job under autocast to bfloat16, and compare it with eager under autocast.

    `precise`: as in `compare`.
    """
    start = time.perf_counter()
    lower = replace(case, build=lambda: under_autocast(case.build()))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            eager_step(lower, rows)
    except Exception as error:  # noqa: BLE001 - eager has no such operator in bfloat16
        return {
            "state": SKIPPED,
            "seconds": time.perf_counter() - start,
            "error": f"eager: {type(error).__name__}: {error}",
        }
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            job = arranged(lower.job())
            package = trainload.freeze(job, folder / "lower.tl")
    except Exception as error:  # noqa: BLE001 - as above
        state = REFUSED if isinstance(error, RequestError) else FAILED
        return {
            "state": state,
            "seconds": time.perf_counter() - start,
            "error": f"{type(error).__name__}: {error}",
        }
    step = read_derived(package, derived_key("train", torch.device("cpu")))
    assert step is not None
    found: dict[str, Outcome] = {}
    batch = {name: leaf.detach().contiguous() for name, leaf in leaves_of(job.batch).items()}
    compare(lower, package, step, batch, rows, AUTOCAST, found, ("bfloat16",), precise)
    return found["bfloat16"] | {"seconds": time.perf_counter() - start}


def under_autocast(job: Job) -> Job:
    """Return the job with its loss, and the model's call in it, under autocast to bfloat16."""

    def loss(model: torch.nn.Module, batch: Mapping[str, Any]) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return model(**batch) if job.loss is None else job.loss(model, dict(batch))

    return replace(job, loss=loss)


def compare(
    case: Case,
    package: Package,
    step: StepGraph,
    batch: Mapping[str, Tensor],
    rows: int,
    tolerance: float,
    stages: dict[str, Outcome],
    names: Sequence[str],
    precise: Mapping[str, Tensor] = MappingProxyType({}),
) -> Step | None:
    """Compare the package's step graph with eager on `rows` rows.

    With one name, the whole comparison is one stage. `precise` holds eager's values in a higher
    precision than that of the case, if known. Returns None if eager or the graph could not be run.
    """
    start = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns when it compiles cond in eager
            expected = eager_step(case, rows)
        # the gradient of the mean, rounded like eager's
        request = {"seed": SEED, "step": STEP, "scale": 1.0 / expected.weight}
        found = one_worker(package, step, resized(batch, rows), request, ROW)
    except Exception as error:  # noqa: BLE001 - whatever it raises is what the table tells
        stages[names[0]] = {
            "state": FAILED,
            "seconds": 0.0,
            "error": f"{type(error).__name__}: {error}",
        }
        return None
    wanted = values_of(expected)
    parts = (
        [("loss/", "weight/"), ("gradient/", "buffer/")]
        if len(names) == 2
        else [("loss/", "weight/", "gradient/", "buffer/")]
    )
    for name, prefixes in zip(names, parts, strict=True):
        kept = {n: v for n, v in wanted.items() if n.startswith(prefixes)}
        problem = difference(kept, found, tolerance, precise)
        seconds = time.perf_counter() - start
        stages[name] = {
            "state": FAILED if problem else PASSED,
            "seconds": seconds,
            "error": problem,
        }
        start = time.perf_counter()
    return expected


def values_of(step: Step) -> dict[str, Tensor]:
    """Return the results of a step, named like those of a step graph."""
    named = {f"gradient/{n}": g for n, g in step.gradients.items()} | {
        f"buffer/{n}": b for n, b in step.buffers.items()
    }
    return {"loss/loss": step.loss, "weight/weight": torch.tensor(step.weight), **named}


def difference(
    eager: Mapping[str, Tensor],
    graph: Values,
    tolerance: float,
    precise: Mapping[str, Tensor] = MappingProxyType({}),
) -> str:
    """Describe the largest difference; "" if there is none. `precise`: as in `compare`."""
    squares = [float(v.double().norm()) ** 2 for n, v in eager.items() if n.startswith("gradient/")]
    total = sum(squares) ** 0.5
    worst, where = 0.0, ""
    for name, expected in eager.items():
        got = graph.get(name)
        if got is None:
            apart = (
                0.0
                if name.startswith("buffer/") or not bool((expected != 0).any())
                else float("inf")
            )
        else:
            floor = NOISE * total if name.startswith("gradient/") else 1e-30
            apart = _apart(expected, got, floor)
            if apart > tolerance and name in precise:
                own = _apart(precise[name], expected, floor)
                apart = (
                    0.0
                    if _apart(precise[name], got, floor) <= FURTHER * own < float("inf")
                    else apart
                )
        if not apart <= max(worst, tolerance):
            worst, where = apart, name
    extra = [
        n
        for n, v in graph.items()
        if n.startswith("gradient/") and n not in eager and bool((v != 0).any())
    ]
    if any(n.startswith("gradient/") for n in eager) and extra:
        return (
            f"the graph has a gradient for {extra[0].partition('/')[2]}, which gets none in eager"
        )
    if not where:
        return ""
    return (
        f"the step graph's {where.replace('/', ' ')} differs from eager's by {worst:.2g} of its"
        f" size (at most {tolerance:g})"
    )


def _apart(expected: Tensor, got: Tensor, floor: float) -> float:
    if expected.shape != got.shape:
        return float("inf")
    wide = torch.complex128 if expected.is_complex() else torch.float64
    a, b = expected.to(wide), got.to(wide)
    if torch.equal(a, b):
        return 0.0
    apart = float((a - b).norm()) / max(float(a.norm()), floor, 1e-30)
    return apart if apart == apart else float("inf")


def computes_low(module: GraphModule) -> bool:
    """Return whether a graph computes anything in 16 bits."""
    values = (node.meta.get("val") for node in module.graph.nodes)
    return any(isinstance(v, Tensor) and v.dtype in (torch.float16, torch.bfloat16) for v in values)


def stage_of(trace: TracebackType | None) -> str:
    """Return the stage in which a freeze failed."""
    stages = {
        "capture": "captured",
        "derive": "joint",
        "check_step": "joint",
        "capture_optimizer": "saved",
    }
    stages |= {"write_package": "saved", "write_derived": "saved", "open_package": "saved"}
    for frame in traceback.extract_tb(trace):
        if "/trainload/" in frame.filename and frame.name in stages:
            return stages[frame.name]
    return "captured"
