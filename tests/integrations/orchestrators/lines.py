"""A line to retrain, with its configuration in a file."""

from __future__ import annotations

from pathlib import Path

import yaml
from tests.retraining.conftest import classifier, write_day
from tests.retraining.ticking import config_of

import trainload


def write_line(folder: Path) -> Path:
    """Write a package, a day of data and the file of a retraining; return the file."""
    package = trainload.freeze(classifier(), folder / "small.tl")
    write_day(folder / "data" / "0.arrow", rows=60)
    schedule = {"cron": "0 3 * * *", "zone": "UTC"}
    config = config_of(folder, package, schedule=schedule)
    file = folder / "retrain.yaml"
    file.write_text(yaml.safe_dump(config.to_json()))
    return file
