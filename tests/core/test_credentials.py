"""References to secrets, and storage that is opened with them."""

from __future__ import annotations

import base64
import traceback
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from trainload.cli import main as cli
from trainload.core import redaction
from trainload.core.credentials import (
    check_no_credentials,
    no_secrets_raised,
    resolve,
    resolve_options,
)
from trainload.core.errors import IntegrityError, StorageError, TrainingError
from trainload.core.storage.open_files import open_files

SECRET = "hunter2000"


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_known", {})
    monkeypatch.setenv("STORE_PASSWORD", SECRET)


def test_a_reference_stands_for_a_variable_or_for_a_files_text(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("AKIA\n")
    assert (
        resolve(f"s3://${{file:{tmp_path}/key}}:${{env:STORE_PASSWORD}}@b/x")
        == f"s3://AKIA:{SECRET}@b/x"
    )


def test_a_text_without_references_is_itself() -> None:
    assert resolve("s3://bucket/$HOME/{a}") == "s3://bucket/$HOME/{a}"


def test_options_are_resolved_at_every_depth() -> None:
    assert resolve_options(
        {"secret": "${env:STORE_PASSWORD}", "client_kwargs": {"a": "${env:STORE_PASSWORD}", "n": 3}}
    ) == {
        "secret": SECRET,
        "client_kwargs": {"a": SECRET, "n": 3},
    }


REFUSED = {
    "${env:NOT_SET_HERE}": (
        r"\$\{env:NOT_SET_HERE\} names an environment variable that is not set here\. Set"
        r" NOT_SET_HERE"
    ),
    "${file:/nowhere/key}": (
        r"\$\{file:/nowhere/key\} names a file that cannot be read here: No such file"
    ),
    "${file:key}": (
        r"\$\{file:key\} names a file that cannot be read here: the path does not begin with /"
    ),
    "${file:/dev/null}": r"\$\{file:/dev/null\} names a file that is empty",
    "${vault:key}": (
        r"this is not a reference to a secret \(expected \$\{env:NAME\} or \$\{file:/PATH\}, got"
        r" \$\{vault:key\}\)"
    ),
    "${env:KEY": r"this is not a reference to a secret",
    "s3://key:hunter2000@bucket/a": (
        r"s3://key:\*\*\*@bucket/a: the URL contains credentials, which would be written to files\."
        r" Set them"
    ),
}


@pytest.mark.parametrize(("text", "message"), REFUSED.items(), ids=REFUSED.keys())
def test_what_cannot_be_resolved_is_named(text: str, message: str) -> None:
    with pytest.raises(StorageError, match=message) as caught:
        resolve(text)
    assert SECRET not in str(caught.value)


def test_a_value_that_was_resolved_is_shown_no_more() -> None:
    resolve("${env:STORE_PASSWORD}")
    assert (
        str(StorageError("it fails", got=f"{SECRET} is wrong"))
        == "it fails (got ${env:STORE_PASSWORD} is wrong)"
    )


def test_references_in_a_url_are_no_credentials() -> None:
    check_no_credentials("https://${env:NAME}:${env:STORE_PASSWORD}@host/a?sig=${env:SIG}")


def test_an_error_of_somebody_elses_loses_secrets_and_its_cause() -> None:
    resolve("${env:STORE_PASSWORD}")
    with pytest.raises(TrainingError) as caught, no_secrets_raised():
        raise ValueError(f"no {SECRET}") from KeyError(SECRET)
    told = "".join(traceback.format_exception(caught.value))
    assert "ValueError: no ${env:STORE_PASSWORD}" in told
    assert SECRET not in told


def test_an_error_without_secrets_stays_as_it_is() -> None:
    with pytest.raises(ValueError, match="no such thing") as caught, no_secrets_raised():
        raise ValueError("no such thing") from KeyError("x")
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.fixture
def server() -> Iterator[tuple[str, list[str]]]:
    """A web server on loopback that requires the password.

    Yields:
        host:port, and the credentials that it has received.
    """
    shown: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            shown.append(
                base64.b64decode(
                    self.headers.get("Authorization", "Basic ").removeprefix("Basic ")
                ).decode()
            )
            self.send_response(
                403 if shown[-1] != f"me:{SECRET}" else 404 if "missing" in self.path else 200
            )
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def do_HEAD(self) -> None:
            self.do_GET()

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = Thread(target=listening.serve_forever)
        thread.start()
        yield f"127.0.0.1:{listening.server_address[1]}", shown
        listening.shutdown()
        thread.join()


def test_a_store_is_opened_with_the_value_and_called_by_the_reference(
    server: tuple[str, list[str]],
) -> None:
    address, shown = server
    files = open_files(f"http://me:${{env:STORE_PASSWORD}}@{address}/store")
    assert files.read("x", 100) == b"{}"
    assert set(shown) == {f"me:{SECRET}"}
    assert files.url == f"http://me:${{env:STORE_PASSWORD}}@{address}/store"


def test_a_store_that_refuses_shows_no_secret(
    server: tuple[str, list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("STORE_PASSWORD", "another-secret")
    assert cli.run(["releases", f"http://me:${{env:STORE_PASSWORD}}@{server[0]}/store"]) == 2
    printed = capsys.readouterr()
    assert "another-secret" not in printed.out + printed.err
    assert "${env:STORE_PASSWORD}" in printed.err
    assert "me:another-secret" in server[1]


def test_what_is_not_in_a_store_has_no_secret_in_its_traceback(
    server: tuple[str, list[str]],
) -> None:
    files = open_files(f"http://me:${{env:STORE_PASSWORD}}@{server[0]}/store")
    with pytest.raises(IntegrityError) as caught:
        list(files.receive("missing", 2))
    told = "".join(traceback.format_exception(caught.value))
    assert SECRET not in told
    assert "FileNotFoundError" in told


@pytest.mark.parametrize(
    "command",
    [["releases", "{}"], ["push", "x.tl", "{}"], ["pull", "{}", "-o", "new.tl"], ["gc", "{}"]],
)
def test_a_store_is_not_given_with_its_password(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.tl").mkdir()
    assert cli.run([word.format(f"s3://me:{SECRET}@bucket/store") for word in command]) == 2
    printed = capsys.readouterr()
    assert SECRET not in printed.out + printed.err


def test_a_folder_is_found_by_reference(tmp_path: Path) -> None:
    (tmp_path / SECRET).mkdir()
    files = open_files(f"{tmp_path}/${{env:STORE_PASSWORD}}")
    assert files.create("x", b"1")
    assert (tmp_path / SECRET / "x").read_bytes() == b"1"
    assert files.url == f"{tmp_path}/${{env:STORE_PASSWORD}}"
