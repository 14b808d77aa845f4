"""Pulls of a package whose folder is at a URL, from a server of files as any other."""

from __future__ import annotations

import functools
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.launch.tiny import tiny_job

import trainload
from trainload.cli import main as cli
from trainload.core.errors import IntegrityError, StorageError, TrainloadError
from trainload.packaging.package import Package
from trainload.packaging.stores.pull import PullReport


@contextmanager
def served(folder: Path, *, lists: bool = True) -> Iterator[str]:
    """Serve a folder, and yield its URL; with `lists`, the server lists the files of folders."""

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_arguments: Any) -> None:
            pass

        def list_directory(self, path: Any) -> Any:
            if lists:
                return super().list_directory(path)
            self.send_error(403)
            return None

    handler = functools.partial(Handler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return trainload.freeze(tiny_job(), tmp_path_factory.mktemp("served") / "tiny.tl")


@pytest.mark.parametrize("lists", [True, False])
def test_a_package_is_pulled_from_a_server_of_files(
    package: Package, tmp_path: Path, lists: bool
) -> None:
    with served(package.path.parent, lists=lists) as url:
        report = trainload.pull(f"{url}/tiny.tl", tmp_path / "pulled.tl")
    assert isinstance(report, PullReport)
    assert (report.source, report.line, report.release) == (f"{url}/tiny.tl", None, "")
    assert report.fetched_bytes == report.bytes > 0
    assert trainload.open(report.path).digest == report.digest == package.digest


def test_a_signature_is_pulled_too_where_the_server_lists_files(
    package: Package, tmp_path: Path
) -> None:
    signatures = package.path / "signatures"
    signatures.mkdir()
    (signatures / "one.json").write_bytes(b"{}")
    try:
        with served(package.path.parent) as url:
            trainload.pull(f"{url}/tiny.tl", tmp_path / "pulled.tl")
    finally:
        shutil.rmtree(signatures)
    assert (tmp_path / "pulled.tl" / "signatures" / "one.json").read_bytes() == b"{}"


def test_a_damaged_package_at_a_url_leaves_nothing(package: Package, tmp_path: Path) -> None:
    copy = tmp_path / "site" / "tiny.tl"
    shutil.copytree(package.path, copy)
    weights = copy / "weights" / "model-00001-of-00001.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0\0")
    with served(tmp_path / "site") as url, pytest.raises(IntegrityError):
        trainload.pull(f"{url}/tiny.tl", tmp_path / "pulled.tl")
    assert not (tmp_path / "pulled.tl").exists()


def test_the_command_shows_a_package_of_a_url_without_a_release(
    package: Package, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(package.path.parent) as url:
        assert cli.run(["pull", f"{url}/tiny.tl", "-o", str(tmp_path / "pulled.tl")]) == 0
    assert package.digest in capsys.readouterr().out


@pytest.mark.parametrize("options", [{"line": "main"}, {"release": 2}])
def test_a_package_at_a_url_has_no_releases(
    package: Package, tmp_path: Path, options: dict[str, Any]
) -> None:
    with served(package.path.parent) as url, pytest.raises(StorageError, match="It is a package"):
        trainload.pull(f"{url}/tiny.tl", tmp_path / "pulled.tl", **options)


def test_a_pull_of_a_local_package_says_that_it_is_one(package: Package, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"no store.*It is a package"):
        trainload.pull(package.path, tmp_path / "pulled.tl")


def test_a_page_that_is_returned_for_every_path_is_no_package(tmp_path: Path) -> None:
    site = tmp_path / "site" / "tiny.tl"
    site.mkdir(parents=True)
    (site / "manifest.json").write_text("<html>Log in</html>")
    with served(tmp_path / "site") as url, pytest.raises(TrainloadError, match="JSON"):
        trainload.pull(f"{url}/tiny.tl", tmp_path / "pulled.tl")
    assert not (tmp_path / "pulled.tl").exists()
