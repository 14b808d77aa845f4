"""Lineage, rollback and migration of a retrained line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.retraining.ticking import LINE, name

import trainload
from trainload.core.errors import PackageError, RequestError, StorageError
from trainload.packaging.package import Package
from trainload.packaging.stores.store import Store
from trainload.retraining.migrate import migrate
from trainload.retraining.ticks.lineage import ancestry, rollback


def test_a_lineage_goes_back_to_the_first_freeze(lived: Path) -> None:
    found = ancestry(Store(lived / "store"), LINE)
    assert [(step.state.release.name, step.how) for step in found] == [
        ("3", "retrained"),
        ("2", "retrained"),
        ("1", "frozen"),
    ]
    assert [None if step.tick is None else step.tick.name for step in found] == [
        name(2),
        name(0),
        None,
    ]


def test_a_rollback_goes_to_the_release_before_and_marks_the_one_that_it_leaves(
    store: Store,
) -> None:
    assert rollback(store, LINE, reason="worse on Mondays").release == "00000002"
    assert [state.status for state in store.releases(LINE)] == ["promoted", "current", "rejected"]
    assert store.releases(LINE)[-1].reason == "worse on Mondays"


def test_a_second_one_goes_further_back(store: Store) -> None:
    rollback(store, LINE)
    assert rollback(store, LINE).release == "00000001"
    with pytest.raises(StorageError, match="there is no earlier release to roll back to"):
        rollback(store, LINE)


def test_what_was_rolled_back_is_promoted_again_where_that_is_asked_for(store: Store) -> None:
    rollback(store, LINE, reason="worse on Mondays")
    with pytest.raises(StorageError, match=r"rejected.*worse on Mondays.*promote --rejected"):
        trainload.promote(store.url, 3, line=LINE)
    assert trainload.promote(store.url, 3, line=LINE, rejected=True).release == "00000003"
    assert [state.status for state in store.releases(LINE)] == ["promoted", "promoted", "current"]


def test_a_rollback_goes_where_it_is_told(store: Store) -> None:
    assert rollback(store, LINE, to=1).release == "00000001"


@pytest.mark.slow
def test_weights_are_carried_to_new_code_by_name(
    wider: Package, store: Store, tmp_path: Path
) -> None:
    old = trainload.open(f"{store.url}#{LINE}/3")
    found = migrate(wider, old, tmp_path / "carried.tl")
    assert (found.matched, [each.name for each in found.reshaped], found.missing) == (
        ("2.bias",),
        ["0.weight", "0.bias", "2.weight"],
        (),
    )
    carried = trainload.open(tmp_path / "carried.tl")
    assert carried.weights.tensor("2.bias").equal(old.weights.tensor("2.bias"))
    assert carried.weights.tensor("0.weight").equal(wider.weights.tensor("0.weight"))


@pytest.mark.slow
def test_of_other_shapes_the_part_that_both_have_can_be_carried(
    wider: Package, store: Store, tmp_path: Path
) -> None:
    old = trainload.open(f"{store.url}#{LINE}/3")
    found = migrate(wider, old, tmp_path / "carried.tl", overlap=True)
    carried = trainload.open(tmp_path / "carried.tl").weights
    assert carried.tensor("0.weight")[:8].equal(old.weights.tensor("0.weight"))
    assert carried.tensor("0.weight")[8:].equal(wider.weights.tensor("0.weight")[8:])
    assert found.carried == sum(old.weights.tensor(each).numel() for each in old.weights.names())


def test_strictly_all_must_be_carried(wider: Package, store: Store, tmp_path: Path) -> None:
    with pytest.raises(PackageError, match=r"reshaped: 0\.weight, 0\.bias, 2\.weight"):
        migrate(
            wider, trainload.open(f"{store.url}#{LINE}/3"), tmp_path / "carried.tl", strict=True
        )


def test_names_can_be_changed(small: Package, store: Store, tmp_path: Path) -> None:
    old = trainload.open(f"{store.url}#{LINE}/3")
    found = migrate(small, old, tmp_path / "carried.tl", rename={"2.*": "head.*"})
    assert (found.matched, found.missing, found.left) == (
        ("0.weight", "0.bias"),
        ("2.weight", "2.bias"),
        ("2.bias", "2.weight"),
    )
    with pytest.raises(RequestError, match="no tensor has this name"):
        migrate(small, old, tmp_path / "again.tl", rename={"encoder.*": "backbone.*"})


def test_a_new_line_goes_on_where_the_weights_are_from(
    wider: Package, store: Store, tmp_path: Path, commands: Any
) -> None:
    arguments = [
        "migrate",
        str(wider.path),
        "--from",
        f"{store.url}#{LINE}/3",
        "--store",
        store.url,
        "--line",
        "wide",
        "--json",
    ]
    status, out, _ = commands(*arguments)
    assert (status, json.loads(out)["release"], json.loads(out)["matched"]) == (0, "1", ["2.bias"])
    found = ancestry(store, "wide")
    assert [(step.line, step.state.release.name, step.how) for step in found] == [
        ("wide", "1", "migrated"),
        (LINE, "3", "retrained"),
        (LINE, "2", "retrained"),
        (LINE, "1", "frozen"),
    ]


def test_a_migration_into_a_line_that_has_releases_publishes_nothing(
    wider: Package, store: Store, tmp_path: Path, commands: Any
) -> None:
    before = store.release_ids(LINE)
    status, _, said = commands(
        "migrate",
        str(wider.path),
        "--from",
        f"{store.url}#{LINE}/3",
        "--store",
        store.url,
        "--line",
        LINE,
    )
    assert (status, "the line already has releases" in said, store.release_ids(LINE)) == (
        2,
        True,
        before,
    ), said


def test_a_lineage_goes_on_where_its_store_was_moved(
    wider: Package, store: Store, tmp_path: Path, commands: Any
) -> None:
    commands(
        "migrate",
        str(wider.path),
        "--from",
        f"{store.url}#{LINE}/3",
        "--store",
        store.url,
        "--line",
        "wide",
    )
    moved = Path(store.url).rename(tmp_path / "moved")
    assert [step.line for step in ancestry(Store(moved), "wide")] == ["wide", LINE, LINE, LINE]
