"""Every example of docs/guides/variants.md works as documented."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.house.source import ROOT
from torch import nn
from torch.export import Dim

import trainload
from trainload.core.errors import DataError
from trainload.launching.data.mixture import parts_of

TEXT = (ROOT / "docs" / "guides" / "variants.md").read_text()
BLOCKS = {
    kind: (said, code)
    for kind, said, code in re.findall(
        r"```python\n# (\w+)(?:: ([^\n]*))?\n(.*?)```", TEXT, re.DOTALL
    )
}


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The names that the first example of the page defines."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("page") / "example.py"
    path.write_text(BLOCKS["works"][1])
    found: dict[str, Any] = {"torch": torch, "nn": nn, "Dim": Dim, "trainload": trainload}
    exec(compile(path.read_text(), str(path), "exec"), found)
    return found


@pytest.fixture(scope="module")
def packaged(names: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """These names, and the package of the job."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            **names,
            "package": trainload.freeze(names["job"], tmp_path_factory.mktemp("page") / "page.tl"),
        }


@pytest.mark.slow  # test_variants.py trains packages with variants
def test_the_job_has_the_variants_that_it_says(packaged: dict[str, Any]) -> None:
    assert ", ".join(packaged["package"].manifest.variants) == BLOCKS["works"][0].removeprefix(
        "variants "
    )


@pytest.mark.slow  # test_dispatch.py covers dispatch
def test_the_dispatched_batches_go_where_it_says(packaged: dict[str, Any]) -> None:
    exec(BLOCKS["dispatches"][1], packaged)


@pytest.mark.slow  # test_dispatch.py covers its rejections
def test_the_refusal_is_the_one_that_it_says(packaged: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=BLOCKS["refuses"][0]):
        exec(BLOCKS["refuses"][1], packaged)


@pytest.mark.slow  # test_record.py records such a model
def test_the_recording_finds_what_it_says(
    names: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    found = {**names, "model": names["Model"]()}
    exec(BLOCKS["records"][1], found)
    assert set(found["job"].variants) == set(BLOCKS["records"][0].split(", "))
    printed = capsys.readouterr().out.strip()
    assert printed in re.sub("^    ", "", TEXT, flags=re.MULTILINE)


def test_the_mixture_is_one(tmp_path: Path) -> None:
    (text,) = re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)
    (tmp_path / "mixture.json").write_text(text)
    assert [part.weight for part in parts_of(tmp_path / "mixture.json")] == [
        entry.get("weight") for entry in json.loads(text)["parts"]
    ]


def test_every_code_block_of_the_page_is_run() -> None:
    assert TEXT.count("```python") == len(BLOCKS)
