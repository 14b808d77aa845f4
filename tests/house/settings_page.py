"""Tables of settings in docs/reference/settings.md: `python -m tests.house.settings_page`."""

from __future__ import annotations

import re

from tests.house.source import ROOT

from trainload.launching.settings.describe import Description, descriptions

PAGE = ROOT / "docs" / "reference" / "settings.md"
_NAMED_PAGE = re.compile(r"docs/([\w-]+)/([\w-]+\.md)")


def _table(rows: list[Description]) -> str:
    lines = ["| setting | default | unit | `resume` | |", "|---|---|---|---|---|"]
    for each in rows:
        text = _NAMED_PAGE.sub(r"[\2](../\1/\2)", each.text)
        names = ", ".join(f"`{name}`" for name in each.names)
        lines.append(
            f"| {names} | {each.default} | {each.unit} | {'yes' if each.at_resume else 'no'} |"
            f" {text} |"
        )
    return "\n".join(lines)


def with_tables(page: str) -> str:
    """Return a page with its tables generated from the models of settings."""
    for name, of_run in (("run", True), ("training", False)):
        table = _table([each for each in descriptions() if each.of_run == of_run])
        begin, end = (
            f"<!-- settings of the {name}: generated -->\n",
            f"\n<!-- end: settings of the {name} -->",
        )
        before, _, rest = page.partition(begin)
        _, found, after = rest.partition(end)
        assert found, f"{PAGE.name} has a place for the settings of the {name}"
        page = before + begin + table + end + after
    return page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
