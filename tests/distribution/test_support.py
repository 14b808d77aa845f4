"""Supported releases of Python and libraries are those that were run, wherever they are stated."""

from __future__ import annotations

import json
import re

import yaml
from packaging.specifiers import SpecifierSet
from tests.compat.matrix import VERSIONS
from tests.distribution.installs import BEGIN, END, PAGE, RESULTS, minor, table
from tests.distribution.lowest import TESTS
from tests.distribution.requirements import project, requirements
from tests.house.source import ROOT, face_files, private_names, stage_files

INSTALLS = json.loads(RESULTS.read_text())
PRIVATE = {"torch", "model_signing"}
"""Libraries of which private names are used."""


def classified() -> list[str]:
    """Return the Pythons that the classifiers name."""
    named = re.compile(r"Programming Language :: Python :: (\d+\.\d+)")
    return [match[1] for each in project()["classifiers"] if (match := named.fullmatch(each))]


def test_the_pythons_of_the_classifiers_are_those_that_ran_the_first_job() -> None:
    worked = {minor(e["python"]) for e in INSTALLS["installs"] if not e["error"]}
    assert [minor(each) for each in classified()] == sorted(worked)


def test_no_install_has_failed() -> None:
    assert [e for e in INSTALLS["installs"] if e["error"]] == []


def test_the_required_python_is_the_oldest_that_ran() -> None:
    assert project()["requires-python"] == f">={classified()[0]}"


def test_continuous_integration_runs_the_pythons_of_the_classifiers() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["python"] == classified()


def test_the_system_of_the_classifiers_is_the_one_that_ran() -> None:
    assert INSTALLS["system"] == "Linux x86_64"
    systems = [each for each in project()["classifiers"] if each.startswith("Operating System")]
    assert systems == ["Operating System :: POSIX :: Linux"]


def test_the_table_of_the_support_page_shows_the_results() -> None:
    shown = PAGE.read_text().split(BEGIN)[1].split(END)[0]
    assert shown.strip() == table(INSTALLS["installs"])


def test_the_torch_releases_of_the_matrices_are_those_that_are_accepted() -> None:
    (torch,) = [each for each in requirements() if each.name == "torch"]
    first, last = minor(VERSIONS[0]), minor(VERSIONS[-1])
    bounds = f">={first[0]}.{first[1]},<{last[0]}.{last[1] + 1}"
    assert torch.specifier == SpecifierSet(bounds)


def test_what_users_install_has_a_lower_bound() -> None:
    lower = {">=", "=="}
    assert [str(e) for e in requirements() if not lower & {s.operator for s in e.specifier}] == []


def test_a_library_whose_private_names_are_used_has_an_upper_bound() -> None:
    bounded = {each.name.replace("-", "_") for each in requirements() if "<" in str(each.specifier)}
    assert bounded >= PRIVATE


def test_private_names_of_other_libraries_are_not_used() -> None:
    texts = [path.read_text() for path in (*stage_files(), *face_files())]
    libraries = {each.name.replace("-", "_").lower() for each in requirements()} - PRIVATE
    assert {
        library: names
        for library in libraries
        if (names := [name for text in texts for name in private_names(text, library)])
    } == {}


def test_the_folders_that_run_with_the_lowest_versions_exist() -> None:
    assert [folder for folder in TESTS if not (ROOT / folder).is_dir()] == []
