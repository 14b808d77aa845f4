"""Marks of charts and of their legends."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.report.made import FAULTY, Read, made_run

from trainload.report.frame.figures import MARKS, sample
from trainload.report.frame.page_frame import keep_places, keep_units
from trainload.report.runs.charts import charts_of
from trainload.report.runs.run_folder import read_run


def styles(svg: str) -> set[str]:
    """Return the styles of the shapes in an SVG that have a color of the page."""
    return {style for style in re.findall(r'style="([^"]+)"', svg) if "var(--" in style}


def test_a_mark_of_a_legend_has_the_style_of_its_mark_in_the_chart(tmp_path: Path) -> None:
    charts = charts_of(read_run(made_run(tmp_path / "run", FAULTY, world=2)).history)
    missing = [
        (chart.name, kind)
        for chart in charts
        for kind, _ in chart.legend
        if not styles(sample(kind)) <= styles(chart.svg)
    ]
    assert missing == []


@pytest.mark.parametrize("kind", MARKS)
def test_a_mark_can_be_in_a_page_several_times(kind: str) -> None:
    assert Read(sample(kind)).values("id") == []


@pytest.mark.parametrize("kind", MARKS)
def test_readers_of_the_text_skip_a_mark(kind: str) -> None:
    found = Read(sample(kind))
    assert ("svg", "aria-hidden", "true") in found.attributes
    assert found.texts == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4.5 GiB of 8 GiB", "4.5\xa0GiB of 8\xa0GiB"),
        ("12 ms, 3 rows", "12\xa0ms, 3\xa0rows"),
        ("2 nodes", "2 nodes"),
        ("since 2026-01-02T03:04:05Z", 'since <span class="n">2026-01-02T03:04:05Z</span>'),
        ("<b>", "&lt;b&gt;"),
    ],
)
def test_a_number_stays_beside_its_unit_and_a_time_is_whole(text: str, expected: str) -> None:
    assert keep_units(text) == expected


def test_a_line_number_stays_beside_its_file() -> None:
    assert keep_places("at /a/b/model.py:12 in <f>") == (
        'at /<wbr>a/<wbr>b/<wbr><span class="n">model.py:12</span> in &lt;f&gt;'
    )
