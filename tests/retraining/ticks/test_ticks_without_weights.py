"""Retraining of a line that begins with an abstract package, which names its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.retraining.conftest import classifier, write_day
from tests.retraining.ticking import LINE, config_of, name, tick

import trainload
from trainload.core.errors import PackageError
from trainload.launching.node.fetching import here
from trainload.packaging.package import Package
from trainload.packaging.stores.releases import shown
from trainload.packaging.stores.store import Store
from trainload.retraining.config.config import Config
from trainload.retraining.ticks.tick_records import Ended, Evaluated, Ticks, Trained


def large() -> trainload.Job:
    return classifier(width=12)


def without_weights(folder: Path, **options: Any) -> Package:
    return trainload.freeze(
        large, folder / "abstract.tl", abstract=True, reduced=classifier, **options
    )


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """The configuration of a line after three ticks."""
    folder = tmp_path_factory.mktemp("line")
    package = without_weights(folder, weights_from="init")
    config = config_of(folder, package, train={"epochs": 2, "optimizer": "kept"})
    for number in range(3):
        write_day(folder / "data" / f"{number}.arrow", seed=number, shift=0.2 * number)
        tick(config, number)
    return config


@pytest.fixture
def ticks(lived: Config) -> Ticks:
    return Ticks(Store(lived.store), LINE)


def test_every_tick_is_promoted(ticks: Ticks) -> None:
    assert [ended.outcome for ended in ticks.of_all(Ended).values()] == ["promoted"] * 3


def test_the_first_champion_has_the_weights_that_the_package_names(ticks: Ticks) -> None:
    evaluated = ticks.read_required(Evaluated, name(0))
    assert evaluated.champion.loss is not None
    assert evaluated.challenger.loss is not None
    assert evaluated.challenger.loss < evaluated.champion.loss


def test_releases_say_what_they_began_with(lived: Config, ticks: Ticks) -> None:
    for number, kind in ((0, "init"), (1, None)):
        release = ticks.read_required(Trained, name(number)).release
        _, path = here(f"{lived.store}#{LINE}/{shown(release)}")
        training = trainload.open(path).manifest.training
        assert training is not None
        assert (None if training.weights is None else training.weights.kind) == kind


def test_a_line_that_has_no_weights_and_names_none_is_told_so(tmp_path: Path) -> None:
    config = config_of(tmp_path, without_weights(tmp_path))
    write_day(tmp_path / "data" / "0.arrow")
    with pytest.raises(PackageError, match="fill"):
        tick(config, 0)
