"""Write docs/images/terminal.svg: the commands of the first tutorial and what they print.

    python -m tests.documentation.record_terminal

The commands are run; nothing is written by hand. Lines that only a longer picture would need are
left out by `LEFT_OUT`.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text
from tests.documentation.page_commands import blocks
from tests.documentation.page_runner import output_of
from tests.house.source import ROOT

PAGE = ROOT / "docs" / "tutorials" / "first-package.md"
PICTURE = ROOT / "docs" / "images" / "terminal.svg"
COMMANDS = (
    "trainload freeze job.py:job -o spirals.tl",
    "trainload launch spirals.tl --data train.npz --eval-data test.npz \\\n"
    "    --workers 2 --strategy zero1 --run-dir run --output trained.tl",
    "trainload export trained.tl --to pt2 -o spirals.pt2",
)
LEFT_OUT = re.compile(r"^(stage|build:|run dir|seconds|restarts|output digest|evaluations| {5,})")
WIDTH = 100
_FONTS = re.compile(r"@font-face \{.*?\}\n", re.DOTALL)


def record(folder: Path) -> Text:
    """Run the commands in a folder and return the terminal's text."""
    for block in blocks(PAGE):
        if block.title:
            (folder / block.title).write_text(block.text)
    output_of([sys.executable, "make_data.py"], "", folder)
    text = Text()
    for command in COMMANDS:
        text.append("$ ", style="bold green").append(f"{command}\n", style="bold")
        printed = output_of(["bash"], command, folder).replace(f"{folder}/", "")
        lines = [line for line in printed.splitlines() if not LEFT_OUT.match(line)]
        text.append("\n".join(line.rstrip() for line in lines) + "\n")
    return text


def main() -> None:
    """Record the commands and write the picture, without fonts from the network."""
    with tempfile.TemporaryDirectory() as folder:
        text = record(Path(folder))
    console = Console(record=True, width=WIDTH, file=sys.stderr)
    console.print(text, soft_wrap=False, highlight=False)
    picture = console.export_svg(title="trainload", unique_id="terminal")
    PICTURE.write_text(_FONTS.sub("", picture))


if __name__ == "__main__":
    main()
