"""Compare the ten longest error messages of torch.export with trainload's for the same models.

    python benchmarks/errors.py

Every model of tests/capture/refused.py is passed to torch.export.export (non-strict, dynamic batch
dim) and to trainload's capture. The length for torch counts all that the user sees: traceback,
message and log. The ten longest are written to docs/measurements/errors_before_after.md, with the
first three lines of torch's message and the whole of trainload's.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
COUNT = 10
OF_A_CAUSE = 2
"""Maximum number of messages with the same cause."""


def before(case: Any) -> tuple[str, int]:
    """Return torch.export's message and the number of lines that the user sees.

    Log and traceback are counted. ("", 0) if torch.export succeeds.
    """
    import torch
    from torch.export import Dim

    printed = io.StringIO()
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(printed),
    ):
        warnings.simplefilter("ignore")
        try:
            torch.export.export(
                model_of(case),
                (torch.randn(4, 8),),
                dynamic_shapes=({0: Dim("batch", min=1)},),
                strict=False,
            )
        except Exception as error:  # noqa: BLE001  # the error is the result
            return f"{type(error).__name__}: {error}", len(
                (printed.getvalue() + traceback.format_exc()).splitlines()
            )
    return "", 0


def after(case: Any) -> str:
    """Return the message of trainload's capture."""
    from tests.capture.jobs import job

    from trainload.capture.tracing.trace import capture
    from trainload.core.errors import CaptureError

    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            capture(job(model_of(case)))
        except CaptureError as error:
            return str(error)
    raise AssertionError(f"{case.function.__name__} was captured")


def model_of(case: Any) -> Any:
    import torch
    from tests.capture.jobs import Model

    torch.manual_seed(0)
    model: Any = Model(case.function, gain=torch.nn.Parameter(torch.ones(8)), seen=torch.zeros(8))
    model.calls, model.history = 0, []
    return model


def report(name: str, message: str, count: int, ours: str) -> str:
    """Return a section of the page."""
    lines = message.splitlines()
    return "\n".join(
        [
            f"## {name.replace('_', ' ').capitalize()}",
            "",
            f"torch.export: {count} lines, {len(lines)} of them the message, which begins:",
            "",
            *(f"    {line[:140]}" for line in [line for line in lines if line.strip()][:3]),
            "",
            f"trainload: {len(ours.splitlines())} lines.",
            "",
            *(f"    {line}".rstrip() for line in ours.splitlines()),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "docs" / "measurements" / "errors_before_after.md",
        help="output file",
    )
    options = parser.parse_args()
    # the messages contain relative paths, which must not depend on the working directory
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    from tests.capture.refused import REFUSED

    texts = {case.function.__name__: (case, *before(case)) for case in REFUSED}
    worst: list[str] = []
    for name in sorted(texts, key=lambda name: -texts[name][2]):
        if (
            len(worst) < COUNT
            and sum(texts[n][0].cause == texts[name][0].cause for n in worst) < OF_A_CAUSE
        ):
            worst.append(name)
    parts = []
    for name in worst:
        case, message, count = texts[name]
        ours = after(case)
        print(f"{count:5} lines before, {len(ours.splitlines()):3} after: {name}")
        parts.append(report(name, message, count, ours))
    import torch

    head = (
        "# Error messages, before and after\n\n"
        f"Written by `python benchmarks/errors.py` with torch {torch.__version__}: of the"
        f" {len(texts)} refused models in\n"
        f"tests/capture/refused.py the ten for which torch.export prints the most lines,"
        f" traceback and log included; at most {OF_A_CAUSE} of a cause.\n\n"
    )
    options.out.write_text(head + "\n".join(parts))


if __name__ == "__main__":
    main()
