"""Settings are declared once: tests of everything that is generated from the declarations."""

from __future__ import annotations

import doctest
import importlib
import inspect
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tests.house.settings_page import PAGE, with_tables
from tests.launch.settings.peft_folders import adapter_folder

import trainload
from trainload.cli import main as cli
from trainload.core.errors import RequestError
from trainload.launching.api.evaluate import EvaluationRequest
from trainload.launching.api.launch import ResumeRequest
from trainload.launching.api.request import RunRequest
from trainload.launching.run.run_spec import RunSpec
from trainload.launching.settings.describe import descriptions, settings_schema
from trainload.launching.settings.parse import KEYS, parse_settings
from trainload.launching.settings.run_settings import RunSettings

Capture = pytest.CaptureFixture[str]
VALUES = {
    "adapters.also": "norm.*",
    "adapters.layers": "*.weight,head.*",
    "checkpoints": "s3://bucket/folder",
    "compile": "false",
    "cuda_graphs": "true",
    "deterministic": "false",
    "frozen": "a.*,b.*",
    "optimizer_from": "runs/before",
    "precision": "bf16",
    "require_compiled": "true",
    "schedule": "cosine:10",
    "sinks": "mlflow,prometheus",
    "weights": "last",
}
"""A value for each setting that is not numeric."""


def given(*keys: str) -> list[str]:
    """Return an assignment for each key, and for the keys that it requires."""
    values, needed = dict(VALUES), set[str]()
    if any(key.startswith("adapters.source") for key in keys):
        folder, digest = adapter_folder()
        values |= {"adapters.source": folder, "adapters.source_digest": digest}
        needed = {"adapters.source"}
    elif any(key.startswith("adapters.") for key in keys):
        needed = {"adapters.rank", "adapters.layers"}
    return [
        f"{key.replace('GROUP', 'head')}={values.get(key, '3')}" for key in sorted({*keys, *needed})
    ]


@pytest.mark.parametrize("key", sorted(KEYS))
def test_a_setting_is_described(key: str) -> None:
    assert next(each for each in descriptions() if each.key == key).text


@pytest.mark.parametrize("key", [name for name, key in KEYS.items() if not key.info.option])
def test_a_text_is_read_as_the_settings_value(key: str) -> None:
    settings = parse_settings(given(key))
    made = RunSettings(**settings.run, overrides=settings.overrides)
    assert (
        bool(made.model_fields_set - {"overrides"})
        + bool(settings.overrides.model_fields_set)
        + bool(settings.batch)
        == 1
    )


@pytest.mark.parametrize("key", [name for name, key in KEYS.items() if key.info.option])
def test_a_setting_with_an_option_is_given_by_it(key: str) -> None:
    with pytest.raises(
        RequestError,
        match=f"--set {key}=3: {key} is set with its own option, {KEYS[key].info.option}",
    ):
        parse_settings([f"{key}=3"])


@pytest.mark.parametrize("key", sorted(KEYS))
def test_resume_takes_what_it_can_change(key: str) -> None:
    if KEYS[key].info.fixed:
        with pytest.raises(RequestError, match=f"{key} cannot be changed in the middle of a run"):
            parse_settings([f"{key}={VALUES.get(key, '3')}"], resuming=True)
    else:
        parse_settings(given(key), resuming=True)


def test_values_of_several_parts_are_joined() -> None:
    assert parse_settings(["frozen=a.*,b.*", "frozen=c.*"]).overrides.frozen == (
        "a.*",
        "b.*",
        "c.*",
    )


@pytest.mark.parametrize("model", [RunRequest, ResumeRequest, RunSpec])
def test_a_run_has_every_setting(model: Any) -> None:
    assert RunSettings.model_fields.keys() <= model.model_fields.keys()


@pytest.mark.parametrize(
    ("verb", "model"),
    [
        (trainload.launch, RunRequest),
        (trainload.resume, ResumeRequest),
        (trainload.evaluate, EvaluationRequest),
    ],
)
def test_a_verb_has_the_signature_of_its_model(verb: Any, model: Any) -> None:
    keywords = {
        name: each
        for name, each in inspect.signature(verb).parameters.items()
        if each.kind is inspect.Parameter.KEYWORD_ONLY
    }
    assert keywords.keys() == model.model_fields.keys()


def test_what_is_missing_is_named_with_its_description(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"run_dir: is missing \(expected Folder of the run"):
        trainload.launch(None, None, None)  # type: ignore[arg-type, call-arg]


def test_the_page_has_the_tables_of_the_models() -> None:
    assert PAGE.read_text() == with_tables(PAGE.read_text()), (
        "run: python -m tests.house.settings_page"
    )


def test_the_command_prints_every_key(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.run(["settings"]) == 0
    assert sorted(
        line.split()[0] for line in capsys.readouterr().out.splitlines() if line[:1].strip()
    ) == sorted([*KEYS, "setting"])


def test_the_commands_json_is_a_schema(capsys: Capture) -> None:
    assert cli.run(["settings", "--json"]) == 0
    jsonschema.Draft202012Validator.check_schema(json.loads(capsys.readouterr().out))


@pytest.mark.parametrize(
    ("settings", "valid"),
    [
        ({"keep": 3, "lr": "1e-4", "lr.head": 0.1, "frozen": "a.*"}, True),
        ({"keep": 0}, False),
        ({"steps": 3}, False),
        ({"speed": 3}, False),
        ({"sinks": ["no sink"]}, False),
    ],
)
def test_the_schema_knows_keys_and_ranges(settings: dict[str, Any], valid: bool) -> None:
    assert jsonschema.Draft202012Validator(settings_schema()).is_valid(settings) == valid


@pytest.mark.parametrize("name", ["adapters", "describe", "overrides", "parse", "run_settings"])
def test_the_examples_of_a_module_run(name: str) -> None:
    outcome = doctest.testmod(importlib.import_module(f"trainload.launching.settings.{name}"))
    assert outcome.attempted > 0
    assert outcome.failed == 0
