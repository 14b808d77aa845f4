"""One node of a run compiles a build, and the other nodes fetch it from that node."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.launch.commands import TRAINLOAD
from tests.manifest.nodes import Cluster, variables

from trainload.launching.cluster.mailbox import Mailbox
from trainload.launching.cluster.shared_builds import read_files, write_files
from trainload.launching.run.journal import Event, losses, read_events
from trainload.packaging.package import Package


@pytest.fixture
def mailbox() -> Mailbox:
    box = Mailbox()
    box.begin(1)
    return box


def test_the_first_node_that_lacks_a_build_makes_it(mailbox: Mailbox) -> None:
    assert [mailbox.claim_build(1, "build", node) for node in ("a", "b", "a")] == [("a", [])] * 3


def test_each_build_has_its_own_maker(mailbox: Mailbox) -> None:
    assert mailbox.claim_build(1, "first", "a")[0] == "a"
    assert mailbox.claim_build(1, "second", "b")[0] == "b"


def test_a_build_that_a_node_has_is_fetched_from_there(mailbox: Mailbox) -> None:
    mailbox.add_build(1, "build", ["its actor"])
    assert mailbox.claim_build(1, "build", "b")[1] == ["its actor"]


def test_a_new_attempt_begins_without_makers(mailbox: Mailbox) -> None:
    mailbox.claim_build(1, "build", "a")
    mailbox.begin(2)
    assert mailbox.claim_build(2, "build", "b") == ("b", [])


def test_a_node_of_an_earlier_attempt_does_not_wait(mailbox: Mailbox) -> None:
    mailbox.claim_build(1, "build", "a")
    mailbox.begin(2)
    assert mailbox.claim_build(1, "build", "b") == ("b", [])
    mailbox.add_build(1, "build", ["old"])
    assert mailbox.claim_build(2, "build", "c") == ("c", [])


def test_files_arrive_in_their_folders(tmp_path: Path) -> None:
    (tmp_path / "here" / "kernels").mkdir(parents=True)
    (tmp_path / "here" / "kernels" / "a.so").write_bytes(b"code")
    (tmp_path / "here" / "index.json").write_bytes(b"{}")
    (tmp_path / "there").mkdir()
    write_files(tmp_path / "there", read_files(tmp_path / "here"))
    assert read_files(tmp_path / "there") == {"index.json": b"{}", "kernels/a.so": b"code"}


@pytest.fixture(scope="module")
def events(
    tiny: Package, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Event]]:
    """Events of a run on two nodes with empty caches of their own."""
    folder = tmp_path_factory.mktemp("nodes")
    cluster = Cluster(folder, variables(folder))
    del cluster.variables["TRAINLOAD_CACHE_DIR"]  # a run sets it on all nodes
    run_dir = folder / "run"
    try:
        cluster.start_head()
        for name in ("first", "second"):
            cluster.variables["XDG_CACHE_HOME"] = str(folder / name)
            cluster.start_worker()
        options = (
            f"--nodes 2 --workers 1 --strategy zero1 --steps 2 --address auto --run-dir {run_dir}"
        )
        command = f"{' '.join(TRAINLOAD)} launch {tiny.path} --data {tiny_data} {options}"
        cluster.submit(command, "run")
        status, output = cluster.ended("run", 300)
        assert status == "SUCCEEDED", output
        yield read_events(run_dir)
    finally:
        cluster.close()


@pytest.mark.ray
@pytest.mark.slow
def test_two_nodes_compile_once(events: list[Event]) -> None:
    sources = sorted(event.data["source"] for event in events if event.kind == "build")
    assert sources == ["another node", "this node's compiler"]


@pytest.mark.ray
@pytest.mark.slow
def test_a_node_trains_with_what_it_has_fetched(events: list[Event]) -> None:
    assert len(losses(events)) == 2
