"""The page of a run."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.launch.commands import refused
from tests.report.made import (
    BEGIN,
    FAULTY,
    Read,
    event,
    failure,
    long_journal,
    made_run,
    start,
    step,
    steps,
)

import trainload
from trainload.cli import main as cli
from trainload.launching.run.activity import Doing
from trainload.launching.run.journal import Event
from trainload.launching.run.run_state import RankSeen, Summary, write_state
from trainload.packaging.package import Package
from trainload.report.frame.figures import Chart
from trainload.report.runs.charts import charts_of
from trainload.report.runs.page import page_of
from trainload.report.runs.run_folder import read_run

EVIL = """<script>alert(1)</script>"><img src=http://evil.example/x onerror=alert(2)> & '$x_1$"""


def page(run_dir: Path) -> Read:
    return Read(page_of(read_run(run_dir)))


@pytest.fixture(scope="module")
def faulty_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with failures, restarts and warnings. No test changes it."""
    return made_run(tmp_path_factory.mktemp("faulty") / "run", FAULTY, world=2)


@pytest.fixture(scope="module")
def faulty(faulty_run: Path) -> Read:
    """The page of that run."""
    return page(faulty_run)


@pytest.fixture(scope="module")
def charts(faulty_run: Path) -> Sequence[Chart]:
    """The charts of that run."""
    return charts_of(read_run(faulty_run).history)


def test_it_lists_the_failures_of_the_run(faulty: Read) -> None:
    for text in (
        "death",
        "rank 1 died",
        "it restarts from its last checkpoint",
        "in a step at step 10",
        "saving at step 10",
    ):
        assert text in faulty.texts
    assert [
        name
        for name in ("curves", "timeline", "failures", "warnings", "run")
        if name not in faulty.values("id")
    ] == []
    titles = "\n".join(faulty.texts)
    for text in (
        "death: rank 1 died",
        "2 -> 1 ranks",
        "node node0 will be gone",
        "checkpoint of step 6",
        "evaluation at step 0: 4",
    ):
        assert text in titles


def test_what_a_failure_has_cost_is_in_its_row(faulty: Read) -> None:
    row = faulty.texts[faulty.texts.index("rank 1 died") :]
    assert row[row.index("it restarts from its last checkpoint") + 1 :][:3] == ["5.0s", "16s", "5"]


def test_there_is_a_chart_for_every_kind_of_number(charts: Sequence[Chart]) -> None:
    assert [chart.name for chart in charts] == [
        "loss",
        "norm",
        "rate",
        "wait",
        "memory",
        "mfu",
        "metric0",
    ]
    assert charts[0].legend == (
        ("train", "training"),
        ("again", "repeated later"),
        ("evaluation", "evaluation"),
        ("restart", "restart"),
        ("checkpoint", "checkpoint"),
    )


def test_what_there_is_no_number_for_has_no_chart(tmp_path: Path) -> None:
    charts = charts_of(
        read_run(made_run(tmp_path / "run", [start(0), *steps(0, range(3))])).history
    )
    assert [chart.name for chart in charts] == ["loss", "norm", "rate", "wait"]
    assert charts[0].legend == (("train", "each step"),)


def test_a_loss_over_several_decades_has_a_logarithmic_scale(tmp_path: Path) -> None:
    wide = [start(0), *(step(number, number, 10.0 * 0.9**number) for number in range(80))]
    charts = charts_of(read_run(made_run(tmp_path / "run", wide)).history)
    assert [chart.note for chart in charts] == ["log scale", "", "", ""]


def test_a_single_outlier_does_not_change_the_scale(tmp_path: Path) -> None:
    flat = [
        start(0),
        *(step(number, number, 1000.0 if number == 50 else 1.0) for number in range(200)),
    ]
    assert charts_of(read_run(made_run(tmp_path / "run", flat)).history)[0].note == ""


def test_a_norm_that_is_not_finite_is_marked(tmp_path: Path) -> None:
    events = [
        start(0),
        step(1, 0),
        step(2, 1, gradient_norm=math.inf),
        step(3, 2, gradient_norm=math.nan),
    ]
    (norm,) = (
        chart
        for chart in charts_of(read_run(made_run(tmp_path / "run", events)).history)
        if chart.name == "norm"
    )
    assert ("broken", "not a finite number") in norm.legend


def test_the_same_journal_gives_the_same_charts(faulty_run: Path, charts: Sequence[Chart]) -> None:
    assert charts_of(read_run(faulty_run).history) == charts


def test_colours_are_the_pages_alone(charts: Sequence[Chart]) -> None:
    assert [re.findall(r"#[0-9a-fA-F]{6}\b|rgb\(", chart.svg) for chart in charts] == [[]] * len(
        charts
    )
    assert "var(--train)" in charts[0].svg


def test_names_in_the_page_are_there_once(faulty: Read) -> None:
    names = faulty.values("id")
    assert sorted(set(names)) == sorted(names)


def sample(number: int, module: str = "layers.3.mlp", **more: Any) -> Event:
    """Return a sample of the statistics of a step."""
    activation = {"module": module, "operator": "relu", "number": 0}
    numbers = {"rms": 0.125, "greatest": 3.5, "zeros": 0.5, "saturated": None}
    parameter = {"parameter": "layers.3.mlp.weight", "norm": 2.0, "gradient": None}
    return event(
        5.0,
        "statistics",
        step=number,
        notes=[f"{module}: the update is 12 % of the parameter"],
        activations=[activation | numbers],
        parameters=[parameter | {"update": 0.25, "ratio": 0.125}],
        **more,
    )


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of a run whose strings all attempt to inject HTML."""
    said = [
        start(0, world=2),
        step(1, 0, metrics={EVIL: 0.5}),
        step(2, 1, metrics={EVIL: 0.6}),
        event(2, "eval", step=1, loss=1.0, metrics={EVIL: 0.5}, seconds=0.1),
        event(3, "warning", message=EVIL),
        event(3, "preemption", message=EVIL, node=EVIL, seconds_left=None),
        event(3, "resize", message=EVIL, world=1),
        failure(4, what=EVIL, message=EVIL, nodes=[EVIL], doing={"0": EVIL}, action=EVIL),
        event(5, "waiting", message=EVIL),
        sample(2, module=EVIL),
        event(6, "failed", error=EVIL, message=EVIL),
    ]
    name = EVIL.replace("/", "")
    asked = {
        "data": f"/{EVIL}",
        "eval_data": EVIL,
        "output": EVIL,
        "package": f"/{EVIL}",
        "libraries": {EVIL: None},
        "versions": {EVIL: EVIL},
    }
    run = made_run(tmp_path_factory.mktemp("hostile") / name, said, world=2, **asked)
    write_state(
        run,
        1,
        Summary(message=EVIL, phase="failed"),
        {0: RankSeen.of(EVIL, 1, 0.0, Doing(graph=EVIL, place=EVIL))},
        over=True,
    )
    return page_of(read_run(run))


def test_strings_of_the_run_stay_texts(hostile: str) -> None:
    found = Read(hostile)
    assert {"script", "img"} & set(found.tags) == set()
    assert [name for _, name, _ in found.attributes if name.startswith("on")] == []
    assert found.text.count(EVIL) >= 12


def test_it_points_to_nothing_outside(hostile: str) -> None:
    found = Read(hostile)
    assert [
        value
        for name in ("src", "href")
        for value in found.values(name)
        if not value.startswith(("#", "data:"))
    ] == []
    assert {"link", "iframe", "object", "embed", "form", "base", "a"} & set(found.tags) == {"link"}
    style = re.findall(r"<style>(.*?)</style>", hostile, re.DOTALL)
    assert len(style) == 1
    assert "@import" not in style[0]
    assert "url(" not in style[0]


def test_a_browser_is_told_to_load_nothing(faulty: Read) -> None:
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in faulty.values(
        "content"
    )


def test_no_secret_is_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "hunter2hunter2")
    signed = "s3://key:hunter2hunter2@bucket/rows.parquet?X-Amz-Signature=hunter2hunter2"
    said = [
        start(0),
        *steps(0, range(3)),
        event(4, "warning", message=f"cannot read '{signed}': gone"),
        failure(5, message=f"no {signed}."),
    ]
    text = page_of(
        read_run(made_run(tmp_path / "run", said, data=signed, eval_data=signed, output=signed))
    )
    assert "hunter2" not in text
    assert text.count("s3://…@bucket/rows.parquet?…") >= 5


def test_the_last_sample_of_statistics_is_shown(tmp_path: Path) -> None:
    events = [start(0.0), *steps(1.0, range(4)), sample(2), sample(4)]
    read = page(made_run(tmp_path / "run", events))
    text = " ".join(read.texts)
    assert "Of step 4, the last one that was sampled." in text
    assert "layers.3.mlp relu 0.125 3.5 50.0% \u2013" in text
    assert "layers.3.mlp.weight 2 \u2013 0.25 0.125" in text
    assert "the update is 12 % of the parameter" in text
    assert "Of step 2" not in text


def test_each_graph_of_a_job_has_its_sample(tmp_path: Path) -> None:
    events = [start(0.0), sample(2, graph="generator"), sample(2, graph="critic")]
    read = page(made_run(tmp_path / "run", events))
    assert "Statistics by module, graph generator" in read.text
    assert "Statistics by module, graph critic" in read.text


def test_a_run_that_has_not_begun_has_a_page(tmp_path: Path) -> None:
    found = page(made_run(tmp_path / "run", []))
    assert "waiting" in found.texts
    assert "svg" not in found.tags


def test_a_run_whose_driver_is_gone_is_lost(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", [start(0), *steps(0, range(3))])
    (run / "state.json").write_text(
        json.dumps(
            {
                "time": BEGIN,
                "host": "elsewhere",
                "pid": 7,
                "attempt": 1,
                "over": False,
                "summary": {"phase": "running"},
                "ranks": {},
            }
        )
    )
    assert "lost" in page(run).texts
    assert "its driver, process 7 on elsewhere, was last heard of at" in page(run).text


MANY = [
    (50_000, "0.5"),
    (500_000, "0.0588"),
    (25_000, "0.858"),
]
"""(steps, minimum of the loss), with more steps than a chart has points."""


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("count", "least"), MANY)
def test_many_steps_are_a_small_page_that_keeps_its_spike(
    tmp_path: Path, count: int, least: str
) -> None:
    run = made_run(tmp_path / "run", [start(0)], steps=count)
    long_journal(run, count, 23_456, 97.0)
    record = read_run(run)
    text = page_of(record)
    assert len(text.encode()) < 2_000_000
    assert len(record.history.steps.number) == count
    assert f"minimum {least}, maximum 97" in text


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_many_failures_and_ranks_are_a_small_page(tmp_path: Path) -> None:
    events: list[Event] = []
    for number in range(120):
        began = number * 100.0
        doing = {str(rank): f"in a step, at {'x' * 900}{rank}" for rank in range(50)}
        events += [start(began, world=2), *steps(began, range(3)), failure(began + 10, doing=doing)]
    run = made_run(tmp_path / "run", events, world=2)
    seen = {rank: RankSeen.of("n" * 56, rank, 0.0, Doing(place="y" * 900)) for rank in range(300)}
    write_state(run, 1, Summary(), seen, over=True)
    text = page_of(read_run(run))
    assert len(text.encode()) < 2_000_000
    found = Read(text)
    assert "The last 100; 20 earlier ones are not shown." in found.texts
    assert "and 42 more" in found.texts
    assert "and 44 more" in found.texts


@pytest.fixture(scope="module")
def resumed(tiny: Package, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped and resumed."""
    run_dir = tmp_path_factory.mktemp("runs") / "resumed"
    plan = trainload.plan(tiny, trainload.Cluster(), "single")

    def ask(told: trainload.Event) -> None:
        if told.kind == "step" and told.data["step"] == 3:
            (run_dir / "stop").touch()

    options: dict[str, Any] = {
        "eval_data": tiny_data,
        "eval_every": 20,
        "overrides": trainload.Overrides(lr=1e-3),
    }
    with pytest.raises(trainload.RunInterrupted):
        trainload.launch(
            tiny,
            plan,
            tiny_data,
            run_dir=run_dir,
            steps=60,
            compile=False,
            backend="local",
            on_event=ask,
            **options,
        )
    trainload.resume(run_dir, backend="local")
    return run_dir


def test_a_real_run_has_all_that_ran(resumed: Path, tiny: Package) -> None:
    found = page(resumed).texts
    for text in (tiny.digest, tiny.manifest.program_digest, "lr 0.001", "single", "60", "ended"):
        assert text in found
    assert any(f"trainload {trainload.__version__}" in text and "torch " in text for text in found)
    record = read_run(resumed)
    assert [attempt.outcome for attempt in record.attempts] == ["stopped", "ended"]
    assert np.isfinite(record.history.steps.columns["loss"]).all()


def test_the_command_writes_into_the_runs_folder_and_replaces_its_own(
    resumed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert cli.run(["report", str(resumed), "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["report"], told["phase"], told["step"], told["attempts"]) == (
            str(resumed / "report.html"),
            "ended",
            60,
            2,
        )
        assert Path(told["report"]).stat().st_size == told["bytes"]


def test_the_command_tells_failures_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made_run(tmp_path / "run", FAULTY, world=2)
    assert (
        cli.run(["report", str(tmp_path / "run"), "--output", str(tmp_path / "x.html"), "--json"])
        == 0
    )
    ((found,), seconds) = (lambda told: (told["failures"], told["seconds"]))(
        json.loads(capsys.readouterr().out)
    )
    assert (found["what"], found["ranks"], found["lost"], found["again"]) == ("death", [1], 16.0, 5)
    assert seconds["steps done again"] == 5.0
    assert Read((tmp_path / "x.html").read_text()).tags[0] == "html"


def test_what_is_no_report_is_not_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made_run(tmp_path / "run", [])
    (tmp_path / "notes.html").write_text("my own")
    line = refused(
        ["report", tmp_path / "run", "--output", tmp_path / "notes.html"], tmp_path, capsys
    )
    assert "it exists already and is not a report" in line


def test_a_place_that_cannot_be_written_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made_run(tmp_path / "run", [])
    line = refused(
        ["report", tmp_path / "run", "--output", tmp_path / "none" / "x.html"], tmp_path, capsys
    )
    assert "x.html: it cannot be written: No such file or directory" in line


@pytest.mark.parametrize("library", ["matplotlib", "jinja2"])
def test_a_library_that_is_not_there_is_named(
    library: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made_run(tmp_path / "run", [])
    for name in [
        name
        for name in sys.modules
        if name.startswith("trainload.report") or name.partition(".")[0] == library
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    line = refused(["report", tmp_path / "run"], tmp_path, capsys)
    assert f"{library} is not installed" in line
    assert "pip install 'trainload[report]'" in line
