"""Write docs/measurements/hostile.md: each hostile package's message, and the time to read it.

`make hostile` runs it.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from tests.hostile.guarded import Noted, refusal, watched
from tests.hostile.packages import CASES
from tests.hostile.prepared import make_base
from tests.house.commits import head_commit

PAGE = Path(__file__).resolve().parents[2] / "docs" / "measurements" / "hostile.md"
HEAD = """# How hostile packages are rejected

Each row is a valid package that was modified by an attacker who recomputed every digest and
checksum; a modified derived graph is even sealed with the user's own key. A launch reads packages
in the same way before it starts anything. `make hostile` writes this page, here at commit COMMIT;
`tests/hostile/test_hostile.py` checks each row: the package is rejected with one line that names
the file, before any tensor is created, and without starting processes, opening files for writing,
unpickling or using sockets, as seen by Python's audit events.

"""


def run(folder: Path) -> list[tuple[str, str, str, float, Noted]]:
    """Return (what, file, line, seconds, recorded events) for each case."""
    os.environ["TRAINLOAD_STATE_DIR"] = str(folder / "state")
    sound = make_base(folder)
    rows = []
    for number, case in enumerate(CASES):
        target = folder / f"{number}.tl"
        shutil.copytree(sound, target)
        case.attack(target)
        began = time.perf_counter()
        with watched() as noted:
            line = refusal(target, case.file)
        rows.append(
            (
                case.what,
                case.file,
                line.replace(str(target), "job.tl"),
                time.perf_counter() - began,
                noted,
            )
        )
        shutil.rmtree(target)
    return rows


def page(rows: list[tuple[str, str, str, float, Noted]]) -> str:
    seconds = sorted(row[3] for row in rows)
    taken = [row for row in rows if not row[2]]
    made, acts = sum(row[4].made for row in rows), sum(len(row[4].acts) for row in rows)
    counts = f"{len(rows)} cases, {len(rows) - len(taken)} rejected, {len(taken)} accepted"
    told = f"{counts}; {made} bytes of tensors created, {acts} forbidden acts; "
    told += f"median {1000 * statistics.median(seconds):.0f} ms, longest {seconds[-1]:.2f} s."
    lines = [f"| {_cell(what)} | {_cell(line) or '**accepted**'} |" for what, _, line, _, _ in rows]
    head = HEAD.replace("COMMIT", head_commit())
    return head + "\n".join([told, "", "| modification | message |", "|---|---|", *lines, ""])


def _cell(text: str) -> str:
    shown = text if len(text) <= 300 else text[:297] + "..."
    return shown.replace("|", "\\|").replace("<", "&lt;")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        rows = run(Path(folder))
    PAGE.write_text(page(rows), encoding="utf-8")
    print(page(rows).split("\n\n")[2])
    for what, file, _, seconds, _ in sorted(rows, key=lambda row: -row[3])[:5]:
        print(f"{seconds:.2f} s  {file}: {what}")


if __name__ == "__main__":
    main()
