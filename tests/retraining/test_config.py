"""The retraining file: errors are reported with the allowed values before anything runs."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from trainload.cli import main as cli
from trainload.core.errors import RequestError
from trainload.retraining.config.config import Config, checked
from trainload.retraining.config.config_file import read_config
from trainload.retraining.config.file_template import TEMPLATE
from trainload.retraining.ticks.checks import check_config

LEAST: dict[str, Any] = {
    "store": "s",
    "line": "gpt",
    "data": {"files": "x/*.parquet"},
    "evaluation": {"hold_out": 0.1},
}


def refused(**changes: Any) -> str:
    with pytest.raises(RequestError) as caught:
        checked({**LEAST, **changes}, "retrain.yaml")
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lin": "x"}, ["retrain.yaml, lin: unknown key", "Did you mean line?"]),
        (
            {"data": {"files": "x", "windw": {}}},
            ["data.windw: unknown key", "Did you mean window?"],
        ),
        (
            {"train": {"steps": 0}},
            ["train.steps: a value is not allowed", "greater than or equal to 1", "got 0"],
        ),
        (
            {"train": {"steps": 5, "epochs": 1}},
            ["train: a value is not allowed", "steps or epochs, not both"],
        ),
        (
            {"train": {"optimizer": "kept", "start": "first"}},
            ["optimizer: kept only with start: current"],
        ),
        ({"evaluation": {}}, ["evaluation: a value is not allowed", "either files or hold_out"]),
        ({"evaluation": {"hold_out": 1.5}}, ["evaluation.hold_out", "less than 1", "got 1.5"]),
        (
            {"lease": {"seconds": "5 parsecs"}},
            ["lease.seconds", "such as 90s, 30m, 6h, 7d or 2w", "got 5 parsecs"],
        ),
        (
            {"lease": {"taken": "wait"}},
            ["lease.taken", "'forbid', 'queue' or 'replace'", "got wait"],
        ),
        ({"cluster": {"strategy": "zero9"}}, ["cluster.strategy", "zero3", "got zero9"]),
        ({"cluster": {"backend": "local", "workers": 2}}, ["backend: local, which is one process"]),
        ({"schedule": {"every": "1h", "cron": "* * * * *"}}, ["schedule", "either every or cron"]),
        (
            {"data": {"files": "x", "window": {"kind": "column", "span": "1d"}}},
            ["data.window", "a column for the kind column, and only for it"],
        ),
        (
            {"line": "Not A Line"},
            ["line: a value is not allowed", "lowercase letters", "got Not A Line"],
        ),
        ({"notify": {"command": []}}, ["notify.command"]),
        ({"data": {"files": []}}, ["data.files"]),
        (
            {"lease": {"patience": "999999999w"}},
            ["lease.patience", "at most 36500d", "got 999999999w"],
        ),
        ({"schedule": {"every": "0s"}}, ["schedule.every", "such as 90s", "got 0s"]),
        (
            {"schedule": {"every": "6h", "zone": "Europe/Berlin"}},
            ["schedule", "a zone only with cron"],
        ),
        (
            {"gate": {"drift": {"bar": float("inf")}}},
            ["gate.drift.bar", "finite number", "got inf"],
        ),
        ({"train": {"epochs": float("inf")}}, ["train.epochs", "finite number", "got inf"]),
        ({"train": {"set": {"lr": float("nan")}}}, ["train.set.lr", "got nan"]),
        ({"train": {"steps": True}}, ["train.steps", "got true"]),
        ({"attempts": 21}, ["attempts", "less than or equal to 20", "got 21"]),
        (
            {"handover": {"place": "p", "graph": "predict"}},
            ["handover", "a graph only with the forms pt2 and aoti"],
        ),
    ],
)
def test_what_is_wrong_is_named_with_what_is_allowed(
    changes: dict[str, Any], words: list[str]
) -> None:
    said = refused(**changes)
    assert [each for each in words if each not in said] == [], said


def test_a_key_that_is_missing_is_named() -> None:
    with pytest.raises(RequestError, match=r"retrain.yaml, store: a key is missing"):
        checked({name: value for name, value in LEAST.items() if name != "store"}, "retrain.yaml")


@pytest.mark.parametrize(
    ("text", "span"),
    [("90s", 90), ("30m", 1800), ("6h", 21_600), ("7d", 604_800), ("2w", 1_209_600)],
)
def test_a_time_is_written_with_its_unit(text: str, span: int) -> None:
    assert checked({**LEAST, "lease": {"seconds": text}}, "").lease.seconds == timedelta(
        seconds=span
    )


def test_what_a_tick_pins_is_read_back() -> None:
    config = checked(
        {
            **LEAST,
            "train": {"set": {"lr": 1e-3, "frozen": ["a.*", "b"]}},
            "schedule": {"every": "1h"},
        },
        "",
    )
    assert Config.model_validate(config.to_json()) == config


def test_settings_are_those_of_a_launch() -> None:
    config = checked(
        {**LEAST, "train": {"set": {"lr": 1e-3, "frozen": ["a.*", "b"], "keep": 3}}}, ""
    )
    assert config.train.given == ("frozen=a.*,b", "keep=3", "lr=0.001")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train": {"set": {"dropout": 0.1}}}, ["train.set", "dropout cannot be set at a launch"]),
        ({"train": {"set": {"lrr": 0.1}}}, ["train.set", "there is no setting lrr"]),
        (
            {"train": {"set": {"eval_batches": 3}}},
            ["train.set.eval_batches", "its own key", "evaluation.batches"],
        ),
        ({"gate": {"require": "eval.loss <"}}, ["gate.require", "not an expression"]),
        (
            {"evaluation": {"hold_out": 0.1, "slices": {"column": "c", "require": "print(1)"}}},
            ["evaluation.slices.require"],
        ),
        ({"schedule": {"cron": "61 * * * *"}}, ["schedule.cron", "Bad minute"]),
        (
            {"schedule": {"cron": "* * * * *", "zone": "Europe/Atlantis"}},
            ["schedule.zone", "Europe/Berlin", "Europe/Atlantis"],
        ),
        (
            {"data": {"files": "x", "window": {"kind": "path", "span": "1d"}}},
            ["data.files", "exactly one time in the path"],
        ),
        (
            {"data": {"files": "x/{time:%q}", "window": {"kind": "path", "span": "1d"}}},
            ["data.files", "not a time format", "%Y"],
        ),
        ({"data": {"files": "x/{time:%Y}"}}, ["data.files", "requires a window of kind path"]),
        ({"data": {"files": "mixture.json"}}, ["data.files", "not a mixture"]),
    ],
)
def test_what_only_other_parts_can_judge_is_judged_before_anything_runs(
    changes: dict[str, Any], words: list[str]
) -> None:
    config = checked({**LEAST, **changes}, "")
    with pytest.raises(RequestError) as caught:
        check_config(config)
    assert [each for each in words if each not in str(caught.value)] == [], str(caught.value)


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_file_may_be_yaml_or_toml(tmp_path: Path) -> None:
    one = read_config(written(tmp_path, "a.yaml", yaml.safe_dump(LEAST)))
    toml = (
        'store = "s"\nline = "gpt"\n[data]\nfiles = "x/*.parquet"\n[evaluation]\nhold_out = 0.1\n'
    )
    assert read_config(written(tmp_path, "a.toml", toml)) == one


def test_relative_paths_start_at_the_files_folder(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    text = yaml.safe_dump({**LEAST, "package": "gpt.tl", "handover": {"place": "serving"}})
    config = read_config(written(tmp_path / "inner", "a.yaml", text))
    inner = tmp_path / "inner"
    assert (config.store, config.package, config.data.files) == (
        str(inner / "s"),
        str(inner / "gpt.tl"),
        (str(inner / "x/*.parquet"),),
    )
    assert config.handover is not None
    assert config.handover.place == str(inner / "serving")


def test_a_command_of_the_files_folder_is_found_from_anywhere(tmp_path: Path) -> None:
    commands = {
        "notify": {"command": ["./tell.sh", "./x"]},
        "handover": {"place": "p", "command": ["reload", "now"]},
    }
    config = read_config(written(tmp_path, "retrain.yaml", yaml.safe_dump({**LEAST, **commands})))
    assert config.notify is not None
    assert config.handover is not None
    assert (config.notify.command, config.handover.command) == (
        (str(tmp_path / "tell.sh"), "./x"),
        ("reload", "now"),
    )


def test_urls_and_references_stay_as_they_are(tmp_path: Path) -> None:
    text = yaml.safe_dump(
        {
            **LEAST,
            "store": "s3://models/store",
            "package": "s3://models/store#gpt/1",
            "runs": "${env:RUNS}",
        }
    )
    config = read_config(written(tmp_path, "a.yaml", text))
    assert (config.store, config.package, config.runs) == (
        "s3://models/store",
        "s3://models/store#gpt/1",
        "${env:RUNS}",
    )


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.yaml", "store: [", "this is not valid YAML"),
        ("a.toml", "store = [", "this is not valid TOML"),
        ("a.yaml", "- a\n- b\n", "the file does not contain a mapping"),
        ("a.yaml", "!!python/object/apply:os.system ['true']", "this is not valid YAML"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, name: str, text: str, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        read_config(written(tmp_path, name, text))


def test_there_must_be_a_file(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="trainload retrain init"):
        read_config(tmp_path / "none.yaml")


def test_the_file_that_init_writes_is_right(tmp_path: Path) -> None:
    check_config(read_config(written(tmp_path, "a.yaml", TEMPLATE)))


def every_key(kind: Any, place: str = "") -> set[str]:
    """Return the keys of a section and of its subsections."""
    from trainload.retraining.config.config import _section_of

    found = set()
    for name, field in kind.model_fields.items():
        inner = _section_of(field.annotation)
        key = f"{place}{field.alias or name}"
        found |= every_key(inner, f"{key}.") if hasattr(inner, "model_fields") else {key}
    return found


def test_the_file_that_init_writes_tells_of_every_key() -> None:
    text = TEMPLATE.replace("# ", "").replace("#", "")
    assert [
        key for key in sorted(every_key(Config)) if f"{key.rpartition('.')[2]}:" not in text
    ] == []


def test_what_is_commented_out_in_it_is_allowed() -> None:
    lines = []
    for line in TEMPLATE.splitlines():
        bare = (
            line.replace("# ", "", 1)
            if line.lstrip().startswith("# ") and ":" in line.split("#")[1]
            else line
        )
        lines.append(bare)
    text = "\n".join(lines[3:])
    raw = yaml.safe_load(text.replace("  hold_out: 0.1", "  # hold_out: 0.1"))
    raw["data"]["window"] = {"kind": "new", "since": "tick"}
    raw["schedule"].pop("every", None)
    raw["cluster"].update(backend="ray")
    checked(raw, "the template")


def problems(raw: Any) -> list[str]:
    """Return the places where a file's content violates the JSON Schema."""
    jsonschema.Draft202012Validator.check_schema(Config.model_json_schema())
    return sorted(
        error.json_path
        for error in jsonschema.Draft202012Validator(Config.model_json_schema()).iter_errors(raw)
    )


def test_the_json_schema_takes_the_file_that_init_writes() -> None:
    assert problems(yaml.safe_load(TEMPLATE)) == []


def test_the_json_schema_takes_what_a_tick_pins() -> None:
    assert problems(checked(LEAST, "retrain.yaml").to_json()) == []


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"lines": "gpt"}, "$"),
        ({"data": {"files": "x", "bad": "ignore"}}, "$.data.bad"),
        ({"lease": {"seconds": "soon"}}, "$.lease.seconds"),
        ({"data": {"files": 3}}, "$.data.files"),
    ],
)
def test_the_json_schema_refuses_what_a_file_may_not_have(
    changes: dict[str, Any], place: str
) -> None:
    assert problems({**LEAST, **changes}) == [place]


def test_the_json_schema_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["retrain", "schema"]) == 0
    assert json.loads(capsys.readouterr().out)["properties"].keys() == Config.model_fields.keys()
