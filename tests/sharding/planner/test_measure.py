"""A machine is profiled, and the planner uses the profile."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest
from tests.ranks import fork_server

from trainload.cli import main as cli
from trainload.launching.node.measure import OPERATORS, SIZES, fit
from trainload.packaging.package import Package
from trainload.sharding.planner.device import Link, Measured, Span, read, seconds_of


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The profile of this machine that the command writes.

    Its collectives are timed by processes that have already imported torch.
    """
    path = tmp_path_factory.mktemp("profile") / "here.json"
    # Its processes wait for each other in every collective, so tests that use this are `alone` or
    # slow.
    server = fork_server()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing, "get_context", lambda _: server)
        assert cli.run(["measure", "-o", str(path), "--workers", "2"]) == 0
    return path


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_link_is_found_again_in_what_it_takes(ranks: int) -> None:
    link = Link(seconds=2e-5, bytes_per_second=3e9)
    told = read("l4").model_copy(update={"node": link, "network": link})
    timed = [
        Measured(
            operator=name,
            ranks=ranks,
            bytes=size,
            seconds=seconds_of(name, size, Span(ranks, ranks), told),
        )
        for name in OPERATORS
        for size in (1, SIZES[-1])
    ]
    found = fit(timed)
    assert found.seconds == pytest.approx(link.seconds, rel=0.01)
    assert found.bytes_per_second == pytest.approx(link.bytes_per_second, rel=0.01)


@pytest.mark.slow
def test_every_collective_of_every_size_is_timed(measured: Path) -> None:
    timed = read(str(measured)).collectives
    assert [(each.operator, each.bytes) for each in timed] == [
        (name, size) for size in SIZES for name in OPERATORS
    ]
    assert all(each.seconds > 0 and each.ranks == 2 for each in timed)


@pytest.mark.alone
def test_larger_messages_take_longer(measured: Path) -> None:
    reduced = [
        each.seconds for each in read(str(measured)).collectives if each.operator == "all_reduce"
    ]
    assert reduced[-1] > reduced[0]


@pytest.mark.alone
def test_the_file_says_what_was_measured(measured: Path) -> None:
    found = read(str(measured))
    assert found.name == "here"
    assert "2 processes" in found.source
    assert set(found.flops) == {"float32", "bfloat16", "float16"}


@pytest.mark.slow
def test_the_planner_takes_the_file(
    measured: Path, small_package: Package, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [
        "--devices-per-node",
        "2",
        "--device",
        str(measured),
        "--pipeline",
        "1",
        "--tensor",
        "1",
        "--json",
    ]
    assert cli.run(["plan", str(small_package.path), *options]) == 0
    assert json.loads(capsys.readouterr().out)["device"]["name"] == "here"


def test_a_file_that_exists_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "here.json"
    path.write_text("{}")
    assert cli.run(["measure", "-o", str(path)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert path.read_text() == "{}"
