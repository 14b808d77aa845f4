"""Run by a test, from a folder of its own with `gpt.py` and `jobs.py` in it: prints its user, writes the packages of both jobs, and prints
their digests.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import gpt  # type: ignore[import-not-found]  # copies of the tests' own, beside this file
import jobs  # type: ignore[import-not-found]

import trainload
from trainload.packaging.write import write_package


def main(folder: Path) -> None:
    """Packages `gpt.tl` and `job.tl` in `folder`."""
    print(os.getuid())
    print(trainload.freeze(gpt.gpt_job(), folder / "gpt.tl").digest)
    job = jobs.make_job()
    print(write_package(folder / "job.tl", job.program, job.updates, job.recipe).digest)


main(Path(sys.argv[1]))
