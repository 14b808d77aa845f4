"""No file of trainload is considered the user's code, wherever it is in the tree."""

from __future__ import annotations

import pytest
from tests.house.import_graph import module_names
from tests.house.source import ROOT

from trainload.capture.source.source_place import is_users
from trainload.core import user_code
from trainload.packaging.format import source_map

IMPORTED = [
    str(ROOT / "src" / f"{name.replace('.', '/')}.py")
    for name in sorted(module_names())
    if "." in name
]
"""Files of the modules, under the names by which they are imported."""


def test_no_frame_of_trainload_is_the_users() -> None:
    assert [file for file in IMPORTED if is_users(file)] == []


@pytest.mark.parametrize("stage", ["capture", "autograd_trace"])
def test_no_file_of_a_stage_is_a_place_in_the_source_map(stage: str) -> None:
    files = [str(path) for path in (ROOT / stage).rglob("*.py")]
    assert files
    assert [file for file in files if not file.startswith(source_map._LIBRARIES)] == []


def test_no_file_of_trainload_is_to_blame_for_a_job() -> None:
    assert [file for file in IMPORTED if not file.startswith(user_code._TRAINLOAD_FOLDER)] == []
