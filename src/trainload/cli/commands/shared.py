"""Options, opening of packages and output, shared by the commands."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TextIO, TypeVar, get_args, get_origin

import click
from click.shell_completion import CompletionItem
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from trainload.cli.view import tables as view
from trainload.cli.view.work_progress import WorkProgress
from trainload.core.atomic import replace_file
from trainload.core.errors import PackageError, StorageError
from trainload.core.formatting import size
from trainload.core.processes import interrupted_by_signals
from trainload.core.storage.places import is_url, local_path, path_here
from trainload.core.suggestions import did_you_mean
from trainload.core.versions import check_supported_torch
from trainload.core.work_steps import steps_shown

if TYPE_CHECKING:
    from trainload.packaging.package import Package

Command = TypeVar("Command", bound=Callable[..., Any])
"""A function to which an option is added."""
DONE, FAILED, WRONG = 0, 1, 2
_PLAIN_SECONDS = 5.0

json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")


def items(names: Iterable[str], incomplete: str) -> list[CompletionItem[str]]:
    """Return the names that begin with what was typed, for a shell."""
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


class Setting(click.ParamType[str]):
    """KEY=VALUE of a setting, whose keys and choices shells complete."""

    name = "setting"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem[str]]:
        """Return the settings' names with "=", or a setting with each of its choices."""
        from trainload.launching.settings.parse import KEYS

        key, equals, _ = incomplete.partition("=")
        if not equals:
            return items([f"{name}=" for name, each in KEYS.items() if not each.info.option], key)
        annotation = KEYS[key].field_info.annotation if key in KEYS else None
        return items([f"{key}={choice}" for choice in literals(annotation)], incomplete)


def literals(annotation: Any) -> list[str]:
    """Return the texts that a type allows, if it allows only some."""
    parts = get_args(annotation)
    if get_origin(annotation) is Literal:
        return [part for part in parts if isinstance(part, str)]
    return [text for part in parts for text in literals(part)]


class Place(click.ParamType[str]):
    """A path, or a name in a store or registry, a URL or a reference, kept as the text that it is.

    Shells complete it as a path.
    """

    name = "place"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem[str]]:
        """Let the shell complete paths."""
        return [CompletionItem(incomplete, type="file")]


class LocalPath(click.Path):
    """A path on this machine, where a URL is an error instead of a path that begins with "s3:"."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(path_here(value), param, ctx)
        except StorageError as error:
            self.fail(str(error), param, ctx)


package_argument = click.argument("package", metavar="PKG", type=LocalPath())
any_package_argument = click.argument("package", metavar="PKG", type=Place())
"""A folder, or the name of a package in a store or registry, for `located`."""
new_package_option = click.option(
    "-o",
    "--output",
    type=LocalPath(),
    required=True,
    metavar="PKG",
    help="Path of the new package.",
)
positive = click.IntRange(min=1)


class RunPlace(click.ParamType[Path]):
    """The folder of a run, or its URL.

    The value is the folder; for a URL a working copy without files, which is removed when the
    command ends.

    Args:
        reads: True if the command reads the run, whose records are read at their URL, also where
            another process has a copy.
    """

    name = "run"

    def __init__(self, *, reads: bool = False) -> None:
        self._reads = reads

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Parse the value of the option."""
        if ctx is not None and ctx.resilient_parsing:  # a shell completes what follows
            return Path(value)
        from trainload.launching.run.working_copy import place_to_read, working_copy

        place = place_to_read(value) if self._reads else value
        if not is_url(place):
            return local_path(place)
        assert ctx is not None, "it is the command's"
        return ctx.with_resource(working_copy(place))

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem[str]]:
        """Let the shell complete folders."""
        return [CompletionItem(incomplete, type="dir")]


run_argument = click.argument("run_dir", metavar="RUN_DIR", type=RunPlace(reads=True))
driven_run_argument = click.argument("run_dir", metavar="RUN_DIR", type=RunPlace())


class HintedUsage(click.UsageError):
    """A wrong combination of arguments, and a hint that says how to fix it."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


class HintedError(click.BadParameter):
    """A value of an option or argument is wrong, and a hint says how to fix it."""

    def __init__(self, message: str, hint: str, **context: Any) -> None:
        super().__init__(message, **context)
        self.hint = hint


class OneOf(click.Choice[str]):
    """One of several names; an error about another one suggests the most similar."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(tuple(names))

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Parse the value of the option."""
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            hint = did_you_mean(str(value), self.choices)
            raise HintedError(error.message, hint, ctx=ctx, param=param) from None


class NamedCount(click.ParamType[tuple[str, int | None]]):
    """One of several names, or NAME/N: (name, N), where N is None if omitted."""

    name = "name"

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, int | None]:
        """Parse the value of the option."""
        if isinstance(value, tuple):
            return value
        name, slash, count = str(value).partition("/")
        if name not in self._names or (
            slash and not (count.isdecimal() and 0 < int(count) <= 2**31)
        ):
            raise HintedError(
                f"{value!r} is not one of {', '.join(self._names)}, optionally followed by /N",
                "" if name in self._names else did_you_mean(name, self._names),
                ctx=ctx,
                param=param,
            )
        return name, int(count) if slash else None

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem[str]]:
        """Return the names."""
        return items(self._names, incomplete)


class CountOf(click.ParamType[tuple[int, str]]):
    """N, or N/NAME: (N, name), where an omitted name is the first one."""

    name = "count"

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, str]:
        """Parse the value of the option."""
        if isinstance(value, tuple):
            return value
        count, slash, name = str(value).partition("/")
        if not (count.isdecimal() and 0 < int(count) <= 2**31) or (
            slash and name not in self._names
        ):
            raise HintedError(
                f"{value!r} is not a positive integer, optionally followed by"
                f" /{', /'.join(self._names)}",
                "" if name in self._names else did_you_mean(name, self._names),
                ctx=ctx,
                param=param,
            )
        return int(count), name if slash else self._names[0]

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem[str]]:
        """Return N/NAME for each name, after a number has been typed."""
        count, _, _ = incomplete.partition("/")
        return items([f"{count}/{name}" for name in self._names] if count else [], incomplete)


class Span(click.ParamType[tuple[int, int]]):
    """N, or A:B: (minimum, maximum)."""

    name = "span"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int]:
        """Parse the value of the option."""
        if isinstance(value, tuple):
            return value
        least, colon, most = str(value).partition(":")
        if (
            not least.isdecimal()
            or (colon and not most.isdecimal())
            or not 0 < int(least) <= int(most or least) <= 2**20
        ):
            self.fail(f"{value!r} is not a positive integer or a range A:B", param, ctx)
        return int(least), int(most or least)


data_option = click.option(
    "--data", required=True, type=Place(), metavar="DATA", help="Training data: files or a URL."
)


def set_option(description: str) -> Callable[[Command], Command]:
    """Add --set, with this help."""
    return click.option(
        "--set",
        "assignments",
        multiple=True,
        type=Setting(),
        metavar="KEY=VALUE",
        help=description,
    )


@contextmanager
def working(title: str) -> Iterator[WorkProgress]:
    """Show on stderr what is being done while the block does it: the title, then the steps that the
    work names.

    SIGTERM and SIGHUP interrupt the block as Ctrl-C does, so that it removes its temporary files.
    """
    with (
        interrupted_by_signals(),
        WorkProgress(err(), title) as progress,
        steps_shown(progress.update),
    ):
        yield progress


class Transfer:
    """Progress of a transfer on stderr: a bar on a terminal, otherwise a line every few seconds."""

    def __init__(self, title: str) -> None:
        self._what = title
        self._signals = ExitStack()
        self._console = err()
        self._last = time.monotonic()
        self._task: TaskID | None = None
        self._bar: Progress | None = None
        if self._console.is_interactive:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task(title, total=None)

    def __enter__(self) -> Self:
        self._signals.enter_context(interrupted_by_signals())
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._signals.close()

    def __call__(self, done: int, total: int) -> None:
        """Show the number of transferred bytes, and of all bytes."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, total=total)
        elif time.monotonic() - self._last >= _PLAIN_SECONDS:
            self._last = time.monotonic()
            self.say(f"{self._what}: {size(done)} of {size(total)}")

    def say(self, text: str) -> None:
        """Write one line."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def open_package(path: Path) -> Package:
    """Open the package that a command was given."""
    if not path.exists():
        raise PackageError("there is no such package", where=str(path))
    check_supported_torch()
    from trainload.launching.node.libraries import open_with

    return _print_library_warnings(
        open_with(path, libraries(), trust_extensions=trusts_extensions())
    )


def _print_library_warnings(package: Package) -> Package:
    """Warn about operator libraries that differ from the recorded ones; return the package."""
    from trainload.launching.node.libraries import library_warnings

    for warning in library_warnings(package, libraries()):
        err().print(f"warning: {warning}", markup=False, highlight=False, soft_wrap=True)
    return package


def trusts_extensions() -> bool:
    """Return True if the program was called with --trust-extensions."""
    return bool(click.get_current_context().find_root().params.get("trust_extensions", False))


def located(name: str) -> tuple[str | None, Path]:
    """Return a package's name in a store or registry (None for a folder), and its folder.

    A package in a store is fetched into this machine's cache if it is not there.
    """
    check_supported_torch()
    from trainload.launching.node.fetching import here
    from trainload.packaging.stores.references import is_reference

    if not is_reference(name):
        return here(name)
    with Transfer("fetch") as transfer:
        return here(name, on_progress=transfer)


def open_to_run(name: str) -> Package:
    """Open a package that the policies allow to run; no library is imported for it before.

    A package in a store is fetched.
    """
    source, path = located(name)
    from trainload.launching.node.libraries import open_for_run
    from trainload.packaging.signatures.policy import find_policies

    if not path.exists():
        raise PackageError("there is no such package", where=name)
    package = open_for_run(
        path, libraries(), find_policies(policy()), None, trust_extensions=trusts_extensions()
    )
    return _print_library_warnings(replace(package, source=source))


def libraries() -> dict[str, str | None]:
    """Return the program's --library options: namespace -> module or file; None for a namespace
    that is only allowed.
    """
    options: tuple[str, ...] = click.get_current_context().find_root().params.get("library", ())
    by_namespace: dict[str, str | None] = {}
    for text in options:
        namespace, _, location = text.partition("=")
        if not namespace.isidentifier():
            raise click.UsageError(
                f"--library {text}: expected NAMESPACE=MODULE, where MODULE may be a .py file."
            )
        by_namespace[namespace] = location or None
    return by_namespace


def policy() -> Path | None:
    """Return the program's --policy option."""
    path: Path | None = click.get_current_context().find_root().params.get("policy")
    return path


def program_options() -> list[str]:
    """Return the program's own options that the same command needs on another machine.

    --policy is not included, since it names a file of this machine.
    """
    by_namespace = libraries()
    words = [
        word
        for name, place in by_namespace.items()
        for word in ("--library", name if place is None else f"{name}={place}")
    ]
    return [*words, *(["--trust-extensions"] if trusts_extensions() else [])]


def write_text(path: Path, text: str) -> None:
    """Write an output file of a command."""
    from trainload.packaging.format.package_files import check_outside_packages

    check_outside_packages(path)
    try:
        if path.exists() and not path.is_file():  # a device or a pipe, which has no old content
            path.write_text(text, encoding="utf-8")
        else:
            replace_file(Path(os.path.realpath(path)), text.encode(), durable=False)
    except OSError as error:
        raise StorageError(f"it cannot be written: {error.strerror}", where=str(path)) from error


def show_record(result: Any, as_json: bool) -> None:
    """Print a record: as JSON, or as a table."""
    if as_json:
        print_json(result)
    else:
        out().print(view.record_table(result))


class _WholeWords(Console):
    """A console that leaves words that are longer than a line to the terminal."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as `Console.print` does, without cropping lines."""
        super().print(*objects, **{"crop": False, **options})


def out() -> Console:
    """Return the console for results."""
    return _console(sys.stdout)


def err() -> Console:
    """Return the console for progress and errors."""
    return _console(sys.stderr)


def _console(file: TextIO) -> Console:
    """Return a console that redraws lines only on a terminal: FORCE_COLOR is for colours."""
    return _WholeWords(file=file, force_interactive=None if file.isatty() else False)


def print_json(value: Any) -> None:
    """Print one JSON value."""
    sys.stdout.write(view.dump_json(value) + "\n")
    sys.stdout.flush()  # a cluster may still have to end
