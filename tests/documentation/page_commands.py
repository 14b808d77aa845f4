"""Commands of the pages: every one of them runs in a test, or has a named reason not to.

Commands are in `bash` blocks; in a `console` block they begin with "$ ", and their output follows.
Other blocks have none, so that no command of a page escapes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tests.house.source import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
AS_PROGRAMS = ("docs/tutorials/", "docs/how-to/")
"""Folders whose pages run as programs: test_pages_run.py. The others run in test_guides_run.py."""
WITH_A_RUN = (
    "docs/how-to/make-a-step-faster.md",
    "docs/how-to/run-without-a-shared-file-system.md",
)
"""Pages of these folders that need a run that trains, or a bucket: they run as the others do."""
PROGRAMS = (
    r"aws|cd|curl|docker|git|hf|kubectl|make|mkdir|model_signing|openssl|oras|pip|python3?|ray"
    r"|sbatch|srun|torchrun|trainload"
)
"""Programs that the pages call."""
_BLOCK = re.compile(r"^```(\w*)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(rf"(?:[A-Z_]+=\S* )*(?:{PROGRAMS})\s")
_COMMENT = re.compile(r"(?:^|\s+)#(?:[\s!].*)?$")


@dataclass(frozen=True, slots=True)
class Reason:
    """A reason why no test runs a command.

    Attributes:
        kind: short name.
        pattern: found in the commands that it is for.
        why: what the test lacks.
    """

    kind: str
    pattern: re.Pattern[str]
    why: str


LEFT_OUT = (
    Reason(
        "installation",
        re.compile(r"^(pip install|python -m venv|\. venv/bin/activate|cd )"),
        "the tests run where everything is installed, in a folder of their own",
    ),
    Reason("Kubernetes", re.compile(r"^kubectl "), "it needs a Kubernetes cluster"),
    Reason("image", re.compile(r"^(docker|make image) "), "it needs docker and a network"),
    Reason(
        "several machines",
        re.compile(
            r"^ray start|^torchrun --nnodes|http://HEAD:"
            r"|^trainload launch (.*--nodes |llama-70b.tl .*--address )"
        ),
        "it needs a cluster of several machines",
    ),
    Reason(
        "GPU",
        re.compile(r"^trainload (build .*--device h100|build .*--verify|measure .*--device cuda)"),
        "it needs a GPU, or torch's build for CUDA",
    ),
    Reason("endless", re.compile(r"^trainload retrain run "), "it ends when it is interrupted"),
    Reason("person", re.compile(r" --interactive"), "it asks a person"),
)
"""Reasons, of which the first that fits a command is its own."""


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page.

    Attributes:
        language: word after the fence.
        title: name of the file that it is, or "".
        text: its lines.
    """

    language: str
    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Command:
    """A command of a page.

    Attributes:
        text: the command on one line, without a comment.
        output: lines that it prints, of a `console` block.
        fails: True if it is in a `console` block whose output is an error.
    """

    text: str
    output: str = ""

    @property
    def reason(self) -> str:
        """Kind of the reason why it is not run, or "" if it is run."""
        return next((each.kind for each in LEFT_OUT if each.pattern.search(self.text)), "")

    @property
    def fails(self) -> bool:
        """True if its output is an error of the command line."""
        return self.output.startswith("trainload: ")


def is_program(name: str) -> bool:
    """Return True if a page, given by its path from the root, runs as a program."""
    return name.startswith(AS_PROGRAMS) and name not in WITH_A_RUN


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page that have a language."""
    found = [Block(*match.groups(default="")) for match in _BLOCK.finditer(page.read_text())]
    return [block for block in found if block.language]


def commands(block: Block) -> list[Command]:
    """Return the commands of a block; what follows a pipe to kubectl is one of its own."""
    if block.language == "console":
        parts = re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]
        return [Command(*part.split("\n", 1)) for part in parts]
    if block.language != "bash" or block.title:
        return []
    joined = re.sub(r"\s*\\\n\s*", " ", block.text)
    lines = [_COMMENT.sub("", line).strip() for line in joined.splitlines()]
    return [Command(part) for line in lines if line for part in re.split(r" \| (?=kubectl )", line)]


def commands_in_file(block: Block) -> list[str]:
    """Return the calls of trainload in a block that is a shell script with a name."""
    if block.language != "bash" or not block.title:
        return []
    return [call.strip() for call in re.findall(r"^ *(trainload [^&|]*)", block.text, re.MULTILINE)]


def commands_elsewhere(page: Path) -> list[str]:
    """Return the commands of a page that are in an indented block, or in one of another language.

    Those in a file that a page shows (a block with a title) are no commands of the page.
    """
    text = page.read_text()
    others = [
        match[3]
        for match in _BLOCK.finditer(text)
        if match[1] not in ("bash", "console") and not match[2]
    ]
    indented = re.findall(r"^ {4}.*$", _BLOCK.sub("", text), re.MULTILINE)
    lines = [line.strip().removeprefix("$ ") for line in [*indented, *"".join(others).split("\n")]]
    return [line for line in lines if _COMMAND.match(line)]
