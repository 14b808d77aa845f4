"""Redaction of texts before they are shown or written."""

from __future__ import annotations

import pickle

import pytest

from trainload.core import redaction
from trainload.core.errors import StorageError
from trainload.core.redaction import hide, redacted, redacted_data


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_known", {})


SECRETS = {
    "s3://AKIA123:se/cr+et@bucket/folder": "s3://AKIA123:***@bucket/folder",
    "https://user:se/cr+et@host:8443/a?b=c": "https://user:***@host:8443/a?b=c",
    "no answer from http://u:p@ss@127.0.0.1:5000/api now": (
        "no answer from http://u:***@127.0.0.1:5000/api now"
    ),
    "https://ghp_abc@github.example/x": "https://***@github.example/x",
    "zip://rows.npz::https://u:pw@host/x.zip": "zip://rows.npz::https://u:***@host/x.zip",
    "https://x.blob.example/c/a?sv=1&sig=abc%2B&se=2": (
        "https://x.blob.example/c/a?sv=1&sig=***&se=2"
    ),
    "https://b.example/a?X-Amz-Credential=AK&X-Amz-Signature=0f": (
        "https://b.example/a?X-Amz-Credential=***&X-Amz-Signature=***"
    ),
    "https://maps.example/a?api_key=AIza": "https://maps.example/a?api_key=***",
    "redis://:pw@host/0": "redis://:***@host/0",
    "/home/me/s3:/key:secret@bucket/run": "/home/me/s3:/key:***@bucket/run",
}


@pytest.mark.parametrize(("text", "shown"), SECRETS.items(), ids=SECRETS.values())
def test_credentials_in_a_url_are_not_shown(text: str, shown: str) -> None:
    assert redacted(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/a@b/c:d",
        "http://host:8265/runs@now",
        "http://[::1]:8265",
        "abfs://container@account.dfs.example/path",
        "sftp://user@host/path",
        "simplecache::s3://bucket/rows.npz",
        "zip://rows.npz::s3://bucket/x@y.zip",
        "oci://localhost:5000/name@sha256:0f0f",
        "https://host/a?page=2&monkey=1&tokens=5",
        "s3://${env:KEY}:${env:SECRET}@bucket/a",
        "https://host/a?sig=${file:/run/secrets/sig}",
        "user:password@host without a scheme",
        "",
    ],
)
def test_what_holds_no_secret_stays_as_it_is(text: str) -> None:
    assert redacted(text) == text


def test_a_secret_that_is_known_is_shown_as_its_reference_in_every_form() -> None:
    hide('p@"ss/word', "${env:PW}")
    assert (
        redacted('p@"ss/word, p%40%22ss%2Fword, p%40%22ss/word, p@\\"ss/word')
        == "${env:PW}, ${env:PW}, ${env:PW}, ${env:PW}"
    )


def test_a_value_too_short_to_be_a_secret_is_not_looked_for() -> None:
    hide("abc", "${env:PW}")
    assert redacted("abc") == "abc"


def test_of_two_secrets_the_longer_one_is_taken_out_first() -> None:
    hide("hunter", "${env:A}")
    hide("hunter2000", "${env:B}")
    assert redacted("hunter2000 hunter") == "${env:B} ${env:A}"


def test_an_error_holds_no_credentials_here_or_elsewhere() -> None:
    error = StorageError(
        "it fails",
        where="https://u:pw12@host/",
        got="http://u:pw12@host",
        hint="not https://u:pw12@host",
    )
    assert "pw12" not in f"{error} {error.args} {pickle.loads(pickle.dumps(error))} {vars(error)}"


def test_texts_inside_data_are_redacted_too() -> None:
    data = {"message": "https://u:pw12@host/", "of": [{"a": ("https://u:pw12@host/", 3, None)}]}
    assert redacted_data(data) == {
        "message": "https://u:***@host/",
        "of": [{"a": ["https://u:***@host/", 3, None]}],
    }
