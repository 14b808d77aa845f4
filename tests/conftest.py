"""Configure pytest: select tests by markers, import the shared fixtures, report slow tests."""

from __future__ import annotations

import gc
import signal
from pathlib import Path

import hypothesis
import pytest
from tests.selection import mark_items, may_be_selected, unmatched_patterns
from tests.timings import add_limit_option, report_timings

from trainload.core.processes import in_main_thread

hypothesis.settings.register_profile("suite", deadline=None, derandomize=True)
"""Hypothesis profile of the suite.

There is no deadline, since the machine may be busy, and every run tries the same examples; `make
fuzz` looks for new ones.
"""
hypothesis.settings.load_profile("suite")


def pytest_configure(config: pytest.Config) -> None:
    """Import the fixtures, collect garbage less often, and restore Ctrl-C.

    A suite that runs in the background of a shell ignores SIGINT, and so would the processes that
    it starts, but some tests send it.

    Garbage is collected less often because graphs consist of many objects that live for one test;
    scanning them takes a tenth of the time. The process that distributes the tests to pytest-xdist
    workers runs none, so it does not import the fixtures, which takes seconds.
    """
    deals_out = bool(config.getoption("numprocesses", None)) and not hasattr(config, "workerinput")
    if not deals_out:
        config.pluginmanager.import_plugin("tests.fixtures")
    gc.set_threshold(200_000, 20, 50)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and in_main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Exclude the imported modules from garbage collection: they live as long as the process."""
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the suite's own options."""
    add_limit_option(parser)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore files without tests that `-m` can select.

    Importing all of them takes longer than some selections run.
    """
    return None if may_be_selected(collection_path, config.getoption("markexpr")) else True


@pytest.hookimpl(tryfirst=True)  # before pytest selects by -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests `ray`, `alone` and `slow`.

    A matrix that names cases that do not exist is an error, unless single tests were requested.
    """
    mark_items(items)
    if not any("::" in argument for argument in config.args) and (
        unmatched := unmatched_patterns(items)
    ):
        raise pytest.UsageError(
            "mark.matrix names cases that do not exist:\n" + "\n".join(unmatched)
        )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the tests that exceed `--limit`."""
    report_timings(terminalreporter)
