"""`make compat`: packages of every supported torch, opened and trained by each of them.

    python -m tests.compat.matrix [2.11 2.12 ...]

The goldens are opened and trained by every torch too. Environments are created in .compat/, one for
each torch (CUDA builds from PyPI, which run on CPU: some 7 GB each), and reused. Writes
docs/measurements/compat.md and benchmarks/results/compat.json.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from tests.golden.goldens import BF16, FP32, TOLERANCES, goldens
from tests.house.commits import head_commit

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".compat"
VERSIONS = ("2.11", "2.12", "2.13", "2.14", "2.15")
HEAD = """# Compatibility between torch versions

The jobs of `tests/golden/jobs.py` ({jobs}) are frozen with each torch
version, and opened and trained for two steps with each. A cell shows how many of the packages load,
train, and reproduce the losses of the version that froze them ({fp32:g} relative, {bf16:g} for the
one with a bfloat16 region), and the largest relative difference of a float32 loss (exact: none).
`make compat` writes this page, here at commit {commit}; the packages of older formats in
`tests/golden/` are also opened with each torch version.

"""


def dependencies() -> list[str]:
    """Return the dependencies in pyproject.toml except torch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [each for each in project["dependencies"] if Requirement(each).name != "torch"]


def python_of(version: str) -> Path:
    return FOLDER / version / "bin" / "python"


def make_environment(version: str) -> None:
    """Let uv make an environment with this torch and trainload's dependencies, unless it exists."""
    stamp = FOLDER / version / ".stamp"
    if stamp.exists():
        return
    pins = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if not re.match(r"(torch|setuptools)==|#", line)
    ]
    constraints = FOLDER / f"constraints-{version}.txt"
    constraints.write_text(
        "\n".join(
            [*pins, f"torch=={version}.*", "setuptools<82" if version == "2.11" else "setuptools"]
        )
        + "\n"
    )
    uv("venv", "--clear", "--python", sys.executable, FOLDER / version)
    install = ("pip", "install", "--python", python_of(version), "-c", constraints)
    uv(*install, "torch", "setuptools", *dependencies())
    stamp.touch()


def uv(*arguments: object) -> None:
    subprocess.run(["uv", "--quiet", *map(str, arguments)], check=True)


def asked(version: str, verb: str, folders: Sequence[Path]) -> dict[str, Any]:
    """Run tests/compat/one.py in the environment of a torch, and return what it writes."""
    file = FOLDER / f"{verb}-{version}.json"
    variables = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        "CUDA_VISIBLE_DEVICES": "",
    }
    variables |= {
        "TRAINLOAD_CACHE_DIR": str(FOLDER / f"cache-{version}"),
        "TRAINLOAD_STATE_DIR": str(FOLDER / f"state-{version}"),
    }
    command = [
        str(python_of(version)),
        "-m",
        "tests.compat.one",
        verb,
        str(file),
        *map(str, folders),
    ]
    subprocess.run(command, check=True, cwd=ROOT, env=variables, stdout=subprocess.DEVNULL)
    found: dict[str, Any] = json.loads(file.read_bytes())
    return found


def fine(name: str, result: dict[str, Any]) -> bool:
    """Return True if a package loads and, if it has weights, trains to its recorded losses."""
    if result["trains"] is None:
        return bool(result["loads"])
    return bool(result["trains"]) and result["apart"] <= TOLERANCES.get(name, FP32)


def cell(results: dict[str, dict[str, Any]]) -> str:
    """Return a cell of the matrix from the results by case."""
    good = sum(fine(name, result) for name, result in results.items())
    apart = [
        result["apart"]
        for name, result in results.items()
        if result["apart"] is not None and name not in TOLERANCES
    ]
    return f"{good} of {len(results)}" + (
        f", {max(apart):.0e}" if any(apart) else ", exact" if apart else ""
    )


def page(versions: Sequence[str], frozen: dict[str, Any], opened: dict[str, Any]) -> str:
    """Return the text of docs/measurements/compat.md."""
    from tests.golden.jobs import CASES

    told = {version: opened[version]["results"] for version in versions}
    lines = [
        HEAD.format(
            jobs=", ".join(name.replace("_", " ") for name in CASES),
            fp32=FP32,
            bf16=BF16,
            commit=head_commit(),
        ).rstrip(),
        "",
        f"| frozen by \\ opened by | {' | '.join(versions)} |",
    ]
    lines.append("|---" * (len(versions) + 1) + "|")

    def row(label: str, folders: dict[str, Path]) -> None:
        cells = [
            cell({name: told[version][str(folder)] for name, folder in folders.items()})
            for version in versions
        ]
        lines.append(f"| {label} | {' | '.join(cells)} |")

    for version in versions:
        row(
            f"{frozen[version]['torch']}",
            {
                name: folder
                for name, folder in packages(version).items()
                if not frozen[version]["results"][name]
            },
        )
    for number in sorted({golden.version for golden in goldens()}):
        row(
            f"goldens of format {number}",
            {golden.name: golden.folder for golden in goldens() if golden.version == number},
        )
    wrong = [
        f"- {version} does not freeze {name}: {why}"
        for version in versions
        for name, why in frozen[version]["results"].items()
        if why
    ]
    for version in versions:
        for folder, result in told[version].items():
            if not fine(Path(folder).name, result):
                why = result["why"] or f"a loss is {result['apart']:.1e} apart"
                wrong.append(f"- {version} opens {Path(folder).relative_to(ROOT)}: {why}")
    lines += (
        ["", "Exceptions:", "", *wrong]
        if wrong
        else ["", "Every package loads, trains and reproduces its losses with every version."]
    )
    return "\n".join(lines) + "\n"


def packages(version: str) -> dict[str, Path]:
    """Return case -> folder in which a torch has frozen its package, or has failed to."""
    from tests.golden.jobs import CASES

    return {name: FOLDER / f"frozen-{version}" / name for name in CASES}


def main(versions: Sequence[str]) -> None:
    """Create the matrix."""
    FOLDER.mkdir(exist_ok=True)
    frozen = {}
    for version in versions:
        print(f"torch {version}: environment", flush=True)
        make_environment(version)
        target = FOLDER / f"frozen-{version}"
        subprocess.run(["rm", "-rf", str(target)], check=True)
        target.mkdir()
        print(f"torch {version}: freezes", flush=True)
        frozen[version] = asked(version, "freeze", [target])
    made = [
        folder
        for version in versions
        for name, folder in packages(version).items()
        if not frozen[version]["results"][name]
    ]
    opened = {}
    for version in versions:
        print(f"torch {version}: opens {len(made)} packages and the goldens", flush=True)
        opened[version] = asked(version, "open", [*made, *(golden.folder for golden in goldens())])
    text = page(versions, frozen, opened)
    (ROOT / "docs" / "measurements" / "compat.md").write_text(text, encoding="utf-8")
    relative = json.dumps({"frozen": frozen, "opened": opened}, indent=1, sort_keys=True).replace(
        f"{ROOT}/", ""
    )
    (ROOT / "benchmarks" / "results" / "compat.json").write_text(relative + "\n", encoding="utf-8")
    print(text.split("\n\n", 2)[2])


if __name__ == "__main__":
    main(sys.argv[1:] or VERSIONS)
