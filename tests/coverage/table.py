"""Writes docs/measurements/coverage.md, the results of the suite as a table."""

from __future__ import annotations

import json
import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from tests.coverage.case import Case
from tests.coverage.cases import CASES, FAMILIES
from tests.coverage.stages import (
    FAILED,
    INTERPRETED,
    NOT_RUN,
    PASSED,
    REFUSED,
    SKIPPED,
    STAGES,
    Outcome,
)
from tests.house.source import ROOT

TABLE = ROOT / "docs" / "measurements" / "coverage.md"
TORCH_SAMPLES = ROOT / "benchmarks" / "results" / "torch_samples.json"
"""File with torch's version, the number of passed cases of each test, and the failed cases."""
_MARKS = {
    PASSED: "yes",
    FAILED: "**no**",
    REFUSED: "refused",
    SKIPPED: "",
    INTERPRETED: "interpreted",
    NOT_RUN: NOT_RUN,
}
_BESIDE = "bfloat16"
"""A stage that is counted separately."""
_MEANINGS = {
    "captured": (
        "`trainload.freeze` captured it, replayed the capture against eager on two batch sizes, and"
        " derived and proved the joint graph"
    ),
    "loss, gradients": (
        "on {compared} rows, the package's step graph has eager's loss and weight, gradients and"
        " buffers"
    ),
    "dynamic batch": "the same on {again} rows",
    "compiled": (
        'two steps were trained compiled; "interpreted": a graph cannot be compiled, or differs'
        " when compiled, and the run interprets it"
    ),
    "bfloat16": (
        "under autocast to bfloat16 the same job has eager's loss and gradients; empty: eager has"
        " no such operator"
    ),
    "saved": "the package was written, and its graph read back",
    "loaded": (
        "an environment with only the wheel and its dependencies opened it: without the case's"
        " source, transformers or timm"
    ),
    "joint": "the joint graph derived again there has eager's loss, gradients and buffers",
    "two workers": (
        "two gloo processes that share {shared} rows have the loss and gradients of one worker"
        " (twice the tolerance)"
    ),
}
"""Columns of the table of stages: the meaning of `passed`."""
_HEAD = """# Coverage

Which models can be frozen, and does the package compute what eager PyTorch computes?
`make coverage-suite` writes this page and `benchmarks/results/coverage.json` from the cases in
`tests/coverage/`; a full run takes some hours on two cores.

A case is a model with seeded random weights and a loss. Each stage starts if the stage before it
passed:

| stage | passed means |
|---|---|
{meanings}

Eager is a plain training step of the case's own code: `loss.backward()`, no part of trainload.
Differences are relative L2 distances: at most {full:g} in float32, {low:g} where something computes
in 16 bits, {autocast:g} in the column bfloat16. A larger difference is accepted there if the
distance from eager in float32 is at most {further:g} times that of eager under autocast. Gradients
below {noise:g} of the norm of all gradients are compared with that part of it.

trainload's random numbers are a function of (seed, step, site, element), so the eager step runs
with its random kernels (`bernoulli_`, `rand_like`, ...) replaced by ones that draw these numbers:
dropout stays on, and everything around a draw is torch's own code. If rows depend on one another
(batch statistics, in-batch negatives), two workers compute the mean over two halves, as in any data
parallel training; the reference is then one worker on both halves.

"refused" is an outcome too: the freeze rejects a model of which a graph would train something else.
Below the tables each refusal has its message and the reason why no sound capture exists. **no** is
a gap or a fault: the model should be captured and is not (yet).
"""


def ought(case: Case) -> str:
    """Return the expected result of a case."""
    return REFUSED if case.refused else PASSED


def became(found: Mapping[str, Any]) -> str:
    """Return the result of a case: passed, refused by the freeze, or failed."""
    states = [found["stages"][name]["state"] for name in STAGES if name != _BESIDE]
    if REFUSED in states:
        return REFUSED
    return FAILED if FAILED in states or states[0] != PASSED else PASSED


def bad(case: Case, found: Mapping[str, Any]) -> bool:
    """Return whether a case lacks the expected result. A known gap need not pass."""
    return became(found) != ought(case) and not is_gap(case, found)


def is_gap(case: Case, found: Mapping[str, Any]) -> bool:
    """Return whether a case does not pass because it is known not to be captured yet.

    A case with wrong gradients is not a gap.
    """
    return bool(case.gap) and became(found) != PASSED and not wrong_gradients(found)


def wrong_gradients(found: Mapping[str, Any]) -> bool:
    """Return whether a package was written whose training differs from eager."""
    return any(
        found["stages"][name]["state"] == FAILED for name in ("loss", "gradients", "dynamic batch")
    ) or (
        found["stages"]["joint"]["state"] == FAILED and found["stages"]["saved"]["state"] == PASSED
    )


def versions() -> dict[str, str]:
    """Return the versions that the results depend on, in addition to the code."""
    found = {"python": platform.python_version(), "cores": str(len(os.sched_getaffinity(0)))}
    for name in ("torch", "transformers", "timm"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def write_table(results: Mapping[str, Outcome], used: Mapping[str, str]) -> None:
    """Write docs/measurements/coverage.md. `used` are the `versions` of the results."""
    from tests.coverage import stages

    meanings = "\n".join(f"| {stage} | {meaning} |" for stage, meaning in _MEANINGS.items())
    head = _HEAD.replace("{meanings}", meanings).format(
        compared=stages.ROWS_COMPARED,
        again=stages.ROWS_AGAIN,
        shared=stages.ROWS_SHARED,
        full=stages.FULL,
        low=stages.LOW,
        autocast=stages.AUTOCAST,
        further=stages.FURTHER,
        noise=stages.NOISE,
    )
    parts = [head, _summary(results, used), _torch_samples()]
    for module in FAMILIES:
        parts.append(_family(module.FAMILY.name, module.FAMILY.cases, results))
    parts.append(_refusals(results))
    parts.append(_gaps(results))
    parts.append(_failures(results))
    parts.append(
        _of_stage(results, "compiled", (INTERPRETED,), "Interpreted where they would be compiled")
    )
    parts.append(_of_stage(results, _BESIDE, (FAILED, REFUSED), "Not in bfloat16"))
    TABLE.write_text("\n".join(parts).rstrip() + "\n")


def _summary(results: Mapping[str, Outcome], used: Mapping[str, str]) -> str:
    told = ", ".join(f"{name} {value}" for name, value in used.items() if name not in ("cores",))
    commits = Counter(
        found.get("commit", "before commits were recorded") for found in results.values()
    )
    when = ", ".join(f"{commit}: {count}" for commit, count in commits.items())
    lines = [
        f"## Summary\n\n{told}. Cases by the commit at which each was run last: {when}.\n",
        (
            "| family | cases | captured and right | refused, as it must be | known gaps | failing"
            " | wrong gradients | not run | compiled | interpreted | right in bfloat16 | not in"
            " bfloat16 |"
        ),
    ]
    lines.append(f"|---|{'---:|' * 11}")
    total = [0] * 11
    for module in FAMILIES:
        found = [(case, results[case.name]) for case in module.FAMILY.cases if case.name in results]
        counts = [
            len(module.FAMILY.cases),
            sum(became(r) == PASSED and not case.refused for case, r in found),
            sum(became(r) == REFUSED and bool(case.refused) for case, r in found),
            sum(is_gap(case, r) for case, r in found),
            sum(bad(case, r) for case, r in found),
            sum(wrong_gradients(r) for _, r in found),
            len(module.FAMILY.cases) - len(found),
            sum(r["stages"]["compiled"]["state"] == PASSED for _, r in found),
            sum(r["stages"]["compiled"]["state"] == INTERPRETED for _, r in found),
            sum(r["stages"][_BESIDE]["state"] == PASSED for _, r in found),
            sum(r["stages"][_BESIDE]["state"] in (FAILED, REFUSED) for _, r in found),
        ]
        total = [a + b for a, b in zip(total, counts, strict=True)]
        lines.append(f"| {module.FAMILY.name} | " + " | ".join(map(str, counts)) + " |")
    return "\n".join([*lines, "| all | " + " | ".join(map(str, total)) + " |", ""])


def _torch_samples() -> str:
    """Return the results on torch's own databases, as written by `tests/torch_samples`."""
    found = json.loads(TORCH_SAMPLES.read_text())
    counts = found["passed"]
    finite, nan = (
        counts["test_four_updates_of_a_module_are_those_of_eager"],
        counts["test_what_is_no_number_in_eager_ends_a_run"],
    )
    lazy, options = (
        counts["test_a_lazy_module_is_refused"],
        counts["test_four_updates_are_those_of_eager"],
    )
    failed = ", ".join(found["failed"]) or "none"
    return (
        "## torch's own databases\n\n"
        "`torch.testing._internal` holds modules with inputs, and optimizers with sets of"
        " options, by which torch tests itself. Each is frozen and launched, and four updates"
        " are compared with eager: losses, parameters and buffers (`tests/torch_samples`).\n\n"
        f"| torch {found['torch']} | cases | as in eager | refused |\n"
        "|---|---:|---:|---:|\n"
        f"| modules, the first three samples of each | {finite + nan + lazy} | {finite + nan},"
        f" of which {nan} are no numbers in eager | {lazy}, of lazy modules |\n"
        "| optimizers that need neither a closure nor sparse gradients, every set of options |"
        f" {options} | {options} | 0 |\n\n"
        f"Failing: {failed}.\n"
    )


def _family(name: str, cases: list[Case], results: Mapping[str, Outcome]) -> str:
    lines = [
        f"## {name[0].upper()}{name[1:]}\n",
        f"| case | {' | '.join(STAGES)} | seconds |",
        f"|---|{'---|' * len(STAGES)}---:|",
    ]
    for case in cases:
        found = results.get(case.name)
        if found is None:
            lines.append(f"| {case.name} |{' not run |' * len(STAGES)} |")
            continue
        marks = [_MARKS[found["stages"][stage]["state"]] for stage in STAGES]
        seconds = sum(found["stages"][stage].get("seconds", 0.0) for stage in STAGES)
        lines.append(f"| {case.name} | {' | '.join(marks)} | {seconds:.1f} |")
    return "\n".join([*lines, ""])


def _refusals(results: Mapping[str, Outcome]) -> str:
    lines = [
        "## Refusals, as they must be\n",
        "| case | why no sound capture exists | message |",
        "|---|---|---|",
    ]
    for case in CASES:
        found = results.get(case.name)
        if case.refused and found is not None and became(found) == REFUSED:
            lines.append(f"| {case.family}: {case.name} | {case.refused} | {_message(found)} |")
    return "\n".join([*lines, ""])


def _gaps(results: Mapping[str, Outcome]) -> str:
    lines = [
        "## Known gaps\n",
        "Not captured so far, though a sound capture exists.\n",
        "| case | why | message |",
        "|---|---|---|",
    ]
    for case in CASES:
        found = results.get(case.name)
        if found is not None and is_gap(case, found):
            lines.append(f"| {case.family}: {case.name} | {case.gap} | {_message(found)} |")
    return "\n".join([*lines, ""])


def _failures(results: Mapping[str, Outcome]) -> str:
    lines = [
        "## Unexpected results\n",
        "| case | expected | stage | message |",
        "|---|---|---|---|",
    ]
    for case in CASES:
        found = results.get(case.name)
        if found is not None and bad(case, found):
            stage = next(
                (s for s in STAGES if found["stages"][s]["state"] in (FAILED, REFUSED)), "all"
            )
            expected = "refused" if case.refused else "captured"
            message = _message(found) or f"captured, though {case.refused}"
            lines.append(f"| {case.family}: {case.name} | {expected} | {stage} | {message} |")
    return "\n".join([*lines, ""])


def _of_stage(results: Mapping[str, Outcome], stage: str, states: Sequence[str], title: str) -> str:
    lines = [f"## {title}\n", "| case | message |", "|---|---|"]
    for case in CASES:
        found = results.get(case.name)
        if found is not None and found["stages"][stage]["state"] in states:
            lines.append(
                f"| {case.family}: {case.name} | {_in_a_line(found['stages'][stage]['error'])} |"
            )
    return "\n".join([*lines, ""])


def _message(found: Mapping[str, Any]) -> str:
    stages = [s for s in STAGES if s != _BESIDE]
    return _in_a_line(
        next(
            (
                found["stages"][s]["error"]
                for s in stages
                if found["stages"][s]["state"] in (FAILED, REFUSED)
            ),
            "",
        )
    )


def _in_a_line(text: str) -> str:
    """Return a message as a code span: its brackets and stars are no Markdown."""
    text = " ".join(text.split()).replace("|", "\\|").replace("`", "'")[:420]
    return f"`{text}`" if text else ""
