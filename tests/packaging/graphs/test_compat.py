"""Each operator's recorded schema, compared with that of the running torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.packaging.tampering import edit_manifest

from trainload.cli import main as cli
from trainload.core.errors import PackageError
from trainload.packaging.format.manifest import Manifest
from trainload.packaging.format.package_paths import MANIFEST
from trainload.packaging.graphs.operator_compat import Comparison, Verdict, compare_operators
from trainload.packaging.package import Package, open_package, read_manifest

SUM = "torch.ops.aten.sum.default"
"""aten::sum(Tensor self, *, ScalarType? dtype=None) -> Tensor"""


def verdicts(package: Path) -> dict[str, Verdict]:
    """Return the verdicts of the operators that are not the same."""
    manifest = Manifest.from_bytes(read_manifest(package), MANIFEST)
    return {
        each.name: each.verdict
        for each in compare_operators(manifest)
        if each.verdict is not Verdict.SAME
    }


def recorded(package: Path, name: str, schema: str) -> None:
    edit_manifest(package, lambda manifest: manifest["ops"].update({name: schema}))


def test_operators_are_the_same_in_the_torch_that_captured_them(packaged: Package) -> None:
    found = compare_operators(packaged.manifest)
    assert {each.verdict for each in found} == {Verdict.SAME}
    assert [each.name for each in found] == sorted(
        [
            *packaged.manifest.ops,
            *(f"torch.ops.higher_order.{name}" for name in packaged.manifest.higher_order_ops),
        ]
    )


def test_an_operator_that_has_a_new_argument_with_a_default_is_compatible(copied: Path) -> None:
    recorded(copied, SUM, "aten::sum(Tensor self) -> Tensor")
    assert verdicts(copied) == {SUM: Verdict.COMPATIBLE}
    open_package(copied)


def test_an_operator_that_lost_an_argument_is_incompatible(copied: Path) -> None:
    recorded(copied, SUM, "aten::sum(Tensor self, Tensor other) -> Tensor")
    assert verdicts(copied) == {SUM: Verdict.INCOMPATIBLE}


def test_an_operator_whose_result_is_another_is_incompatible(copied: Path) -> None:
    recorded(copied, SUM, "aten::sum(Tensor self, *, ScalarType? dtype=None) -> Tensor[]")
    assert verdicts(copied) == {SUM: Verdict.INCOMPATIBLE}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no schema",
        "aten::sum(\U0001f600 self) -> Tensor",
        "aten::sum(Tensor self) -> Tensor \U000f0000",
    ],
    ids=ascii,
)
def test_a_schema_that_is_none_is_incompatible(text: str, copied: Path) -> None:
    recorded(copied, SUM, text)
    assert verdicts(copied) == {SUM: Verdict.INCOMPATIBLE}


@pytest.mark.parametrize(
    "name",
    [
        "torch.ops.aten.sum_of_old.default",
        "torch.ops.nowhere.at.all",
        "torch.ops",
        "os.system",
        "a b",
    ],
)
def test_an_operator_that_is_not_there_is_missing(name: str, copied: Path) -> None:
    recorded(copied, name, "aten::x() -> ()")
    assert verdicts(copied) == {name: Verdict.MISSING}


def test_an_operator_that_takes_graphs_and_is_not_there_is_missing(copied: Path) -> None:
    edit_manifest(copied, lambda manifest: manifest["higher_order_ops"].append("condition_of_old"))
    assert verdicts(copied) == {"torch.ops.higher_order.condition_of_old": Verdict.MISSING}


def test_a_package_that_does_not_fit_is_not_opened_and_the_worst_is_named(copied: Path) -> None:
    recorded(copied, SUM, "aten::sum(Tensor self, Tensor other) -> Tensor")
    recorded(copied, "torch.ops.aten.sum_of_old.default", "aten::sum_of_old(Tensor self) -> Tensor")
    with pytest.raises(
        PackageError,
        match=r"2 of the package's operators.*aten\.sum_of_old\.default.*is missing.*--compat",
    ):
        open_package(copied)


def compat(package: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    status = cli.run(["ops", str(package), "--compat", *options])
    return status, capsys.readouterr().out


def test_the_command_lists_what_differs_and_exits_with_1(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    was = "aten::sum(Tensor self, Tensor other) -> Tensor"
    recorded(copied, SUM, was)
    status, printed = compat(copied, capsys, "--json")
    found: dict[str, Any] = json.loads(printed)
    assert status == 1
    now = "aten::sum(Tensor self, *, ScalarType? dtype=None) -> Tensor"
    assert found["operators"] == [{"name": SUM, "was": was, "now": now, "verdict": "incompatible"}]
    assert found["counts"]["incompatible"] == 1
    assert found["counts"]["same"] > 10


def test_the_command_exits_with_0_where_all_can_be_called(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(copied, SUM, "aten::sum(Tensor self) -> Tensor")
    status, printed = compat(copied, capsys)
    assert status == 0
    assert "aten.sum.default" in printed
    assert "compatible" in printed


def test_a_comparison_says_whether_graphs_can_call_it() -> None:
    fits = {verdict: Comparison("x", "", "", verdict).fits for verdict in Verdict}
    assert fits == {
        Verdict.SAME: True,
        Verdict.COMPATIBLE: True,
        Verdict.INCOMPATIBLE: False,
        Verdict.MISSING: False,
    }
