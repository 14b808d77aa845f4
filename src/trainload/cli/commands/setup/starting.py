"""Commands for newcomers: a first job file, and completion of commands in a shell."""

from __future__ import annotations

import shlex
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import click

from trainload.cli.commands.shared import LocalPath, OneOf, json_option, out, print_json, write_text
from trainload.cli.view import tables as view
from trainload.core.errors import StorageError

KINDS = ("module", "transformers", "trainer")
"""Kinds of job files, each with a template of its name."""
SHELLS = ("bash", "zsh", "fish")
_PROGRAM = "trainload"
_FILE = "job.py"
_UNSUITABLE = frozenset('"\\')
"""Characters of a path that the docstring of a Python file cannot hold as they are."""


@click.command(short_help="Write a job file.")
@click.argument("place", metavar="[FILE or FOLDER]", type=LocalPath(), default=_FILE)
@click.option(
    "--kind",
    type=OneOf(KINDS),
    default="module",
    show_default=True,
    help="Kind of the model.",
)
@json_option
def init(place: Path, kind: Literal["module", "transformers", "trainer"], as_json: bool) -> None:
    """Write a commented job file, job.py by default, that can be frozen and trained at once.

    It has a small model and sample data, to be replaced by yours. A path that does not end in .py
    is a folder, which is created.

    \b
    module        a model of your own, an nn.Module
    transformers  a transformers model, with your own loss and optimizer
    trainer       a Hugging Face Trainer script: its model and arguments
    """
    file = place if place.suffix == ".py" and not place.is_dir() else place / _FILE
    if not str(file).isprintable() or not _UNSUITABLE.isdisjoint(str(file)):
        raise StorageError(
            "its name cannot be written into a Python file",
            where=repr(str(file)),
            expected='printable characters other than " and \\',
            hint="Choose another name. Names that are not ASCII need a UTF-8 locale.",
        )
    if file.exists():
        raise StorageError(
            "it exists already", where=str(file), hint="Choose another path, or remove it."
        )
    if _is_installed(file.stem):
        raise StorageError(
            f"a module named {file.stem} is installed, and the file would be imported in its place",
            where=str(file),
            hint="Choose another name.",
        )
    package = file.with_suffix(".tl")
    spec, made = _argument(file), _argument(package)
    commands = [
        f"{_PROGRAM} freeze {shlex.quote(f'{spec}:job')} -o {shlex.quote(made)}",
        f"{_PROGRAM} launch {shlex.quote(made)}"
        f" --data {shlex.quote(f'python:{spec}:rows')} --backend local",
    ]
    template = _template(kind)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"the folder cannot be created: {error.strerror}", where=str(file.parent)
        ) from error
    text = template.replace("{spec}", _argument(Path(file.name)))
    text = text.replace("{package}", _argument(Path(package.name)))
    write_text(file, text)
    if as_json:
        print_json({"file": file, "kind": kind, "next": commands})
        return
    out().print(view.table([("written", str(file))]))
    for command in commands:
        out().print(f"    {command}", markup=False, highlight=False, soft_wrap=True)


def _argument(path: Path) -> str:
    """Return a path as an argument, which does not look like an option."""
    return f"./{path}" if str(path).startswith("-") else str(path)


def _template(name: str) -> str:
    return (files("trainload.cli") / "templates" / f"{name}.txt").read_text(encoding="utf-8")


def _is_installed(name: str) -> bool:
    """Return True if a module of this name can be imported, but not from the current folder."""
    if not name.isidentifier() or name == "__main__":
        return False
    spec = find_spec(name)
    if spec is None:
        return False
    places = [Path(place).parent for place in spec.submodule_search_locations or ()]
    if spec.has_location and spec.origin is not None:
        places.append(Path(spec.origin).parent)
    return Path.cwd() not in places


@click.command(short_help="Complete in a shell.")
@click.argument("shell", type=OneOf(SHELLS), metavar="SHELL")
@json_option
def completion(shell: str, as_json: bool) -> None:
    """Print the script that completes commands, options, values and files in SHELL.

    \b
    bash  add to ~/.bashrc: eval "$(trainload completion bash)"
    zsh   add to ~/.zshrc:  eval "$(trainload completion zsh)"
    fish  trainload completion fish > ~/.config/fish/completions/trainload.fish
    """
    script = _template(f"completion.{shell}")
    if as_json:
        print_json({"shell": shell, "script": script})
    else:
        click.echo(script, nl=False)
