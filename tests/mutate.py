"""Break the code in small ways, one at a time, and check that the laws' tests fail.

    python -m tests.mutate [--law N] [--name TEXT] [--why]

The breaks are applied to a copy of the repository. Each named test is run once without a break and
must pass, then with each of its breaks and must fail. The exit status is 1 if a break survives.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.breaks.mutation import Mutation
from tests.mutations import MUTATIONS

ROOT = Path(__file__).resolve().parents[1]
_LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info")
_LEFT_OUT_OF_ROOT = frozenset({"build", "dist", "demo", "demo-gan", "runs"})
PASSED, FAILED = 0, 1
"""Exit statuses of pytest. Any other status means that the tests could not be run."""
HASH_SEED = "1"
"""Hash seed of a mutant's tests.

It differs from the seed of law 5's second process: with a random seed, sets had the same order in
both processes in one run of six.
"""
TIMED_OUT = "from pytest-timeout"
"""Text that pytest prints if a test times out; its exit status is FAILED then."""


def _left_out(folder: str, names: list[str]) -> set[str]:
    """Return the entries of a folder of the repository that a copy does not have."""
    of_root = _LEFT_OUT_OF_ROOT if Path(folder) == ROOT else frozenset()
    return _LEFT_OUT(folder, names) | of_root


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a test.

    Attributes:
        result: "noticed", "passed", or a text that describes the failure.
        seconds: duration.
        tail: last lines of pytest's output.
    """

    result: str
    seconds: float
    tail: str

    @property
    def good(self) -> bool:
        return self.result in ("noticed", "passed")


class Copy:
    """Copy of the repository, and an environment that imports trainload and tests from it."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "repository"
        shutil.copytree(ROOT, self.root, symlinks=True, ignore=_left_out)
        paths = [str(self.root / "src"), str(self.root)]
        given = {
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONDONTWRITEBYTECODE": "1",
            "TMPDIR": str(folder),
            "PYTHONHASHSEED": HASH_SEED,
        }
        self._environment = {**os.environ, **given}
        self._scratch = folder / "scratch"
        found = self._python("-c", "import trainload; print(trainload.__file__)").stdout.strip()
        assert Path(found).is_relative_to(self.root), f"{found} would be tested, and not the copy"

    def test(self, node: str) -> tuple[int, str]:
        """Run one test.

        Returns:
            pytest's exit status, or -1 if the test timed out, and the end of its output.
        """
        options = (
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "--tb=line",
            "--show-capture=no",
            f"--basetemp={self._scratch}",
        )
        done = self._python("-m", "pytest", *options, f"tests/laws/{node}")
        shutil.rmtree(self._scratch, ignore_errors=True)
        status = -1 if TIMED_OUT in done.stdout else done.returncode
        return status, "\n".join(done.stdout.strip().splitlines()[-6:])

    def apply(self, mutation: Mutation) -> str:
        """Apply a break. Return the original text of the file."""
        file = self.root / mutation.file
        text = file.read_text()
        assert text.count(mutation.old) == 1, (
            f"{mutation.name}: its text does not occur once in {mutation.file}"
        )
        file.write_text(text.replace(mutation.old, mutation.new))
        return text

    def restore(self, mutation: Mutation, text: str) -> None:
        (self.root / mutation.file).write_text(text)

    def _python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        return subprocess.run(
            command,
            cwd=self.root,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )


def unbroken(copy: Copy, node: str) -> Outcome:
    """Run a test on the unchanged code."""
    began = time.monotonic()
    status, tail = copy.test(node)
    return Outcome(
        "passed" if status == PASSED else f"FAILED WITHOUT A BREAK ({status})",
        time.monotonic() - began,
        tail,
    )


def broken(copy: Copy, mutation: Mutation) -> Outcome:
    """Run the test of a break on the broken code."""
    began = time.monotonic()
    text = copy.apply(mutation)
    try:
        status, tail = copy.test(mutation.test)
    finally:
        copy.restore(mutation, text)
    result = {PASSED: "SURVIVED", FAILED: "noticed"}.get(status, f"NOT RUN ({status})")
    return Outcome(result, time.monotonic() - began, tail)


def show(law: int, name: str, test: str, outcome: Outcome, why: bool) -> None:
    """Print a line of the table.

    The end of pytest's output follows if something is wrong or `why` is true.
    """
    print(
        f"{law}  {name:<66.66}  {test.removeprefix('test_law_'):<72.72}  {outcome.result} "
        f" {outcome.seconds:.0f} s",
        flush=True,
    )
    if why or not outcome.good:
        print("\n".join(f"       {line}" for line in outcome.tail.splitlines()), flush=True)


def chosen(options: argparse.Namespace) -> list[Mutation]:
    return [m for m in MUTATIONS if options.law in (None, m.law) and options.name in m.name]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the breaks. Return 0 if every one was noticed, otherwise 1."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--law", type=int, help="only the breaks of this law")
    parser.add_argument("--name", default="", help="only breaks whose names contain this text")
    parser.add_argument("--why", action="store_true", help="show how each test failed")
    options = parser.parse_args(arguments)
    mutations = chosen(options)
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="trainload-mutate-") as folder:
        copy = Copy(Path(folder))
        for node, law in {m.test: m.law for m in mutations}.items():
            outcomes.append(unbroken(copy, node))
            show(law, "(no break)", node, outcomes[-1], options.why)
        for mutation in mutations:
            outcomes.append(broken(copy, mutation))
            show(mutation.law, mutation.name, mutation.test, outcomes[-1], options.why)
    noticed = sum(outcome.result == "noticed" for outcome in outcomes)
    print(f"{noticed} of {len(mutations)} breaks were noticed")
    return 0 if all(outcome.good for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
