"""Run checks of `trainload doctor` in processes with a constrained environment."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from trainload.launching.doctor.check_results import CheckResult

_PROGRAM = """
import dataclasses, json
from pathlib import Path
from trainload.launching.doctor import {module}
result = {module}.{call}
result = result[0] if isinstance(result, tuple) else result
print(json.dumps(dataclasses.asdict(result)))
"""


def examined(
    module: str, call: str, *, within: Sequence[str] = (), **variables: str
) -> CheckResult:
    """Run a check in a process of its own, and return its result.

    Args:
        module: module of the check.
        call: call of the check's function.
        within: command that runs the process, such as unshare.
        variables: environment variables of the process.
    """
    program = _PROGRAM.format(module=module, call=call)
    done = subprocess.run(
        [*within, sys.executable, "-c", program],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return CheckResult(**answer)


def in_namespace(kind: str, setup: str) -> list[str]:
    """Return a command that runs another one in a private namespace after a shell command.

    Args:
        kind: option of unshare: --mount or --uts.
        setup: shell command.
    """
    unshare = ["unshare", kind]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("this user may not create namespaces")
    return [*unshare, "sh", "-c", f'{setup} && exec "$@"', "sh"]


def distribution(folder: Path, name: str, version: str) -> str:
    """Create the metadata of an installed distribution. Returns a PYTHONPATH that has it first."""
    place = folder / f"{name}-{version}.dist-info"
    place.mkdir(parents=True)
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
