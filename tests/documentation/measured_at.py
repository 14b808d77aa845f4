"""Write when each result was measured into the first table of docs/measurements/performance.md.

    python -m tests.documentation.measured_at

These are the commit and date of the last change of the file in benchmarks/results/, so new results
are committed first.
"""

from __future__ import annotations

import re

from tests.house.commits import last_change
from tests.house.source import ROOT

PAGE = ROOT / "docs" / "measurements" / "performance.md"
_TABLE = re.compile(r"(\| command \|.*?\n\n)", re.DOTALL)
_FILE = re.compile(r"`(?:benchmarks/results/)?([\w-]+\.json)`")


def with_changes(row: str) -> str:
    """Return a row of the table with the changes of its results in its last cell."""
    *cells, results, _ = row.removesuffix("|").split("|")
    changes = {last_change(f"benchmarks/results/{name}"): None for name in _FILE.findall(results)}
    return "|".join([*cells, results, f" {'; '.join(changes)} |"])


def main() -> None:
    """Rewrite the table."""
    head, table, rest = _TABLE.split(PAGE.read_text(), maxsplit=1)
    titles, line, *rows = table.strip().splitlines()
    PAGE.write_text(head + "\n".join([titles, line, *map(with_changes, rows)]) + "\n\n" + rest)


if __name__ == "__main__":
    main()
