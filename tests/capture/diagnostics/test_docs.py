"""Every example of docs/guides/capture.md fails or works as documented."""

from __future__ import annotations

import itertools
import re
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.house.source import ROOT
from torch import Tensor, nn

from trainload.capture.job.definition import Job
from trainload.capture.source.causes import CAUSES
from trainload.capture.tracing.trace import capture
from trainload.core.errors import CaptureError, JobError

TEXT = (ROOT / "docs" / "guides" / "capture.md").read_text()
ANCHORS = {
    title.lower().replace(" ", "-") for title in re.findall(r"^## (.*)$", TEXT, re.MULTILINE)
}
BLOCKS = re.findall(
    r"```python\n# (fails: [\w-]+|works|warns: [\w., ]+)\n(.*?)```", TEXT, re.DOTALL
)


def of_kind(kind: str) -> list[tuple[str, str]]:
    return [(said.partition(": ")[2], code) for said, code in BLOCKS if said.startswith(kind)]


FAILS, WORKS, WARNS = of_kind("fails"), of_kind("works"), of_kind("warns")
WORKING = [code for _, code in WORKS]


@pytest.fixture
def job_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Job]:
    """Function that runs an example as a file, and makes its job."""
    counter = itertools.count()

    def make(code: str) -> Job:
        path = tmp_path / f"example_{next(counter)}.py"
        path.write_text("import torch\nfrom torch import nn\n\n" + code)
        module = types.ModuleType(path.stem)
        module.__file__ = str(path)
        monkeypatch.setitem(sys.modules, path.stem, module)
        exec(compile(path.read_text(), str(path), "exec"), vars(module))
        torch.manual_seed(0)

        def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            value: Tensor = model(batch["x"]).square().mean()
            return value

        options: dict[str, Any] = {
            "model": module.Model(),
            "batch": {"x": torch.randn(4, 8)},
            "loss": loss,
            "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        }
        return Job(**(options | getattr(module, "options", {})))

    return make


@pytest.mark.matrix("0 *", "8 *")  # test_errors.py covers every cause
@pytest.mark.parametrize(
    ("anchor", "code"), FAILS, ids=[f"{n} {anchor}" for n, (anchor, _) in enumerate(FAILS)]
)
def test_an_example_that_fails_fails_of_its_cause(
    anchor: str, code: str, job_of: Callable[[str], Job]
) -> None:
    job = job_of(code)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises((CaptureError, JobError)) as raised:
            capture(job)
    assert f"docs/guides/capture.md#{anchor}" in str(raised.value)
    if isinstance(raised.value, CaptureError):
        assert raised.value.findings[0].cause == anchor


@pytest.mark.matrix(when=lambda code: WORKING.index(code) % 16 == 0)
@pytest.mark.parametrize("code", WORKING, ids=[str(n) for n in range(len(WORKS))])
def test_an_example_that_works_is_captured(code: str, job_of: Callable[[str], Job]) -> None:
    assert set(capture(job_of(code)).graphs) == {"train", "eval"}


@pytest.mark.parametrize(("names", "code"), WARNS)
def test_an_example_that_warns_names_what_it_says(
    names: str, code: str, job_of: Callable[[str], Job]
) -> None:
    with pytest.warns(
        UserWarning,
        match=f"{re.escape(names)}.*docs/guides/capture.md#parameter-without-a-gradient",
    ):
        capture(job_of(code))


def test_every_cause_has_a_section() -> None:
    assert {cause.anchor for cause in CAUSES} - ANCHORS == set()


def test_every_cause_has_an_example_that_fails() -> None:
    assert {cause.anchor for cause in CAUSES} - {anchor for anchor, _ in FAILS} == set()


def test_every_code_block_of_the_page_is_run() -> None:
    assert TEXT.count("```python") == len(BLOCKS)
