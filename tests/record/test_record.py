"""Recording of real batches, and the resulting job."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.capture.jobs import sgd
from torch import Tensor, nn

import trainload
from trainload.capture.job.definition import Job
from trainload.core.errors import CaptureError, JobError
from trainload.freezing.record import Recording
from trainload.packaging.package import Package


class Model(nn.Module):
    """Model with conditional inputs.

    It takes images of any size, with a separate head for size 8; an optional mask; and a task.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.small = nn.Linear(64, 4)
        self.mask = nn.Linear(3, 4)

    def forward(
        self, image: Tensor, label: Tensor, mask: Tensor | None = None, *, task: str = "sum"
    ) -> Tensor:
        y = self.conv(image)
        y = self.small(y.mean(1).flatten(1)) if image.shape[-1] == 8 else y.mean((2, 3))
        if mask is not None:
            y = y + self.mask(mask)
        loss = nn.functional.cross_entropy(y, label)
        return loss if task == "sum" else loss * 2


def batch(rows: int, side: int, **more: Any) -> dict[str, Any]:
    return {
        "image": torch.randn(rows, 1, side, side),
        "label": torch.randint(0, 4, (rows,)),
        **more,
    }


def masked(rows: int, side: int, **more: Any) -> dict[str, Any]:
    return batch(rows, side, mask=torch.randn(rows, 3), **more)


BATCHES = [
    batch(4, 12),
    batch(4, 16),
    batch(4, 20),
    batch(3, 12),
    batch(1, 12),
    batch(4, 8),
    masked(4, 12),
    masked(4, 12),
    batch(4, 12, task="twice"),
]


def recorded(
    model: nn.Module, batches: list[dict[str, Any]] = BATCHES, **options: Any
) -> Recording:
    with trainload.record(model, **options) as recording:
        for each in batches:
            model(**each)
    return recording


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.fixture(scope="module")
def recording(model: Model) -> Recording:
    return recorded(model)


@pytest.fixture(scope="module")
def job(recording: Recording) -> Job:
    return recording.job(optimizer=sgd, steps=3)


@pytest.fixture(scope="module")
def package(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Package:
    return trainload.freeze(job, tmp_path_factory.mktemp("recorded") / "job.tl")


def test_there_is_a_family_for_each_structure_and_flag(recording: Recording) -> None:
    assert [
        (family.count, len(family.seen), sorted(family.inputs)) for family in recording.families
    ] == [
        (6, 6, ["image", "label"]),
        (2, 1, ["image", "label", "mask"]),
        (1, 1, ["image", "label"]),
    ]


def test_a_family_says_which_dims_varied(recording: Recording) -> None:
    assert recording.families[0].varied() == {"image": (2, 3)}


def test_a_variant_is_made_for_each_flag_and_for_each_size_that_no_graph_shares(job: Job) -> None:
    assert list(job.variants) == ["image_1_8_8", "with_mask", "task_twice"]


def test_the_first_variant_is_of_the_batches_that_came_most(job: Job) -> None:
    assert job.batch["image"].shape == (4, 1, 12, 12)


def test_the_report_says_what_became_of_what_was_seen(recording: Recording, job: Job) -> None:
    assert str(recording).splitlines() == [
        (
            "6 times, 6 shapes: image float32[1|3|4, 1, 8|12|16|20, 8|12|16|20], label"
            " int64[1|3|4], task='sum'"
        ),
        "    the first variant: 5 of the shapes",
        "    image_1_8_8: 1 of the shapes",
        (
            "2 times, 1 shape: image float32[4, 1, 12, 12], label int64[4], mask float32[4, 3],"
            " task='sum'"
        ),
        "    with_mask: 1 of the shapes",
        "once, 1 shape: image float32[4, 1, 12, 12], label int64[4], task='twice'",
        "    task_twice: 1 of the shapes",
    ]


@pytest.mark.slow  # test_variants_page.py also records, freezes and dispatches to variants
@pytest.mark.parametrize(
    ("given", "name"),
    [
        (batch(5, 14), "train"),
        (batch(2, 8), "train-image_1_8_8"),
        (masked(5, 12), "train-with_mask"),
        (batch(5, 12, task="twice"), "train-task_twice"),
    ],
)
def test_the_package_takes_what_was_seen(
    package: Package, given: dict[str, Any], name: str
) -> None:
    assert package.dispatch(given) == name


def test_every_batch_that_was_kept_is_replayed(job: Job) -> None:
    assert len(job.replays) == 8


def test_the_batches_are_copies(model: Model) -> None:
    given = batch(4, 12)
    recording = recorded(model, [given])
    given["image"].zero_()
    assert recording.families[0].kept[((4, 1, 12, 12), (4,))]["image"].any()


def test_positional_arguments_get_the_names_of_forward(model: Model) -> None:
    given = masked(4, 12)
    with trainload.record(model) as recording:
        model(given["image"], given["label"], given["mask"])
    assert sorted(recording.families[0].inputs) == ["image", "label", "mask"]


def test_a_none_that_is_the_default_is_as_if_it_was_not_given(model: Model) -> None:
    assert len(recorded(model, [batch(4, 12), batch(4, 12, mask=None)]).families) == 1


def test_nothing_is_noted_after_the_block(model: Model) -> None:
    recording = recorded(model, [batch(4, 12)])
    model(**batch(4, 16))
    assert recording.families[0].count == 1


def test_a_loss_function_is_recorded_by_calling_the_recording() -> None:
    torch.manual_seed(0)
    net = nn.Linear(6, 2)

    def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        return nn.functional.mse_loss(model(batch["x"]), batch["y"])

    with trainload.record(net, loss=loss) as recording:
        for rows in (4, 3):
            given = {"x": torch.randn(rows, 6), "y": torch.randn(rows, 2)}
            torch.testing.assert_close(recording(given), loss(net, given))
    job = recording.job(optimizer=sgd)
    assert job.loss is loss
    assert (sorted(job.batch), job.variants) == (["x", "y"], {})


def test_only_so_many_batches_are_kept(model: Model) -> None:
    recording = recorded(model, [batch(4, side) for side in (12, 14, 16, 18)], most_kept=2)
    assert (len(recording.families[0].seen), len(recording.families[0].kept)) == (4, 2)
    assert len(recording.job(optimizer=sgd).variants) == 0


def test_a_shape_that_no_variant_takes_and_that_was_not_kept_is_named(model: Model) -> None:
    recording = recorded(model, [batch(4, 12), batch(4, 8)], most_kept=1)
    with pytest.raises(JobError, match=r"none of their batches was kept.*8, 8"):
        recording.job(optimizer=sgd)


def test_too_many_variants_are_refused_with_what_was_seen(model: Model) -> None:
    recording = recorded(model, [batch(4, 12, task=f"task {number}") for number in range(4)])
    with pytest.raises(JobError, match=r"more than 3 variants are needed.*task='task 2'"):
        recording.job(optimizer=sgd, most_variants=3)


@pytest.mark.slow  # the test above covers several families
def test_too_many_variants_of_one_family_are_refused(model: Model) -> None:
    recording = recorded(model, [batch(4, 12), batch(4, 8)])
    with pytest.raises(JobError, match=r"more than 1 variants are needed .*8\|12"):
        recording.job(optimizer=sgd, most_variants=1)


def test_a_recording_of_nothing_is_refused(model: Model) -> None:
    with pytest.raises(JobError, match="nothing was recorded"):
        recorded(model, []).job(optimizer=sgd)


@pytest.mark.parametrize("field", ["model", "batch", "variants", "replays"])
def test_what_the_recording_finds_is_not_given(recording: Recording, field: str) -> None:
    given: dict[str, Any] = {field: None}
    with pytest.raises(JobError, match="the recording determines this field"):
        recording.job(optimizer=sgd, **given)


def test_what_a_batch_cannot_hold_is_refused_where_it_comes() -> None:
    class Anything(nn.Module):
        def forward(self, x: object) -> None:
            """Accept anything."""

    net = Anything()
    with trainload.record(net), pytest.raises(JobError, match="type that a batch cannot contain"):
        net(object())


def test_a_batch_on_which_a_graph_differs_from_eager_refuses_the_freeze(tmp_path: Path) -> None:
    class Sly(nn.Module):
        """A model whose result depends on a value, hidden from graphs."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            factor = 1.0 if torch.compiler.is_exporting() or x.max() < 100 else 2.0
            found: Tensor = (self.linear(x) * factor).square().mean()
            return found

    torch.manual_seed(0)
    net = Sly()
    with trainload.record(net) as recording:
        net(torch.randn(4, 4))
        net(torch.full((3, 4), 200.0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(
            CaptureError, match=r"differs from eager mode in its loss 'loss' on 3 rows"
        ):
            trainload.freeze(recording.job(optimizer=sgd), tmp_path / "sly.tl")


def test_a_replay_that_fits_no_variant_refuses_the_freeze(model: Model, tmp_path: Path) -> None:
    job = Job(model=model, batch=batch(4, 12), replays=[batch(4, 16)], optimizer=sgd)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(JobError, match=r"Job\.replays\[0\].*image\[2\]: expected 12, got 16"):
            trainload.freeze(job, tmp_path / "job.tl")
