"""Log messages about tolerated failures."""

from __future__ import annotations

import logging

import pytest

from trainload.core.logs import log_handled, logged_suppress, logs_on_stderr

LOGGER = logging.getLogger("trainload.tests")


def test_a_suppressed_error_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with logged_suppress(LOGGER, "the file was not removed", OSError):
        raise PermissionError("read-only")
    assert caplog.messages == ["the file was not removed: read-only"]


def test_an_error_of_another_type_is_raised(caplog: pytest.LogCaptureFixture) -> None:
    with (
        pytest.raises(ValueError, match="another"),
        logged_suppress(LOGGER, "the file was not removed", OSError),
    ):
        raise ValueError("another")
    assert caplog.messages == []


def test_a_log_message_has_no_credentials(caplog: pytest.LogCaptureFixture) -> None:
    error = OSError("s3://user:hunter22@bucket/key is unreachable")
    log_handled(LOGGER, "https://me:secret99@host/ was not read", error)
    (message,) = caplog.messages
    assert "hunter22" not in message
    assert "secret99" not in message
    assert "is unreachable" in message


def test_an_error_without_text_is_named_by_its_type(caplog: pytest.LogCaptureFixture) -> None:
    log_handled(LOGGER, "no heartbeat", TimeoutError())
    assert caplog.messages == ["no heartbeat: TimeoutError"]


@pytest.mark.parametrize(
    ("level", "expected"),
    [(logging.DEBUG, ["DEBUG: low", "WARNING: high"]), (logging.WARNING, ["WARNING: high"])],
)
def test_messages_from_a_level_on_go_to_stderr(
    level: int, expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with logs_on_stderr(level):
        LOGGER.debug("low")
        LOGGER.warning("high")
    assert capsys.readouterr().err.splitlines() == [f"trainload: {line}" for line in expected]


def test_the_logger_is_as_before_afterwards() -> None:
    logger = logging.getLogger("trainload")
    before = logger.level, list(logger.handlers)
    with logs_on_stderr(logging.DEBUG):
        assert logger.level == logging.DEBUG
    assert (logger.level, logger.handlers) == before
