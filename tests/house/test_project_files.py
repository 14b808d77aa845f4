"""Files for GitHub, pre-commit and citations are valid, and call what `make` calls."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from check_jsonschema import main as check_jsonschema
from tests.house.source import ROOT

from trainload.core.versions import VERSION

GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted(
    set((GITHUB / "ISSUE_TEMPLATE").glob("*.yml")) - {GITHUB / "ISSUE_TEMPLATE/config.yml"}
)
SCHEMAS = {
    "github-workflows": WORKFLOWS,
    "github-issue-forms": FORMS,
    "github-issue-config": [GITHUB / "ISSUE_TEMPLATE" / "config.yml"],
    "dependabot": [GITHUB / "dependabot.yml"],
    "citation-file-format": [ROOT / "CITATION.cff"],
}
"""Schema that check-jsonschema contains -> the files that it describes."""


def run(*command: str | Path) -> None:
    """Run a tool of the development environment, and fail with its output if it does."""
    done = subprocess.run(
        [str(Path(sys.executable).with_name(str(command[0]))), *map(str, command[1:])],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def recipe(target: str) -> str:
    """Return the commands of a target of the Makefile."""
    return (ROOT / "Makefile").read_text().split(f"\n{target}: env\n")[1].split("\n\n")[0]


def steps(path: Path) -> list[dict[str, str]]:
    jobs = yaml.safe_load(path.read_text())["jobs"].values()
    return [step for job in jobs for step in job["steps"]]


@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_file_satisfies_the_schema_of_its_kind(
    schema: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--builtin-schema", f"vendor.{schema}"]
    with pytest.raises(SystemExit) as end:
        check_jsonschema([*options, *map(str, SCHEMAS[schema])])
    assert end.value.code == 0, capsys.readouterr()


def test_zizmor_finds_nothing_in_the_workflows() -> None:
    run("zizmor", "--offline", "--persona=pedantic", "--quiet", GITHUB)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_pins_each_action_to_a_commit(path: Path) -> None:
    used = re.findall(r"uses: (\S+)(.*)", path.read_text())
    assert used
    assert [
        name
        for name, comment in used
        if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", name)
        or not re.fullmatch(r" # v\d+\.\d+\.\d+", comment)
    ] == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_gives_permissions_to_jobs_alone(path: Path) -> None:
    assert yaml.safe_load(path.read_text())["permissions"] == {}


def test_continuous_integration_runs_what_a_person_runs() -> None:
    commands = {step["run"] for step in steps(GITHUB / "workflows" / "ci.yml") if "run" in step}
    assert commands == {"make check", "make test", "make docs", "make dist"}


def test_a_release_is_published_by_tags_alone() -> None:
    workflow = yaml.safe_load((GITHUB / "workflows" / "release.yml").read_text())
    assert workflow[True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 reads `on` as a boolean
    assert {name: job["permissions"] for name, job in workflow["jobs"].items()} == {
        "build": {"contents": "read"},
        "publish": {"id-token": "write"},
    }


def test_pre_commit_accepts_its_configuration() -> None:
    run("pre-commit", "validate-config", ".pre-commit-config.yaml")


def test_pre_commit_runs_the_commands_of_make_check() -> None:
    configuration = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = [hook["entry"] for repo in configuration["repos"] for hook in repo["hooks"]]
    commands = re.findall(r"\$\(BIN\)/(.+)", recipe("check"))
    assert hooks == [each for each in commands if "pytest" not in each]


def test_the_citation_has_the_version_and_the_licence_of_the_project() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == VERSION
    assert f'license = "{citation["license"]}"' in (ROOT / "pyproject.toml").read_text()
