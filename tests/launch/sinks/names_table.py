"""Names of metrics in docs/guides/trackers.md: `python -m tests.launch.sinks.names_table`."""

from __future__ import annotations

from tests.house.source import ROOT

from trainload.launching.sinks.measures import MEASURES, OF_NUMBERS, OWN

PAGE = ROOT / "docs" / "guides" / "trackers.md"
BEGIN, END = "<!-- names -->\n", "<!-- end: names -->\n"


def table() -> str:
    """Return the table."""
    names = {measure: f"`{name}`" for name, measure in OF_NUMBERS.items()}
    names |= {measure: f"`{start}NAME`" for start, measure in OWN.items()}
    rows = [
        f"| {measure.description} | {names.get(measure, '')} | `{measure.exported}` |"
        f" `{measure.dotted}` |"
        for measure in MEASURES
    ]
    heading = (
        "| number | TensorBoard, MLflow, W&B | Prometheus | OpenTelemetry |\n|---|---|---|---|"
    )
    return "\n".join([heading, *rows, ""])


def with_table(page: str) -> str:
    """Return the page with the present table."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
