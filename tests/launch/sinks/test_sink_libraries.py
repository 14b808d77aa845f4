"""A missing library of a sink is reported before anything is written."""

from __future__ import annotations

import sys

import pytest

from trainload.core.errors import StorageError
from trainload.launching.sinks.installed_sinks import check_sink_libraries, installed_sinks

LIBRARIES: dict[str, tuple[str, str]] = {
    "tensorboard": ("tensorboardX", "tensorboard"),
    "mlflow": ("mlflow", "mlflow"),
    "opentelemetry": ("opentelemetry.exporter.otlp.proto.http.metric_exporter", "opentelemetry"),
    "prometheus": ("ray", "ray"),
    "wandb": ("wandb", "wandb"),
}
"""Sink -> the module that it needs, and the extra that installs it."""


def test_sinks_whose_libraries_are_there_are_taken() -> None:
    check_sink_libraries([*installed_sinks()])


def test_every_sink_has_a_library_that_may_be_missing() -> None:
    assert LIBRARIES.keys() == set(installed_sinks())


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_that_is_not_there_is_named_with_its_extra(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, extra = LIBRARIES[name]
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, f"trainload.launching.sinks.{name}", raising=False)
    with pytest.raises(
        StorageError, match=rf"sinks: {name} is not installed.*pip install 'trainload\[{extra}\]'"
    ):
        check_sink_libraries([*LIBRARIES])
