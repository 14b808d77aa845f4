"""Tables never break a word, however narrow the terminal is."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from trainload.cli import main as cli
from trainload.cli.view.column_table import Columns
from trainload.packaging.package import Package

LONG = "aten._scaled_dot_product_flash_attention_for_cpu.default"
"""A name that does not fit next to three other columns in a terminal of 80 columns."""


def printed(table: Columns, width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(table)
    return out.getvalue()


def words(text: str) -> set[str]:
    return {word.rstrip(",") for word in text.split()}


def table() -> Columns:
    made = Columns(("operator", "calls", "becomes"), title="graph", right={"calls"})
    made.add(LONG, "1234", f"{LONG}, aten.mul.Tensor")
    made.add("aten.add.Tensor", "7")
    return made


def test_where_there_is_room_rows_are_lines() -> None:
    lines = printed(table(), 150).splitlines()
    assert [line.split() for line in lines] == [
        ["graph"],
        ["operator", "calls", "becomes"],
        [LONG, "1234", f"{LONG},", "aten.mul.Tensor"],
        ["aten.add.Tensor", "7"],
    ]


@pytest.mark.parametrize("width", [*range(70, 160, 7), 80, 120])
def test_no_word_is_broken(width: int) -> None:
    assert {LONG, "1234", "aten.mul.Tensor", "aten.add.Tensor"} <= words(printed(table(), width))


def test_where_there_is_none_rows_are_blocks() -> None:
    assert [line.split() for line in printed(table(), 80).splitlines()[1:3]] == [
        ["operator", LONG],
        ["calls", "1234"],
    ]


@given(
    st.lists(
        st.lists(st.text("abc  ", max_size=30), min_size=4, max_size=4), min_size=1, max_size=4
    ),
    st.integers(40, 120),
)
def test_every_word_is_there_whole(rows: list[list[str]], width: int) -> None:
    made = Columns(("one", "two", "three", "four"), right={"three"})
    for row in rows:
        made.add(*row)
    expected = sorted(word for row in rows for cell in row for word in cell.split())
    titles = {"one", "two", "three", "four"}
    assert sorted(word for word in printed(made, width).split() if word not in titles) == expected


def test_ops_breaks_no_operators_name_at_80_columns(
    tiny: Package, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.run(["ops", str(tiny.path)]) == 0
    assert {name.removeprefix("torch.ops.") for name in tiny.manifest.ops} <= words(
        capsys.readouterr().out
    )
