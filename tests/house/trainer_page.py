"""Trainer's arguments in docs/guides/transformers.md: `python -m tests.house.trainer_page`."""

from __future__ import annotations

from collections.abc import Mapping

from tests.house.source import ROOT

from trainload.trainer_arguments import ACCELERATOR, ARGUMENTS, Argument

PAGE = ROOT / "docs" / "guides" / "transformers.md"
_BEGIN, _END = "<!-- arguments: generated -->\n", "\n<!-- end: arguments -->"


def _rows(arguments: Mapping[str, Argument], prefix: str = "") -> list[str]:
    """Return a row for all arguments with one treatment and reason."""
    described: dict[tuple[str, str], list[str]] = {}
    for name, argument in arguments.items():
        key = (argument.treatment, argument.hint or argument.reason)
        described.setdefault(key, []).append(f"`{prefix}{name}`")
    return [
        f"| {', '.join(names)} | {treatment} | {text} |"
        for (treatment, text), names in described.items()
    ]


def with_table(page: str) -> str:
    """Return the page with its table generated."""
    lines = ["| arguments | | |", "|---|---|---|", *_rows(ARGUMENTS)]
    lines += _rows(ACCELERATOR, "accelerator_config.")
    before, _, rest = page.partition(_BEGIN)
    _, found, after = rest.partition(_END)
    assert found, f"{PAGE.name} has a place for the table"
    return before + _BEGIN + "\n".join(lines) + _END + after


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
