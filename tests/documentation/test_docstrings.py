"""Every public name has an example in its docstring, which runs (with fewer steps and workers)."""

from __future__ import annotations

import inspect
import shutil
import textwrap
from pathlib import Path

import pytest
from tests.documentation.small_job import FEWER_STEPS, PACKAGE, ROWS, WHILE_IT_RUNS, run_examples
from tests.packaging.signers import Signers

import trainload

AS_DOCTEST = ("Adapters", "Overrides")
"""Names whose examples run as doctests, in tests/launch/settings."""
NAMES = [
    name
    for name in trainload.__all__
    if name not in AS_DOCTEST
    and name != "__version__"
    and not (
        isinstance(getattr(trainload, name), type)
        and issubclass(getattr(trainload, name), Exception)
    )
]
ON_RAY = ("EvaluationResult", "RunResult", "evaluate", "launch", "resume", "write_rows")
ON_WORKERS = """
package = trainload.open("gpt.tl")
plan = trainload.plan(package, trainload.Cluster(devices_per_node=2), "zero1", global_batch=4)
shutil.copy("train.parquet", "test.parquet")
"""
LOSS_IN_MODEL = """
class Model(Gpt):
    def forward(self, tokens):
        return super().forward(tokens.long()).square().mean()
model = Model()
loader = [{"tokens": torch.randint(0, 12, (rows, 5), dtype=torch.uint8)} for rows in (4, 4, 6)]
"""
RUN = """
plan = trainload.plan(package, trainload.Cluster(), "single", global_batch=4)
trainload.launch(package, plan, "train.parquet", run_dir="runs/first", steps=2, backend="local")
"""
SECOND = 'trainload.freeze(dataclasses.replace(gpt, seed=1), "second.tl")\n'
RELEASES = """
trainload.push("gpt.tl", "models/gpt", line="main", message="first")
"""
BEFORE = {
    "EventSink": "from collections.abc import Mapping",
    "Sink": "from collections.abc import Mapping",
    "Diagnosis": RUN,
    "EvaluationResult": ON_WORKERS,
    "Graph": """
def generator_loss(model, batch):
    return model(batch["noise"]).square().mean()
generator_optimizer = optimizer
""",
    "RunComparison": RUN,
    "RunResult": ON_WORKERS,
    "Store": RELEASES,
    "CompiledComparison": RUN,
    "StepComparison": RUN,
    "compare_compiled": RUN,
    "compare_run": RUN,
    "compare_step": RUN,
    "debug": RUN,
    "dry_run": ON_WORKERS,
    "diff": 'shutil.copytree("gpt.tl", "gpt-retrained.tl")',
    "evaluate": ON_WORKERS,
    "freeze": LOSS_IN_MODEL + 'shutil.rmtree("gpt.tl")\nbatch = loader[0]',
    "gc": RELEASES,
    "open": """
trainload.push("gpt.tl", "models/store", line="gpt")
trainload.push("second.tl", "models/store", line="gpt")
Path("my_ops.py").write_text("")
""",
    "profile": WHILE_IT_RUNS,
    "promote": RELEASES + 'trainload.push("second.tl", "models/gpt", line="main", promote=False)',
    "pull": RELEASES + 'shutil.rmtree("gpt.tl")',
    "record": LOSS_IN_MODEL,
    "record_step": RUN,
    "releases": RELEASES,
    "resume": ON_WORKERS
    + """
trainload.launch(package, plan, "train.parquet", run_dir="runs/first", steps=2)
""",
    "verify": 'trainload.sign("gpt.tl", "release-key.pem", name="release")',
    "write_rows": ON_WORKERS,
}
"""Code before the examples that need more than the small job and its package."""


def example_of(name: str) -> str:
    """Return the code of the example in a public name's docstring."""
    text = inspect.getdoc(getattr(trainload, name)) or ""
    _, _, example = text.partition("\nExample:\n")
    return textwrap.dedent(example.split("\n\nReturns:")[0])


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory, signers: Signers) -> Path:
    """A folder with the package, its data and a signing key."""
    folder = tmp_path_factory.mktemp("workshop")
    with pytest.MonkeyPatch.context() as patch:
        run_examples("workshop", ROWS + PACKAGE + SECOND, [], folder, patch, {})
    shutil.copy(signers.alice.key, folder / "release-key.pem")
    shutil.copy(signers.alice.public, folder / "release-key.pub.pem")
    return folder


def run(name: str, workshop: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the example of a name in a copy of the workshop."""
    shutil.copytree(workshop, folder, dirs_exist_ok=True)
    (folder / "models").mkdir()
    before = "import shutil\njob, numpy = gpt, np\npackage = trainload.open('gpt.tl')\n"
    replacements = {
        **FEWER_STEPS,
        "workers=4": "workers=1",
        "s3://models": str(folder / "models"),
    }
    run_examples(
        name,
        before + BEFORE.get(name, ""),
        [example_of(name)],
        folder,
        monkeypatch,
        replacements,
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_has_an_example(name: str) -> None:
    assert "trainload." in example_of(name)
    compile(example_of(name), name, "exec")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ON_RAY])
@pytest.mark.filterwarnings("ignore")  # the examples have small models
def test_an_example_runs(
    name: str, workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(name, workshop, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_RAY)
@pytest.mark.filterwarnings("ignore")  # as above
def test_an_example_trains_on_ray(
    name: str,
    ray_cluster: None,
    workshop: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run(name, workshop, tmp_path, monkeypatch)
