"""Execution of a command line, and the report of its error: one line on stderr, or with --json a
JSON object on stdout.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack

import click
from click.exceptions import NoSuchCommand

from trainload.cli.commands.shared import DONE, FAILED, WRONG, HintedError, HintedUsage, print_json
from trainload.core.errors import CaptureError, RequestError, TrainloadError, WeightsError
from trainload.core.processes import termination_signals_ignored
from trainload.core.redaction import redacted
from trainload.core.suggestions import did_you_mean

_log = logging.getLogger(__name__)
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO})
"""Errors of a write that name no file."""


def _report(
    arguments: Sequence[str], kind: str, message: str, status: int, **details: object
) -> int:
    """Report an error once: as a line on stderr (more, if it has findings or a table), or with
    --json as an object on stdout.

    Returns `status`.
    """
    message = redacted(message)
    described = {k: v for k, v in details.items() if v}
    error = {"kind": kind, "message": message, "exit": status, **described}
    if "--json" not in arguments or not _printed({"error": error}):
        has_lines = details.get("findings") or details.get("table")
        sys.stderr.write(f"trainload: {message if has_lines else ' '.join(message.split())}\n")
    return status


def _printed(value: object) -> bool:
    """Print a JSON value; return False if stdout is full, and is not written to any more."""
    try:
        print_json(value)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return False
    return True


def _hint_of(error: click.ClickException) -> str:
    """Return the hint of an error about the command line: the most similar known name."""
    if isinstance(error, HintedError | HintedUsage):
        return error.hint
    command = error.ctx.command if isinstance(error, click.UsageError) and error.ctx else None
    if isinstance(error, click.NoSuchOption) and command is not None and error.ctx is not None:
        known = [
            name
            for param in command.get_params(error.ctx)
            if isinstance(param, click.Option)
            for name in (*param.opts, *param.secondary_opts)
        ]
        return did_you_mean(error.option_name, known)
    if isinstance(error, NoSuchCommand) and isinstance(command, click.Group):
        return did_you_mean(error.command_name, command.commands)
    return ""


def run_group(group: click.Command, arguments: Sequence[str]) -> int:
    """Run one command line of a group of commands, without the program's name.

    Returns the exit status.
    """
    until_end = ExitStack()
    try:
        return _run(group, arguments, until_end)
    finally:
        with termination_signals_ignored():  # the result or the error is printed
            until_end.close()


def hold_until_end(resource: AbstractContextManager[object]) -> None:
    """Enter a context until this command has ended, and has reported its error."""
    stack = click.get_current_context().find_object(ExitStack)
    assert stack is not None, "run_group sets it"
    stack.enter_context(resource)


def _run(group: click.Command, arguments: Sequence[str], until_end: ExitStack) -> int:
    try:
        status = group.main(
            list(arguments), prog_name="trainload", standalone_mode=False, obj=until_end
        )
    except TrainloadError as error:
        status = WRONG if isinstance(error, RequestError) and not error.work_began else FAILED
        # "cure" is the name that "hint" had; scripts read it.
        details: dict[str, object] = {
            "where": error.where,
            "expected": error.expected,
            "got": error.got,
            "hint": error.hint,
            "cure": error.hint,
        }
        if isinstance(error, WeightsError):
            details["table"] = error.table
        if isinstance(error, CaptureError):
            details["findings"] = [finding.as_json() for finding in error.findings]
        return _report(
            arguments, type(error).__name__, str(error), status, problem=error.problem, **details
        )
    except click.exceptions.NoArgsIsHelpError as error:
        sys.stderr.write(error.format_message() + "\n")
        return WRONG
    except click.ClickException as error:
        hint = _hint_of(error)
        # click appends suggestions of its own to these two
        suggests = isinstance(error, click.NoSuchOption | NoSuchCommand)
        problem = error.message if suggests else error.format_message()
        message = f"{problem.rstrip('.')}. {hint}" if hint else problem
        return _report(arguments, "UsageError", message, WRONG, hint=hint)
    except click.Abort:
        return _report(arguments, "Interrupted", "interrupted", FAILED)
    except OSError as error:
        if error.filename is None and error.errno not in _FULL:
            raise
        # a path that the system rejects, in whichever option it was
        _log.debug("the command failed", exc_info=True)
        where = "" if error.filename is None else os.fsdecode(error.filename)
        problem = error.strerror or type(error).__name__
        message = f"{where}: {problem}" if where else problem
        return _report(arguments, "StorageError", message, FAILED, problem=problem, where=where)
    return status if isinstance(status, int) else DONE
