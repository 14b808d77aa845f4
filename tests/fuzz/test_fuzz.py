"""Short form of `make fuzz`: a few hundred mutants of a package, and all that were once misread."""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.fuzz.judge import first_difference, judge
from tests.fuzz.mutants import Mutant, files_of, mutant, restore

from trainload.packaging import package as read_module

pytestmark = pytest.mark.slow

CORPUS = Path(__file__).parent / "corpus" / "mutants"


@dataclass(frozen=True)
class Place:
    """A package that is changed and restored."""

    folder: Path
    files: dict[str, bytes]

    def judged(self, changed: Mutant) -> tuple[str, str]:
        changed.apply(self.folder)
        try:
            return judge(self.folder, self.files, changed)
        finally:
            restore(self.folder, self.files, changed)


@pytest.fixture(scope="module")
def place(attacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("fuzz") / "base.tl"
    shutil.copytree(attacked, folder)
    return Place(folder, files_of(folder))


@settings(
    max_examples=250,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(choice=st.integers(0, 2**64 - 1))
def test_a_mutant_is_refused_or_means_what_its_files_say(place: Place, choice: int) -> None:
    changed = mutant(place.files, random.Random(choice))
    outcome, why = place.judged(changed)
    assert outcome != "wrong", f"{changed.how}: {why}"


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*.json")), ids=lambda path: path.stem)
def test_a_mutant_that_was_once_taken_for_something_else_no_longer_is(
    place: Place, path: Path
) -> None:
    outcome, why = place.judged(Mutant.from_json(path.read_text(encoding="utf-8")))
    assert outcome != "wrong", why


def test_mutants_are_of_both_outcomes_and_leave_no_trace(place: Place) -> None:
    outcomes = {place.judged(mutant(place.files, random.Random(seed)))[0] for seed in range(30)}
    assert outcomes == {"refused", "taken"}
    assert files_of(place.folder) == place.files


def test_a_reader_that_checks_no_digests_would_be_found_out(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = place.files["graphs/eval.json"]
    changed = Mutant(
        "an operator",
        {"graphs/eval.json": graph.replace(b"aten.sin.default", b"aten.cos.default", 1)},
        sealed=False,
    )
    assert changed.files["graphs/eval.json"] != graph
    assert place.judged(changed)[0] == "refused"
    monkeypatch.setattr(
        read_module, "read_checked", lambda root, path, entry: (root / path).read_bytes()
    )
    assert place.judged(changed) == ("wrong", "graphs/eval.json is another than its digest says")


def test_a_reader_that_leaves_something_out_would_be_found_out(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = "graphs/update-rest-first.json"
    graph = place.files[file].replace(
        b'"storage_offset":{"as_int":0}', b'"storage_offset":{"as_int":1}', 1
    )
    changed = Mutant("an offset", {file: graph}, sealed=True)
    assert place.judged(changed)[0] == "refused"
    monkeypatch.setattr(read_module, "check_graph", lambda *args: None)
    outcome, why = place.judged(changed)
    assert outcome == "wrong" and why.startswith(f"{file} is read as something else")


def test_a_reader_that_acts_would_be_found_out(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        read_module, "check_graph", lambda *args: (tmp_path / "sprung").write_text("x")
    )
    outcome, why = place.judged(Mutant("nothing", {}, sealed=False))
    assert outcome == "wrong" and "sprung" in why


@pytest.mark.parametrize(
    ("told", "read", "difference"),
    [
        ({"a": 1}, {"a": 1}, None),
        ({"a": [1, 2]}, {"a": [1, 3]}, ".a.1 is 2, and is read as 3"),
        ({"a": [1]}, {"a": []}, ".a has 1 entries, and is read with 0"),
        ({"a": 1}, {}, ".a is only told"),
        ({"a": 1}, {"a": 1.0}, ".a is 1, and is read as 1.0"),
    ],
)
def test_a_difference_is_told_by_place(told: object, read: object, difference: str | None) -> None:
    assert first_difference(told, read) == difference
