"""Changes of a package's training at launch, without a new freeze: its recipe, and which parameters
it trains.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from trainload.core.errors import JobError
from trainload.core.suggestions import did_you_mean
from trainload.launching.settings.adapters import Adapters
from trainload.launching.settings.info import SettingInfo

if TYPE_CHECKING:
    from trainload.autograd_trace.graphs import GroupRecipe, Recipe
    from trainload.packaging.format.field_types import Option
    from trainload.packaging.format.manifest import Manifest
    from trainload.packaging.package import Package

_SCHEDULES = ("constant", "linear", "cosine")
LAW = "it determines the rows of every step, including those already done: launch a new run"
_IN_UPDATE = "it is a constant of the captured update: freeze the job again with another value"
_IN_GRAPH = (
    "it is part of the captured graph: freeze the job again with another value, or rewrite the"
    " graph with `trainload transform`"
)
FIXED: Mapping[str, str] = {
    **dict.fromkeys(
        ("optimizer", "weight_decay", "betas", "momentum", "eps", "nesterov", "amsgrad"), _IN_UPDATE
    ),
    **dict.fromkeys(("dropout", "dtype", "label_smoothing"), _IN_GRAPH),
    "ema_decay": _IN_UPDATE,
    "autocast": "set precision=bf16 or precision=fp32",
}
"""Settings that other tools have and a launch cannot change, and why."""


def _check_schedule(text: str) -> str:
    shape, colon, warmup = text.partition(":")
    if shape not in _SCHEDULES or (colon and not warmup.isdecimal()):
        rule = (
            f"must be one of {', '.join(_SCHEDULES)}, optionally followed by :WARMUP, a number of"
            " updates"
        )
        hint = "" if shape in _SCHEDULES else did_you_mean(shape, _SCHEDULES)
        raise ValueError(f"{rule}. {hint}" if hint else rule)
    return text


class Overrides(BaseModel):
    """Changes of a package's recipe, and of which parameters it trains. None: as it was frozen.

    >>> Overrides(lr=1e-4, frozen=("embed.*",)).settings()
    {'frozen': ('embed.*',), 'lr': 0.0001}
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    lr: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Peak learning rate of the first parameter group; those of the other groups keep their ratio
    to it.
    """
    group_lr: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(
        default_factory=dict
    )
    """Peak learning rate by parameter group."""
    schedule: Annotated[str, AfterValidator(_check_schedule)] | None = None
    """Learning rate over the run's steps: `constant`, `linear` or `cosine` (to zero). `cosine:100`:
    after a warmup of 100 updates, which must be fewer than the run has.
    """
    clip_norm: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Maximum norm of the gradient; 0 switches clipping off."""
    clip_value: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Maximum absolute value of the gradient's elements; 0 switches clipping off."""
    frozen: Annotated[
        tuple[str, ...],
        SettingInfo(
            fixed=(
                "the run's checkpoints hold the optimizer state of the parameters trained so far:"
                " launch a new run"
            )
        ),
    ] = ()
    """Shell patterns of names of parameters that are not trained: they have no gradient and no
    optimizer state.
    """
    seed: Annotated[int | None, SettingInfo(fixed=LAW)] = Field(default=None, ge=0, lt=2**63)
    """Seed of the order of rows and of random numbers."""
    adapters: Annotated[
        Adapters | None,
        SettingInfo(
            fixed=(
                "the run's checkpoints hold other parameters: launch a new run from this run's"
                " output package"
            )
        ),
    ] = None
    """Low-rank adapters that are trained in place of whole parameters."""
    precision: Annotated[
        Literal["bf16", "fp32"] | None,
        SettingInfo(
            fixed=(
                "the run's checkpoints are in the precision that it started with: launch a new run"
            )
        ),
    ] = None
    """`bf16`: all graphs run under autocast to bfloat16, while parameters and optimizer state keep
    their dtypes. `fp32`: without autocast.
    """

    def settings(self) -> dict[str, Option]:
        """Return the changes by the names that `--set` has for them."""
        changes: dict[str, Option] = {}
        for name in sorted(type(self).model_fields):
            value = getattr(self, name)
            if name == "group_lr":
                changes |= {f"lr.{group}": rate for group, rate in sorted(value.items())}
            elif isinstance(value, Adapters):
                adapter_fields = {
                    f"{name}.{field}": getattr(value, field)
                    for field in sorted(Adapters.model_fields)
                }
                changes |= {
                    field: each for field, each in adapter_fields.items() if each not in (None, ())
                }
            elif value not in (None, ()):
                changes[name] = value
        return changes

    def apply(self, package: Package, steps: int | None = None) -> Package:
        """Return the package with these changes, for which a plan is made and which a run trains.

        Files and identity stay the same, unless the graphs change: then the result is a derived
        package in the node's cache, whose parent is this package.

        Args:
            package: the frozen package.
            steps: length of the run, over which a schedule is spread. None: the recipe's, if the
                length of the run is not known yet, as for a plan.

        Raises:
            JobError: the package has no such group or parameter; nothing is left to train; the
                adapters do not fit; the schedule rises throughout these steps.
            PackageError: the package is abstract, and its graphs would be changed.

        Example:
            changed = trainload.Overrides(lr=1e-4, frozen=("embed.*",)).apply(package)
            plan = trainload.plan(changed, trainload.Cluster(devices_per_node=2))
        """
        if self == Overrides():
            return package
        from trainload.launching.node.cache import default_cache_dir
        from trainload.launching.settings.derivation import Changes, derived_package

        if changes := Changes(self.adapters, self.precision):
            seed = package.recipe.seed if self.seed is None else self.seed
            package = derived_package(package, changes, seed, default_cache_dir())
        if self.schedule is not None and steps:
            _check_peak(self.schedule, steps)
        recipe, frozen_names = self._without_frozen(package)
        recipe = self._with_rates(recipe, steps or recipe.steps)
        if self.clip_norm is not None or self.clip_value is not None:
            recipe = self._with_clipping(recipe)
        if self.seed is not None:
            recipe = recipe.model_copy(update={"seed": self.seed})
        parameters = tuple(
            (
                entry.model_copy(update={"trainable": False})
                if (entry.alias_of or entry.name) in frozen_names
                else entry
            )
            for entry in package.manifest.parameters
        )
        return replace(
            package,
            manifest=package.manifest.model_copy(
                update={"recipe": recipe, "parameters": parameters}
            ),
        )

    def trained(self, manifest: Manifest) -> frozenset[str]:
        """Return the parameters of a frozen package that are trained, or whose adapters are.

        Raises:
            JobError: as for `Adapters.chosen`.
        """
        names = {
            entry.name
            for entry in manifest.parameters
            if entry.trainable and entry.alias_of is None
        }
        if self.adapters is not None:
            names = {
                adapter.weight for adapter in self.adapters.chosen(manifest)
            } | self.adapters.trained_beside(manifest)
        return frozenset(
            name for name in names if not any(fnmatchcase(name, pattern) for pattern in self.frozen)
        )

    def _without_frozen(self, package: Package) -> tuple[Recipe, frozenset[str]]:
        """Return the recipe without the parameters that are not trained, and their names."""
        recipe = package.recipe
        names = [name for group in recipe.groups for name in group.parameters]
        for pattern in self.frozen:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise JobError(
                    f"no trained parameter matches {pattern!r}",
                    where="frozen",
                    expected=", ".join(names[:5]) + (", ..." if len(names) > 5 else ""),
                    hint=did_you_mean(
                        pattern,
                        names,
                        "Use shell patterns, such as `layers.0.*`. `trainload inspect` lists the"
                        " names.",
                    ),
                )
        frozen_names = frozenset(
            name for name in names if any(fnmatchcase(name, pattern) for pattern in self.frozen)
        )
        if not frozen_names:
            return recipe, frozen_names
        if frozen_names == set(names):
            raise JobError(
                "all parameters are frozen, so nothing is left to train",
                where="frozen",
                got=", ".join(self.frozen),
            )
        groups = tuple(
            group.model_copy(update={"parameters": trained})
            for group in recipe.groups
            if (trained := tuple(name for name in group.parameters if name not in frozen_names))
        )
        group_names = {group.name for group in groups}
        graphs = {
            name: graph.model_copy(
                update={"groups": tuple(group for group in graph.groups if group in group_names)}
            )
            for name, graph in recipe.graphs.items()
        }
        return recipe.model_copy(update={"groups": groups, "graphs": graphs}), frozen_names

    def _with_rates(self, recipe: Recipe, steps: int) -> Recipe:
        if self.lr is None and not self.group_lr and self.schedule is None:
            return recipe
        strange = sorted(set(self.group_lr) - {group.name for group in recipe.groups})
        if strange:
            raise JobError(
                f"there is no parameter group {strange[0]!r}",
                where="lr",
                expected=", ".join(group.name for group in recipe.groups),
                got=strange[0],
                hint=did_you_mean(strange[0], [group.name for group in recipe.groups]),
            )
        peaks = {group.name: max(_group_rates(recipe, group)) for group in recipe.groups}
        first = peaks[recipe.groups[0].name]
        if self.lr is not None and first == 0:
            raise JobError(
                "the first group's learning rate is zero throughout, and cannot be scaled",
                where="lr",
                hint="Set lr.GROUP instead.",
            )
        scale = 1.0 if self.lr is None else self.lr / first
        new_peaks = {name: self.group_lr.get(name, peak * scale) for name, peak in peaks.items()}
        if self.schedule is not None and recipe.loop:
            raise JobError(
                "the schedule of a job with several graphs cannot be changed",
                where="schedule",
                got=self.schedule,
                hint="Updates are counted per graph: freeze the job again with other schedules.",
            )
        if self.schedule is not None:
            course = tuple(_schedule_factor(self.schedule, step, steps) for step in range(steps))
            groups = tuple(
                g.model_copy(update={"learning_rates": (new_peaks[g.name],), "schedule": 0})
                for g in recipe.groups
            )
            return recipe.model_copy(update={"groups": groups, "schedules": (course,)})
        groups = tuple(
            g.model_copy(
                update={
                    "learning_rates": tuple(
                        rate * _ratio(new_peaks[g.name], peaks[g.name]) for rate in g.learning_rates
                    )
                }
            )
            for g in recipe.groups
        )
        return recipe.model_copy(update={"groups": groups})

    def _with_clipping(self, recipe: Recipe) -> Recipe:
        if self.clip_norm and self.clip_value:
            raise JobError(
                "the gradient is clipped by its norm or by value, not both",
                where="clip_norm, clip_value",
            )
        update: dict[str, Any] = {
            "clip_norm": self.clip_norm or None,
            "clip_value": self.clip_value or None,
        }
        graphs = {name: graph.model_copy(update=update) for name, graph in recipe.graphs.items()}
        return recipe.model_copy(update={**update, "graphs": graphs})


def _group_rates(recipe: Recipe, group: GroupRecipe) -> list[float]:
    """Return the learning rates of a group."""
    if group.schedule is None:
        return list(group.learning_rates)
    return [group.learning_rates[0] * factor for factor in recipe.schedules[group.schedule]]


def _ratio(new_peak: float, peak: float) -> float:
    if peak == 0 and new_peak != 0:
        raise JobError(
            "a group's learning rate is zero throughout, and cannot be scaled",
            where="lr",
            hint="Set a schedule as well.",
        )
    return 1.0 if peak == 0 else new_peak / peak


def _check_peak(schedule: str, steps: int) -> None:
    """Check that a schedule reaches its peak rate within a run. Raises JobError."""
    shape, _, warmup = schedule.partition(":")
    if warmup and int(warmup) >= steps:
        raise JobError(
            "the warm-up does not end within the run, so the learning rate would never reach its"
            " value",
            where="schedule",
            expected=f"{shape}:N with N less than the run's {steps} steps",
            got=schedule,
            hint="Use fewer warm-up updates, or more steps.",
        )


def _schedule_factor(schedule: str, step: int, steps: int) -> float:
    """Return a schedule's fraction of the peak learning rate at a step."""
    shape, _, warmup_text = schedule.partition(":")
    warmup = int(warmup_text or 0)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    progress = (step - warmup) / max(1, steps - warmup)
    return {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }[shape]
