"""Record a model's batches, and make a job with a variant for each family of shapes and flags."""

from __future__ import annotations

import enum
import inspect
import itertools
import re
import warnings
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.export import Dim

from trainload.autograd_trace.derivation.torch_guards import size_guard
from trainload.capture.guard import Guard
from trainload.capture.guards.dispatch import Dispatcher
from trainload.capture.job.ambient import neutrally
from trainload.capture.job.definition import Job, LossFunction
from trainload.capture.job.leading_rows import arranged
from trainload.capture.job.model_state import modes_kept, state_kept
from trainload.capture.job.recorded import Families, Family, Shapes
from trainload.capture.program import GraphCapture
from trainload.capture.tracing.targets import example_of, targets_of
from trainload.capture.tracing.trace import export_graph, input_specs
from trainload.core.errors import JobError

__all__ = ["Recording", "record"]

MOST_KEPT = 32
MOST_VARIANTS = 16
_LONGEST_NAME = 32


def record(
    model: nn.Module, loss: LossFunction | None = None, *, most_kept: int = MOST_KEPT
) -> Recording:
    """Record the batches on which a model is trained.

    Args:
        model: the model. In the `with` block every call is recorded, with its arguments by the
            names of forward's parameters.
        loss: as `Job.loss`, if the model does not return the loss itself. Then calls of the model
            are not recorded, but `recording(batch)` returns loss(model, batch) and records the
            batch.
        most_kept: maximum number of batches of one structure, each with different shapes, that are
            kept as examples. For the others only the shapes are recorded.

    Example:
        with trainload.record(model) as recording:
            for batch in loader:
                model(**batch).backward()  # your own loop
        package = trainload.freeze(recording.job(optimizer=optimizer), "model.tl")
    """
    return Recording(model, loss, most_kept)


class Recording:
    """The recorded batches of a model, returned by `record`.

    Attributes:
        families: recorded families of batches, most frequent first. After `job`, each knows which
            variant accepts which shapes.
    """

    def __init__(self, model: nn.Module, loss: LossFunction | None, most_kept: int) -> None:
        self._model, self._loss = model, loss
        self._seen = Families(most_kept)
        self._parameters = inspect.signature(model.forward).parameters
        self._handle: torch.utils.hooks.RemovableHandle | None = None

    def __enter__(self) -> Self:
        if self._loss is None:
            self._handle = self._model.register_forward_pre_hook(
                self._record_call, with_kwargs=True
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def __call__(self, batch: Mapping[str, Any]) -> Any:
        """Record a batch and return loss(model, batch), or model(**batch) without a loss.

        Raises JobError as `leaves_of`.
        """
        if self._loss is not None:
            self._seen.add(batch)
            return self._loss(self._model, dict(batch))
        if self._handle is None:
            self._seen.add(self._normalize(batch))
        return self._model(**batch)

    @property
    def families(self) -> tuple[Family, ...]:
        """Recorded families of batches, most frequent first."""
        return self._seen.all()

    def __str__(self) -> str:
        """Return a line for each family, and one for each of its variants."""
        lines = []
        for family in self.families:
            lines.append(str(family))
            for variant, shapes in _shapes_by_variant(family).items():
                lines.append(f"    {variant or 'the first variant'}: {len(shapes)} of the shapes")
        return "\n".join(lines)

    @neutrally
    def job(self, *, most_variants: int = MOST_VARIANTS, **fields: Any) -> Job:
        """Make a job whose variants accept every recorded batch.

        Within a family, dims that had several sizes are `Dim.AUTO`. If torch makes a constant of
        such a dim, or puts a condition on it that not all sizes meet, further variants are made
        from batches that no variant accepts yet. The kept batches are the job's `replays`: the
        freeze compares each of them with eager mode.

        Args:
            most_variants: maximum number of graphs of each kind.
            fields: fields of the `Job` except model, batch, variants and replays. `dynamic` takes
                precedence over the recorded sizes.

        Raises:
            JobError: nothing was recorded, or more than `most_variants` variants are needed; the
                message lists the families.
            CaptureError: a family cannot be captured.
        """
        conflicting = sorted({"model", "batch", "variants", "replays"} & set(fields))
        if conflicting:
            raise JobError(
                "the recording determines this field",
                where=f"Recording.job({conflicting[0]}=...)",
                hint="Omit it.",
            )
        families = self.families
        if not families:
            raise JobError(
                "nothing was recorded",
                where="trainload.record",
                hint=(
                    "Call the model inside the with block, or recording(batch) if you passed a"
                    " loss."
                ),
            )
        if len(families) > most_variants:
            raise _too_many(families, most_variants)
        fields.setdefault("loss", self._loss)
        fields["dynamic"] = _merge_dynamic(families, fields.get("dynamic", {}))
        variants: dict[str, dict[str, Any]] = {}
        for family in families:
            family.variants.clear()
            for shapes in self._variants(family, fields):
                name = _name(family, families, shapes, variants) if variants else ""
                variants[name] = family.kept[shapes]
                family.variants.update(
                    {each: name for each, by in family.variants.items() if by == _PENDING}
                )
                if len(variants) > most_variants:
                    raise _too_many(families, most_variants)
        replays = [
            batch
            for family in families
            for shapes, batch in family.kept.items()
            if min(map(min, shapes), default=0) > 0
        ]
        first = variants.pop("")
        return Job(model=self._model, batch=first, variants=variants, replays=replays, **fields)

    def _record_call(
        self, model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> None:
        bound = inspect.signature(model.forward).bind(*arguments, **keywords).arguments
        entries: dict[str, Any] = {}
        for name, value in bound.items():
            kind = self._parameters[name].kind
            if kind is inspect.Parameter.VAR_KEYWORD:
                entries |= value
            elif kind is inspect.Parameter.VAR_POSITIONAL:
                raise JobError(
                    "a call with positional arguments that forward does not name",
                    where=f"{type(model).__name__}.forward: *{name}",
                    hint=(
                        "Name the parameters, or record a loss function: trainload.record(model,"
                        " loss=...)."
                    ),
                )
            else:
                entries[name] = value
        self._seen.add(self._normalize(entries))

    def _normalize(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the batch in normal form: with forward's default flags, and without None where
        that is the default.
        """
        defaults = {name: parameter.default for name, parameter in self._parameters.items()}
        flags = {
            name: value
            for name, value in defaults.items()
            if isinstance(value, bool | int | float | str | enum.Enum)
        }
        return {
            n: v
            for n, v in {**flags, **batch}.items()
            if v is not None or defaults.get(n, inspect.Parameter.empty) is not None
        }

    def _variants(self, family: Family, fields: Mapping[str, Any]) -> Iterator[Shapes]:
        """Yield the shapes of examples until every recorded shape is accepted; `family.variants` is
        marked before each.
        """
        remaining = sorted(
            family.seen, key=lambda shapes: (not _has_usual_sizes(shapes), -family.seen[shapes])
        )
        while remaining:
            example = next((shapes for shapes in remaining if shapes in family.kept), None)
            if example is None:
                raise JobError(
                    "no variant accepts some of the recorded shapes, and none of their batches was"
                    " kept",
                    where="Recording.job",
                    got=str(remaining[:3]),
                    hint="Keep more batches: trainload.record(model, most_kept=...).",
                )
            guards = self._guards(family.kept[example], fields)
            dispatchers = [
                Dispatcher("the recorded one", {"": [guard]}, ignored=family.inputs)
                for guard in guards
            ]
            accepted = [
                shapes
                for shapes in remaining
                if all(_accepts(d, family, shapes) for d in dispatchers)
            ]
            assert example in accepted, "a guard takes its own example"
            family.variants.update(dict.fromkeys(accepted, _PENDING))
            yield example
            remaining = [shapes for shapes in remaining if shapes not in accepted]

    def _guards(self, batch: dict[str, Any], fields: Mapping[str, Any]) -> list[Guard]:
        """Return the guards of the graphs of one example."""
        job = arranged(Job(model=self._model, batch=batch, **fields))
        guards = []
        with modes_kept(self._model) as set_training, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the freeze repeats them
            for target in targets_of(job):
                example, shapes = example_of(job, target)
                set_training(target.training)
                with state_kept(self._model):
                    exported = export_graph(target, example, shapes)
                captured = GraphCapture(target.name, exported, input_specs(exported, example), ())
                guards.append(size_guard(exported, captured, example))
        return guards


_PENDING = "-"
"""Mark of shapes whose variant has no name yet."""


def _too_many(families: tuple[Family, ...], most: int) -> JobError:
    return JobError(
        f"more than {most} variants are needed",
        where="Recording.job",
        expected=f"at most {most}",
        got="; ".join(map(str, families)),
        hint=(
            "Keep rare flags and shapes out of the batches (pad, or make the flag a tensor), or"
            " raise most_variants."
        ),
    )


def _accepts(dispatcher: Dispatcher, family: Family, shapes: Shapes) -> bool:
    dtypes = (getattr(torch, dtype) for dtype in family.inputs.values())
    facts = {
        name: (dtype, shape)
        for name, dtype, shape in zip(family.inputs, dtypes, shapes, strict=True)
    }
    return not dispatcher.misfits(facts, {})


def _has_usual_sizes(shapes: Shapes) -> bool:
    """Return True if no size is 0 or 1, which torch treats as constants."""
    return all(size > 1 for shape in shapes for size in shape)


def _merge_dynamic(families: tuple[Family, ...], user_entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return `Job.dynamic`: the user's entries, and AUTO for every other dim that varied."""
    dynamic: dict[str, Any] = dict(user_entries)
    for family in families:
        for name, dims in family.varied().items():
            if name not in user_entries or isinstance(user_entries[name], Mapping):
                dynamic[name] = {**dict.fromkeys(dims, Dim.AUTO), **dynamic.get(name, {})}
    return dynamic


def _shapes_by_variant(family: Family) -> dict[str, list[Shapes]]:
    by_variant: dict[str, list[Shapes]] = {}
    for shapes, variant in family.variants.items():
        by_variant.setdefault(variant, []).append(shapes)
    return by_variant


def _name(
    family: Family, families: tuple[Family, ...], shapes: Shapes, used_names: Mapping[str, Any]
) -> str:
    """Return a name that says how a variant differs from the first one: "with_mask", "task_b",
    "image_32_32".
    """
    first = families[0]
    words = [f"with_{name}" for name in family.inputs if name not in first.inputs]
    words += [f"without_{name}" for name in first.inputs if name not in family.inputs]
    words += [
        f"{name}_{value.text}"
        for name, value in family.constants.items()
        if first.constants.get(name, value) != value
    ]
    words += [
        f"{name}_{dtype}"
        for name, dtype in family.inputs.items()
        if first.inputs.get(name, dtype) != dtype
    ]
    if _shapes_by_variant(family).keys() - {_PENDING} or not words:
        varied = family.varied()
        sized = [(n, s) for n, s in zip(family.inputs, shapes, strict=True) if n in varied] or list(
            zip(family.inputs, shapes, strict=True)
        )
        words += [f"{name}_{'_'.join(map(str, shape[1:]))}" for name, shape in sized]
    text = re.sub(r"_+", "_", re.sub(r"[^a-z0-9]", "_", "_".join(words[:3]).lower())).strip("_")
    text = (text if text[:1].isalpha() else f"v_{text}")[:_LONGEST_NAME].strip("_")
    if text not in used_names and text not in ("eval", "predict", "update"):
        return text
    return next(
        name
        for n in itertools.count(2)
        if (name := f"{text[: _LONGEST_NAME - 4]}_{n}") not in used_names
    )
