"""Folder in which the commands of the guides run: what their readers have already.

`make_folder` makes all of it once, with trainload's own commands; a page gets copies of the files
that it mentions. Below `s3/` is what the buckets of the pages contain.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from urllib.request import Request, urlopen

import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.numpy import save_file
from tests.documentation.guide_job import token_rows
from tests.documentation.page_commands import Command, blocks, commands
from tests.documentation.page_runner import missing_lines, output_of
from tests.launch import forked
from tests.packaging.places import KEYS
from tests.waiting import wait_until

ROWS_PY = """
import numpy as np

def since(day):
    yield {"tokens": np.zeros((64, 5), np.uint8)}
"""
MINE_PY = """
def fuse(graph, program, *, width=1):
    return graph
"""
ROW_FILES = (
    "train.parquet",
    "rows.parquet",
    "mine.parquet",
    "test.parquet",
    "data/0.parquet",
    "s3/bucket/corpus/0.parquet",
    "s3/bucket/rows/0.parquet",
)
COMMANDS = (
    "trainload freeze job.py:job -o gpt.tl",
    "trainload launch gpt.tl --data train.parquet --output gpt-trained.tl",
    "trainload plan gpt.tl --strategy single -o plan.json",
    "trainload freeze job.py:llama_70b --abstract --reduced job.py:llama_small -o llama-70b.tl",
    "trainload plan llama-70b.tl --strategy single -o llama-plan.json",
    "trainload fill llama-70b.tl --weights init -o llama.tl",
    "trainload export llama.tl --to huggingface -o s3/models/llama-70b",
    "trainload export gpt-trained.tl --to huggingface -o hub/gpt2",
    "trainload export gpt-trained.tl --to safetensors -o best.safetensors",
    "trainload push gpt.tl s3/models/store --line gpt",
    "trainload push gpt-trained.tl s3/models/store --line gpt",
    "cp -r gpt.tl s3/bucket/gpt.tl",
)
_STEPS = "1000000"
_OPTIONS_OF_PLACE = {"--address", "--backend", "--workers", "--dry-run"}


def make_folder(folder: Path) -> None:
    """Fill the folder."""
    for name in ROW_FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        values = pa.array(token_rows(64).ravel())
        table = pa.table({"tokens": pa.FixedSizeListArray.from_arrays(values, 5)})
        pq.write_table(table, folder / name)
    for name in ("hub", "s3/models"):
        (folder / name).mkdir()
    save_file({"tokens": token_rows(16)}, folder / "held-out.safetensors")
    shutil.copy(Path(__file__).with_name("guide_job.py"), folder / "job.py")
    (folder / "rows.py").write_text(ROWS_PY)
    (folder / "mine.py").write_text(MINE_PY)
    for command in COMMANDS:
        run(command, folder)


def copy_files(made: Path, names: Mapping[str, str] | Sequence[str], folder: Path) -> None:
    """Copy files and folders of `make_folder`; a mapping gives them other names."""
    pairs = names if isinstance(names, Mapping) else {name: name for name in names}
    for name, source in pairs.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (made / source).is_dir() else shutil.copy
        copy(made / source, folder / name)


def shortened(words: list[str], *, on_ray: bool = False, compiles: bool = False) -> list[str]:
    """Return a command that trains with options to do so in one process without Inductor.

    A command that names a cluster or workers keeps them.

    on_ray, compiles: leave out these options.
    """
    if not {"launch", "evaluate", "resume"} & set(words) or "manifest" in words:
        return words
    is_local = not (on_ray or _OPTIONS_OF_PLACE & set(words))
    interprets = not compiles and "resume" not in words  # a resumed run does as before
    options = ["--backend", "local"] if is_local else []
    return [*words, *options, *(["--no-compile"] if interprets else [])]


def run(
    line: str,
    folder: Path,
    variables: Mapping[str, str] | None = None,
    status: int = 0,
    *,
    on_ray: bool = False,
    compiles: bool = False,
) -> str:
    """Run a command in a folder, trainload's in a forked process; return what it prints."""
    call = re.fullmatch(r"((?:[A-Z_]+=\S+ )*)trainload (.*)", line)
    if call is None:
        return output_of(["bash", "-euo", "pipefail"], line, folder, variables)
    environment = {**(variables or {}), "COLUMNS": "100"}
    environment |= dict(pair.split("=", 1) for pair in shlex.split(call[1]))
    words = shortened(shlex.split(call[2]), on_ray=on_ray, compiles=compiles)
    code, out, err = forked.done(*words, cwd=folder, first=None, **environment)
    assert code == status, f"{line}\n{out}{err}"
    return out + err


class Page:
    """A page whose commands run in a folder.

    Args:
        folder: working directory.
        variables: environment variables of the commands.
        replacements: text of the commands -> what is run instead.
        training: beginnings of commands that train until a later command of the page, or else the
            test, stops them -> the run.
        statuses: beginnings of commands -> exit status, if it is not 0.
        on_ray: True if runs are on Ray, as the page says, and not in one process.
        compiles: True if runs compile.
        has_scripts: True if Python blocks are scripts.
    """

    def __init__(
        self,
        folder: Path,
        variables: Mapping[str, str],
        replacements: Mapping[str, str],
        training: Mapping[str, str],
        statuses: Mapping[str, int],
        *,
        on_ray: bool,
        compiles: bool,
        has_scripts: bool,
    ) -> None:
        self._folder, self._variables = folder, variables
        self._replacements, self._training, self._statuses = replacements, training, statuses
        self._on_ray, self._compiles = on_ray, compiles
        self._has_scripts = has_scripts
        self._running: list[tuple[str, forked.Command]] = []

    def run(self, page: Path, already: Mapping[str, str]) -> int:
        """Write the page's files, run its commands, and return how many commands it ran.

        already: run that trains meanwhile -> the command that starts it.
        """
        count = 0
        with ExitStack() as stack:
            for run_dir, line in already.items():
                self._train(line, run_dir, stack)
            for block in blocks(page):
                if block.title:
                    (self._folder / block.title).write_text(self._replaced(block.text))
                elif block.language == "python" and self._has_scripts:
                    script = self._replaced(block.text)
                    output_of([sys.executable, "-"], script, self._folder, self._variables)
                for command in commands(block):
                    if not command.reason:
                        self._run(command, stack)
                        count += 1
            self._stop()
        return count

    def _replaced(self, text: str) -> str:
        for before, after in self._replacements.items():
            text = text.replace(before, after)
        return text

    def _run(self, command: Command, stack: ExitStack) -> None:
        line = self._replaced(command.text)
        run_dirs = [run for start, run in self._training.items() if line.startswith(start)]
        if run_dirs:
            self._stop(run_dirs[0])
            self._train(line, run_dirs[0], stack)
            return
        status = next((code for text, code in self._statuses.items() if line.startswith(text)), 0)
        output = run(
            line,
            self._folder,
            self._variables,
            2 if command.fails else status,
            on_ray=self._on_ray,
            compiles=self._compiles,
        )
        assert missing_lines(command.output, output) == [], output

    def _train(self, line: str, run_dir: str, stack: ExitStack) -> None:
        """Start a run, and return once it trains."""
        words = shlex.split(line)[1:]
        words = shortened(words, on_ray=self._on_ray, compiles=self._compiles)
        words += ["--set", f"steps={_STEPS}"] if "resume" in words else ["--steps", _STEPS]
        started = forked.command(*words, cwd=self._folder, first=None, **self._variables)
        process = stack.enter_context(started)
        self._running.append((run_dir, process))

        def is_running() -> bool:
            assert process.process.is_alive(), process.err
            words = ("status", run_dir, "--json")
            status, out, _ = forked.done(*words, cwd=self._folder, first=None, **self._variables)
            state = json.loads(out) if status == 0 else {"over": True}
            return not state["over"] and state["ranks"] != {}

        wait_until(is_running)

    def _stop(self, run_dir: str = "") -> None:
        """Stop the runs that train, or one of them."""
        for name, process in list(self._running):
            if run_dir in ("", name):
                if process.process.is_alive():
                    forked.done("stop", name, cwd=self._folder, first=None, **self._variables)
                process.wait()
                self._running.remove((name, process))


def fill_buckets(server: str, folder: Path) -> None:
    """Replace everything on an S3 server by the folder, whose subfolders are buckets."""
    import s3fs

    with urlopen(Request(f"{server}/moto-api/reset", method="POST")) as response:
        assert response.status == 200
    storage = s3fs.S3FileSystem(
        key=KEYS["AWS_ACCESS_KEY_ID"],
        secret=KEYS["AWS_SECRET_ACCESS_KEY"],
        endpoint_url=server,
        skip_instance_cache=True,
    )
    for bucket in sorted(os.listdir(folder)):
        storage.mkdir(bucket)
        for file in sorted((folder / bucket).rglob("*")):
            if file.is_file():
                storage.put_file(str(file), file.relative_to(folder).as_posix())
