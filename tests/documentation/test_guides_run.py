"""The commands of the guides, the reference and the first pages run as they are written.

Each page has a folder with the files that it takes for granted, S3 servers, a registry and a hub
where it names them. Runs train in one process without Inductor, unless the page names a cluster.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.documentation.guide_folder import Page, copy_files, fill_buckets, make_folder, run
from tests.documentation.page_commands import PAGES, blocks, commands, is_program
from tests.house.source import ROOT
from tests.packaging.places import KEYS, s3_server
from tests.packaging.registry import registry_server
from tests.publishing.hub_server import TOKEN, Repository, serving
from tests.shared import made_once


@dataclass(frozen=True, slots=True)
class Given:
    """Files, services and commands that the commands of a page need before they run.

    Attributes:
        files: names in the prepared folder and in the page's.
        renamed: name in the page's folder -> name in the prepared one.
        texts: name in the page's folder -> content.
        buckets: files in the buckets of its S3 server.
        before: commands that run first.
        replacements: text of its commands -> what is run instead.
        training: beginnings of commands that train until a later one stops them -> the run.
        already: run that trains while the commands run -> the command that started it.
        statuses: beginnings of commands -> exit status, if it is not 0.
        variables: environment variables.
        has_scripts: True if its Python blocks are scripts that run here.
        libraries: modules without which the test is skipped: make integrations.
        on_ray: True if its runs are on Ray, as it says, and not in one process.
        compiles: True if its runs compile.
    """

    files: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    buckets: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    replacements: Mapping[str, str] = field(default_factory=dict)
    training: Mapping[str, str] = field(default_factory=dict)
    already: Mapping[str, str] = field(default_factory=dict)
    statuses: Mapping[str, int] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    has_scripts: bool = False
    libraries: tuple[str, ...] = ()
    on_ray: bool = False
    compiles: bool = False


ON_RAY = """
store: store
line: gpt
package: gpt.tl
runs: retraining
data: {files: data/*.parquet}
evaluation: {hold_out: 0.1}
cluster: {address: auto}
gate: {require: eval.loss <= champion.eval.loss * 1.01}
schedule: {cron: "0 3 * * *"}
"""
MY_OPS = """
import torch

@torch.library.custom_op("my_ops::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2

double.register_fake(torch.empty_like)
double.register_autograd(lambda ctx, gradient: gradient * 2)
"""
FUSED_JOB = """
import my_ops
from base import Gpt, job_of

class Fused(Gpt):
    def forward(self, tokens):
        return my_ops.double(super().forward(tokens))

def job():
    return job_of(Fused(8, 2), 64)
"""
SAVE_TO_DISK = (
    "python -c \"import datasets; rows = datasets.load_dataset('parquet', data_files="
    "'train.parquet', split='train'); datasets.DatasetDict(train=rows, test=rows)"
    ".save_to_disk('corpus')\""
)
RETRAINING = (
    "trainload retrain init retrain.yaml",
    "echo 'cluster: {backend: local, compile: false}' >> retrain.yaml",
)
FINISHED = "trainload launch gpt.tl --data train.parquet --run-dir runs/gpt"
ADAPTED = (
    "trainload launch gpt.tl --data mine.parquet --run-dir runs/first --steps %d"
    " --checkpoint-every 100 --set keep=100 --set adapters.rank=2"
    " --set adapters.layers=*.q_proj.weight"
)
RUN = ("gpt.tl", "train.parquet")
STORE = ("models/store",)
GIVEN = {
    "docs/index.md": Given(renamed={"model.tl": "gpt.tl"}, files=("train.parquet",), on_ray=True),
    "docs/guides/abstract.md": Given(
        files=("job.py", "rows.parquet"),
        replacements={"--nodes 128 --devices-per-node 8 --strategy zero3": "--strategy single"},
    ),
    "docs/guides/adapters.md": Given(files=("gpt.tl", "mine.parquet"), before=(ADAPTED % 500,)),
    "docs/guides/assets.md": Given(
        files=("job.py",),
        before=(
            "mkdir -p runs/tokenizer",
            "echo free > LICENSE",
            "echo '{}' > runs/tokenizer/vocab.json",
            "echo la > voices.bin",
        ),
    ),
    "docs/guides/builds.md": Given(
        files=(*RUN, "data"),
        renamed={"package.tl": "gpt.tl"},
        before=(
            "openssl ecparam -name prime256v1 -genkey -noout -out build-key.pem",
            "openssl pkey -in build-key.pem -pubout -out build-key.pub.pem",
            "trainload push gpt.tl s3://models/store --line gpt",
            "trainload push gpt.tl store --line main",
            "trainload retrain init retraining.yaml",
        ),
        on_ray=True,
        compiles=True,
    ),
    "docs/guides/clusters.md": Given(files=RUN),
    "docs/guides/command-line.md": Given(files=RUN),
    "docs/guides/data.md": Given(
        files=("gpt.tl", "train.parquet", "rows.py", "held-out.safetensors"),
        buckets=("bucket/corpus",),
        before=(SAVE_TO_DISK,),
        libraries=("datasets",),
    ),
    "docs/guides/debugging.md": Given(
        files=("gpt.tl", "rows.parquet", "plan.json"),
        before=(
            "trainload launch gpt.tl --data rows.parquet --run-dir runs/first --steps 80"
            " --checkpoint-every 10 --set keep=100",
            "trainload launch gpt.tl --data rows.parquet --run-dir s3://bucket/runs/first",
        ),
    ),
    "docs/guides/diff.md": Given(
        files=("gpt.tl", "gpt-trained.tl"),
        renamed={"old.tl": "gpt.tl", "new.tl": "gpt-trained.tl"},
        statuses={"trainload diff old.tl new.tl --exit-code": 1},
    ),
    "docs/guides/doctor.md": Given(
        on_ray=True,
        replacements={"s3://bucket/runs": "runs"},  # the nodes of the cluster have no keys
    ),
    "docs/guides/export.md": Given(
        files=("gpt.tl", "mine.parquet"),
        before=(ADAPTED % 5,),
        libraries=("onnx", "onnxruntime", "onnxscript"),
        buckets=STORE,
    ),
    "docs/guides/hub.md": Given(files=("gpt-trained.tl",)),
    "docs/guides/orchestrators.md": Given(
        files=("data",), renamed={"package.tl": "gpt.tl"}, before=RETRAINING
    ),
    "docs/guides/pages.md": Given(files=(*RUN, "plan.json"), buckets=STORE, before=(FINISHED,)),
    "docs/guides/passes.md": Given(files=("gpt.tl", "mine.py")),
    "docs/guides/planner.md": Given(files=("gpt.tl",)),
    "docs/guides/profiling.md": Given(
        files=RUN,
        replacements={" --rank 3": ""},  # of a run of one rank
        already={
            "runs/gpt": "trainload launch gpt.tl --data train.parquet --run-dir runs/gpt",
            "s3://bucket/runs/gpt": "trainload launch gpt.tl --data train.parquet"
            " --run-dir s3://bucket/runs/gpt",
        },
    ),
    "docs/guides/retraining.md": Given(
        files=("gpt.tl", "data", "job.py"),
        texts={"on-ray.yaml": ON_RAY},
        buckets=STORE,
        before=("sed s/self.layers/self.blocks/ job.py > new_job.py",),
        replacements={"schedule:\n": "cluster: {backend: local, compile: false}\nschedule:\n"},
    ),
    "docs/guides/runs.md": Given(
        files=(*RUN, "plan.json"),
        buckets=("bucket/gpt.tl", "bucket/rows"),
        training={
            "trainload launch gpt.tl --plan plan.json --data train.parquet": "runs/gpt",
            "trainload resume runs/gpt": "runs/gpt",
            "trainload launch s3://bucket/gpt.tl": "s3://bucket/runs/gpt",
            "trainload resume s3": "s3://bucket/runs/gpt",
        },
    ),
    "docs/guides/shapes.md": Given(files=("job.py",)),
    "docs/guides/store.md": Given(files=RUN, renamed={"new.tl": "gpt-trained.tl"}),
    "docs/guides/trackers.md": Given(
        files=(*RUN, "data"),
        renamed={"package.tl": "gpt.tl"},
        before=(
            *RETRAINING,
            "trainload push gpt.tl store --line main",
            "trainload launch gpt.tl --data train.parquet --output second.tl",
            "trainload push second.tl store --line main",
        ),
        variables={"MLFLOW_TRACKING_URI": "mlruns"},
    ),
    "docs/guides/trust.md": Given(
        files=("gpt.tl",),
        before=("openssl ecparam -name prime256v1 -genkey -noout -out bob.pem",),
    ),
    "docs/guides/watching.md": Given(files=RUN, before=(FINISHED,), on_ray=True),
    "docs/guides/weights.md": Given(
        files=(*RUN, "llama-70b.tl", "job.py", "rows.parquet", "test.parquet", "hub/gpt2"),
        renamed={
            "plan.json": "llama-plan.json",
            "hub/llama-8b": "s3/models/llama-70b",
            "llama-8b.tl": "llama-70b.tl",
            "runs/best.safetensors": "best.safetensors",
        },
        buckets=("bucket/rows", "models/llama-70b"),
    ),
    "docs/how-to/make-a-step-faster.md": Given(
        files=RUN,
        already={"run": "trainload launch gpt.tl --data train.parquet --run-dir run"},
    ),
    "docs/how-to/run-without-a-shared-file-system.md": Given(
        files=("gpt.tl",),
        buckets=("bucket/corpus",),
        replacements={" --address HEAD:6379": ""},  # whose nodes would have keys
        training={
            "trainload launch": "s3://bucket/runs/gpt",
            "trainload resume": "s3://bucket/runs/gpt",
        },
    ),
    "docs/reference/operators.md": Given(
        files=RUN,
        renamed={"base.py": "job.py"},
        texts={"my_ops.py": MY_OPS, "job.py": FUSED_JOB, "lacking.txt": "aten.linear.default"},
        before=("trainload freeze job.py:job -o fused.tl",),
        replacements={'run_dir="': 'backend="local", compile=False, run_dir="'},
        has_scripts=True,
    ),
    "docs/reference/plans.md": Given(
        files=RUN,
        renamed={"small.json": "plan.json"},
        replacements={
            "launch gpt.tl --plan plan.json": "launch gpt.tl --plan small.json",
            "--tensor 8": "--tensor 2",
        },
    ),
}
"""Every page with commands, and what its readers have already."""


def is_run(name: str) -> bool:
    """Return True if a page has a command that a test runs."""
    page = ROOT / name
    found = [command for block in blocks(page) for command in commands(block)]
    return any(not command.reason for command in found)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder from which every page gets its files."""
    return made_once(tmp_path_factory, "guides", make_folder)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """An S3 server, which every page fills again."""
    with s3_server() as url:
        yield url


def variables_of(
    text: str,
    given: Given,
    stack: ExitStack,
    made: Path,
    folder: Path,
    request: pytest.FixtureRequest,
) -> tuple[dict[str, str], dict[str, str]]:
    """Start the servers that a page names.

    Returns:
        Environment variables by which commands find them, and names in the page -> their addresses.
    """
    variables: dict[str, str] = {}
    addresses: dict[str, str] = {}
    if "s3://" in text:
        variables |= {**KEYS, "AWS_ENDPOINT_URL": request.getfixturevalue("server")}
    if "oci://" in text:
        addresses["registry.example.com"] = stack.enter_context(registry_server(folder))
    if "hf://" in text:
        hub = stack.enter_context(serving())
        variables |= {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
        variables["HF_HOME"] = str(folder)
        hub.repositories["datasets/team/rows"] = rows = Repository(private=False)
        rows.add("main", {"train.parquet": (made / "train.parquet").read_bytes()})
        addresses["2f1c…"] = hashlib.sha1(b"main 1").hexdigest()  # the server's second commit
    if given.on_ray and "HEAD:6379" in text:
        request.getfixturevalue("ray_cluster")
        import ray

        addresses["HEAD:6379"] = ray.get_runtime_context().gcs_address
    return variables, addresses


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.ray if given.on_ray else pytest.mark.alone)
        for name, given in GIVEN.items()
    ],
)
def test_the_commands_of_a_page_run(
    name: str,
    made: Path,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> None:
    page, given = ROOT / name, GIVEN[name]
    for library in given.libraries:
        pytest.importorskip(library)
    text = "\n".join(block.text for block in blocks(page))
    copy_files(made, {**{file: file for file in given.files}, **given.renamed}, tmp_path)
    for file, content in given.texts.items():
        (tmp_path / file).write_text(content)
    with ExitStack() as stack:
        servers = tmp_path_factory.mktemp("servers")
        variables, addresses = variables_of(text, given, stack, made, servers, request)
        variables |= given.variables
        if "s3://" in text:
            tree = tmp_path_factory.mktemp("s3")
            for bucket in ("bucket", "models"):
                (tree / bucket).mkdir()
            copy_files(made / "s3", given.buckets, tree)
            fill_buckets(variables["AWS_ENDPOINT_URL"], tree)
        for line in given.before:
            run(line, tmp_path, variables)
        replacements = {**given.replacements, **addresses}
        guide = Page(
            tmp_path,
            variables,
            replacements,
            given.training,
            given.statuses,
            on_ray=given.on_ray,
            compiles=given.compiles,
            has_scripts=given.has_scripts,
        )
        assert guide.run(page, given.already) > 0


def test_every_page_with_commands_is_run() -> None:
    names = [str(page.relative_to(ROOT)) for page in PAGES]
    assert {name for name in names if is_run(name) and not is_program(name)} == {*GIVEN}
