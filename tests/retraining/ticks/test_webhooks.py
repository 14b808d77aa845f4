"""Webhooks of a retraining: what they receive, and that they neither fail nor delay a tick."""

from __future__ import annotations

import base64
import json
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.house.source import python_blocks
from tests.packaging.places import retrained
from tests.ports import free_port
from tests.retraining.pretended import LINE, at, config_of
from tests.retraining.ticks.hook_server import Hook, hook_server, is_signed

from trainload.cli import main as cli
from trainload.core.errors import RequestError, StorageError
from trainload.packaging.package import Package
from trainload.packaging.stores.push import push
from trainload.packaging.stores.releases import shown
from trainload.packaging.stores.store import Store
from trainload.retraining.config.config import Config, Outcome, Webhook, checked
from trainload.retraining.ticks import webhooks
from trainload.retraining.ticks.announcements import announce
from trainload.retraining.ticks.lineage import rollback
from trainload.retraining.ticks.tick_records import Ended, Ticks, name_of
from trainload.retraining.ticks.webhooks import deliver

Patch = pytest.MonkeyPatch


@pytest.fixture
def hook() -> Iterator[Hook]:
    with hook_server() as server:
        yield server


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: Patch) -> None:
    monkeypatch.setattr(webhooks, "_FIRST_PAUSE", 0.0)


@pytest.fixture
def store(tiny: Package, tmp_path: Path) -> Store:
    """A line with one release, which is current."""
    push(tiny.path, str(tmp_path / "store"), line=LINE, message="the first")
    return Store(tmp_path / "store")


def hooked(store: Store, *hooks: dict[str, Any]) -> Config:
    return config_of(Path(store.url), webhooks=hooks)


def ended(
    store: Store, number: int, outcome: Outcome = "rejected", *, write: bool = False
) -> Ended:
    """Return the end of a tick; with `write`, also write its record."""
    ticks = Ticks(store, LINE)
    fields: dict[str, Any] = {"outcome": outcome, "reason": "the loss is too large"}
    fields |= {"release": None, "pointer": None, "warnings": ()}
    make = ticks.write if write else ticks.draft
    return make(Ended, name_of(at(number)), **fields)


def test_a_message_has_the_signature_of_the_standard(hook: Hook, monkeypatch: Patch) -> None:
    secret = b"\x01\xff a key of bytes"
    monkeypatch.setenv("HOOK_SECRET", f"whsec_{base64.b64encode(secret).decode()}")
    deliver(Webhook(url=hook.url, secret="${env:HOOK_SECRET}"), "main-tick-1", {"type": "promoted"})
    ((headers, body),) = hook.requests
    assert is_signed(headers, body, secret)
    assert not is_signed(headers, body + b" ", secret)
    assert (headers["webhook-id"], headers["content-type"]) == ("main-tick-1", "application/json")
    assert json.loads(body) == {"type": "promoted"}


def test_the_signature_is_that_of_the_examples_of_the_standard() -> None:
    headers = webhooks.headers_of(
        "msg_p5jXN8AQM9LWM0D4loKWxJek",
        b'{"test": 2432232314}',
        "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
        1614265330,
    )
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_the_receiver_of_the_documentation_verifies_messages(
    hook: Hook, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("HOOK_SECRET", "open sesame")
    deliver(Webhook(url=hook.url, secret="${env:HOOK_SECRET}"), "1", {})
    ((headers, body),) = hook.requests
    scope: dict[str, Any] = {}
    exec(python_blocks("docs/guides/trackers.md")[1], scope)
    assert scope["is_from_trainload"](headers, body, b"open sesame")
    assert not scope["is_from_trainload"](headers, body, b"open")


def test_a_plain_text_is_a_secret_too(hook: Hook, monkeypatch: Patch) -> None:
    monkeypatch.setenv("HOOK_SECRET", "open sesame")
    deliver(Webhook(url=hook.url, secret="${env:HOOK_SECRET}"), "1", {})
    assert is_signed(*hook.requests[0], b"open sesame")


def test_an_answer_of_500_is_tried_again_with_the_same_id() -> None:
    with hook_server(lambda number: 500 if number < 2 else 200) as hook:
        assert deliver(Webhook(url=hook.url), "7", {}) == 3
    assert hook.ids == ["7", "7", "7"]


@pytest.mark.parametrize(("status", "attempts"), [(500, 3), (429, 3), (404, 1), (302, 1)])
def test_what_cannot_succeed_is_not_tried_again(status: int, attempts: int) -> None:
    with (
        hook_server(lambda number: status) as hook,
        pytest.raises(StorageError, match=f"status {status}"),
    ):
        deliver(Webhook(url=hook.url), "7", {})
    assert len(hook.requests) == attempts


def test_a_server_that_hangs_is_given_up(monkeypatch: Patch) -> None:
    over = threading.Event()

    def hang(number: int) -> int:
        over.wait()
        return 200

    with hook_server(hang) as hook:
        slow = checked_hook(url=hook.url, timeout="1s", attempts=1)
        with pytest.raises(StorageError, match="webhook"):
            deliver(slow, "7", {})
        over.set()


def test_a_server_that_is_gone_is_named_by_its_reference(monkeypatch: Patch) -> None:
    monkeypatch.setenv("HOOK_URL", f"http://127.0.0.1:{free_port()}/secret-path")
    with pytest.raises(StorageError, match="cannot be reached") as caught:
        deliver(Webhook(url="${env:HOOK_URL}", attempts=1), "7", {})
    assert "${env:HOOK_URL}" in str(caught.value)
    assert "secret-path" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/hostname",
        "data:,secret-part",
        "ftp://example.org/secret-part",
        "https:///secret-part",
        "https://example.org/secret-part x",
        "https://example.org/x\nsecret-part",
        "http://127.0.0.1:secret-part/x",
        "http://[secret-part/x",
        "https://me:secret-part@example.org/x",
        "https://example.org/größe-secret-part",
    ],
)
def test_a_reference_to_anything_but_a_url_of_http_is_rejected_without_its_value(
    url: str, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("HOOK_URL", url)
    with pytest.raises(StorageError, match=r"\$\{env:HOOK_URL\}: this is not the URL") as caught:
        deliver(Webhook(url="${env:HOOK_URL}", attempts=1), "7", {})
    assert "secret-part" not in "".join(traceback.format_exception(caught.value))


def test_a_reference_may_be_a_part_of_a_url_and_end_in_a_line_break(
    hook: Hook, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("HOOK_TOKEN", "T0/B0/abc?x=1\n")
    deliver(Webhook(url=f"{hook.url}/${{env:HOOK_TOKEN}}"), "7", {})
    assert hook.ids == ["7"]


@pytest.mark.parametrize("secret", ["whsec_", "whsec_not base64", "whsec_äöü"])
def test_a_secret_that_is_no_key_is_rejected_without_its_value(
    hook: Hook, monkeypatch: Patch, secret: str
) -> None:
    monkeypatch.setenv("HOOK_SECRET", secret)
    with pytest.raises(StorageError, match="not valid base64") as caught:
        deliver(Webhook(url=hook.url, secret="${env:HOOK_SECRET}"), "7", {})
    assert secret not in str(caught.value).replace("whsec_ and", "")
    assert hook.requests == []


def test_two_webhooks_of_one_url_are_rejected() -> None:
    least = {"store": "s", "line": LINE, "data": {"files": "a"}, "evaluation": {"hold_out": 0.1}}
    hooks = [{"url": "https://example.org"}, {"url": "https://example.org", "events": ["failed"]}]
    with pytest.raises(RequestError, match=r"webhooks.*each URL once"):
        checked({**least, "webhooks": hooks}, "the test")


def checked_hook(**keys: Any) -> Webhook:
    least = {"store": "s", "line": LINE, "data": {"files": "a"}, "evaluation": {"hold_out": 0.1}}
    return checked({**least, "webhooks": [keys]}, "the test").webhooks[0]


@pytest.mark.parametrize(
    "keys",
    [
        {"url": "ftp://example.org"},
        {"url": "https://me:password@example.org"},
        {"url": "https://example.org", "secret": "in plain text"},
        {"url": "https://example.org", "events": ["explosion"]},
    ],
)
def test_secrets_in_the_file_and_unknown_events_are_rejected(keys: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"webhooks\.0"):
        checked_hook(**keys)


def test_an_unknown_key_of_a_webhook_is_rejected_with_the_nearest() -> None:
    with pytest.raises(RequestError, match="Did you mean secret"):
        checked_hook(url="https://example.org", secrets="${env:A}")


def test_a_tick_is_announced_once_however_often_it_is_repeated(store: Store, hook: Hook) -> None:
    config, end = hooked(store, {"url": hook.url}), ended(store, 0)
    for _ in range(3):
        assert announce(config, store, ended=end) == ()
    assert hook.types == ["rejected"]
    (message,) = hook.messages
    assert (message["data"]["tick"], message["data"]["line"]) == (end.tick, LINE)
    assert message["data"]["reason"] == "the loss is too large"


def test_what_could_not_be_delivered_is_delivered_by_the_next_tick(store: Store) -> None:
    with hook_server(lambda number: 500 if number < 3 else 200) as hook:
        config = hooked(store, {"url": hook.url})
        (problem,) = announce(config, store, ended=ended(store, 0))
        assert "status 500" in problem
        ended(store, 0, write=True)
        assert announce(config, store, ended=ended(store, 1, "failed")) == ()
    assert hook.types == ["rejected", "rejected", "rejected", "rejected", "failed"]
    assert len(set(hook.ids)) == 2


def test_a_webhook_receives_only_the_events_that_it_names(store: Store, hook: Hook) -> None:
    config = hooked(store, {"url": hook.url, "events": ["failed"]})
    announce(config, store, ended=ended(store, 0, write=True))
    announce(config, store, ended=ended(store, 1, "failed"))
    assert hook.types == ["failed"]


def test_a_new_webhook_does_not_receive_the_history(store: Store, hook: Hook) -> None:
    ended(store, 0, write=True)
    announce(hooked(store, {"url": hook.url}), store, ended=ended(store, 1))
    assert [message["data"]["tick"] for message in hook.messages] == [name_of(at(1))]


def test_a_webhook_that_fails_does_not_keep_others_from_an_event(store: Store, hook: Hook) -> None:
    away = f"http://127.0.0.1:{free_port()}"
    config = hooked(store, {"url": away}, {"url": hook.url})
    (problem,) = announce(config, store, ended=ended(store, 0))
    assert "the webhook cannot be reached" in problem
    assert hook.types == ["rejected"]


def push_second(store: Store, package: Package) -> str:
    """Publish a second release, which is not current, and return its number."""
    changed = retrained(package, Path(store.url).parent / "second.tl", "head.weight")
    return push(changed.path, store.url, line=LINE, promote=False).release


def test_the_next_tick_announces_manual_promotions_and_rollbacks(
    store: Store, hook: Hook, tiny: Package
) -> None:
    config = hooked(store, {"url": hook.url})
    announce(config, store, ended=ended(store, 0, write=True))
    promoted = store.promote(LINE, push_second(store, tiny), reason="it is better")
    back = rollback(store, LINE)
    announce(config, store, ended=ended(store, 1))
    by_id = dict(zip(hook.ids, hook.messages, strict=True))
    data = by_id[f"{LINE}-current-{promoted.id}"]["data"]
    assert (data["release"], data["previous"], data["reason"]) == ("2", "1", "it is better")
    assert by_id[f"{LINE}-current-{back.id}"]["type"] == "rolled back"
    assert by_id[f"{LINE}-current-{back.id}"]["data"]["package"] == back.package


def test_the_commands_announce_a_promotion_and_a_rollback_at_once(
    store: Store, hook: Hook, tiny: Package, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "retrain.yaml"
    file.write_text(json.dumps(hooked(store, {"url": hook.url}).to_json()))
    push_second(store, tiny)
    assert cli.run(["promote", store.url, "2", "--retraining", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["warnings"] == []
    assert cli.run(["rollback", store.url, "--retraining", str(file)]) == 0
    assert hook.types[-2:] == ["promoted", "rolled back"]
    assert [message["data"]["release"] for message in hook.messages[-2:]] == ["2", "1"]


def test_a_command_warns_of_a_webhook_that_is_away_and_succeeds(
    store: Store, tiny: Package, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    away = {"url": f"http://127.0.0.1:{free_port()}", "attempts": 1}
    file = tmp_path / "retrain.yaml"
    file.write_text(json.dumps(hooked(store, away).to_json()))
    push_second(store, tiny)
    assert cli.run(["promote", store.url, "2", "--retraining", str(file)]) == 0
    assert "warning: " in capsys.readouterr().err
    current = store.current(LINE)
    assert current is not None
    assert shown(current.release) == "2"


def test_a_retraining_of_another_line_is_rejected_before_the_promotion(
    store: Store, tiny: Package, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "retrain.yaml"
    raw = hooked(store).to_json() | {"line": "other"}
    file.write_text(json.dumps(raw))
    push_second(store, tiny)
    assert cli.run(["promote", store.url, "2", "--retraining", str(file)]) == 2
    assert "this is the retraining of another line" in capsys.readouterr().err
    current = store.current(LINE)
    assert current is not None
    assert shown(current.release) == "1"
