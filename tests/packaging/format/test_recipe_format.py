"""Consistency of a recipe and its updates, and what older packages may leave out."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from trainload.autograd_trace.graphs import GraphRecipe, GroupRecipe, Recipe, TurnRecipe
from trainload.core.errors import PackageError
from trainload.packaging.format.manifest import Manifest
from trainload.packaging.format.manifest_records import UpdateEntry
from trainload.packaging.package import Package


def changed(package: Package, **update: Any) -> Manifest:
    """Return the package's manifest with its first update changed."""
    first, *others = package.manifest.updates
    return package.manifest.model_copy(
        update={"updates": (first.model_copy(update=update), *others)}
    )


@pytest.mark.parametrize(
    ("update", "message"),
    [
        ({"elementwise": False}, "does not fit its parameters"),
        ({"shape": (16, 8)}, "does not fit its parameters"),
        ({"elementwise": False, "shape": (16, 9)}, "does not fit its parameters"),
    ],
)
def test_an_update_that_does_not_fit_its_parameters_is_refused(
    packaged: Package, update: dict[str, Any], message: str
) -> None:
    with pytest.raises(PackageError, match=message):
        changed(packaged, **update).check("manifest.json")


def test_a_state_with_two_shapes_is_refused(packaged: Package) -> None:
    (state,) = packaged.manifest.updates[0].state
    with pytest.raises(PackageError, match="has its own shape"):
        changed(packaged, state=(state.model_copy(update={"shape": (2,)}),)).check("manifest.json")


def test_what_came_later_is_left_out_where_it_is_not_used() -> None:
    entry = UpdateEntry(
        group="g", first="graphs/a.json", following="graphs/b.json", state=(), elementwise=True
    )
    assert entry.model_dump() == {
        "group": "g",
        "first": "graphs/a.json",
        "following": "graphs/b.json",
        "state": (),
        "elementwise": True,
    }
    recipe = Recipe(
        optimizer="SGD",
        groups=(GroupRecipe(name="g", parameters=("p",), learning_rates=(0.1,)),),
        steps=1,
        global_batch=1,
    )
    assert set(recipe.model_dump()) == {
        "optimizer",
        "groups",
        "steps",
        "global_batch",
        "clip_norm",
        "seed",
    }
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe


def test_a_recipe_with_everything_is_read_as_it_was_written() -> None:
    group = GroupRecipe(name="g", parameters=("p",), learning_rates=(0.1,), schedule=0)
    scale = {"init_scale": 4.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3}
    more: dict[str, Any] = {
        "clip_value": 1.0,
        "ema_decay": 0.9,
        "loss_scale": scale,
        "schedules": ((1.0, 0.5),),
    }
    recipe = Recipe(optimizer="SGD", groups=(group,), steps=2, global_batch=1, **more)
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe
    assert [recipe.rates(step) for step in range(3)] == [[0.1], [0.05], [0.05]]


@pytest.mark.parametrize("field", ["steps", "global_batch", "seed"])
def test_a_count_that_is_no_int64_is_refused(field: str) -> None:
    group = GroupRecipe(name="g", parameters=("p",), learning_rates=(0.1,))
    counts: dict[str, Any] = {"steps": 1, "global_batch": 1, field: 10**30}
    with pytest.raises(ValidationError, match="less than"):
        Recipe(optimizer="SGD", groups=(group,), **counts)


def test_a_recipe_that_clips_twice_is_refused() -> None:
    group = GroupRecipe(name="g", parameters=("p",), learning_rates=(0.1,))
    with pytest.raises(ValidationError, match="not both"):
        Recipe(
            optimizer="SGD", groups=(group,), steps=1, global_batch=1, clip_norm=1.0, clip_value=1.0
        )


@pytest.mark.parametrize(
    "group",
    [{"schedule": 1, "learning_rates": (0.1,)}, {"schedule": 0, "learning_rates": (0.1, 0.2)}],
)
def test_a_group_without_its_schedule_or_with_rates_beside_it_is_refused(
    group: dict[str, Any],
) -> None:
    made = GroupRecipe(name="g", parameters=("p",), **group)
    with pytest.raises(ValidationError, match="a missing schedule, or has its own learning rates"):
        Recipe(optimizer="SGD", groups=(made,), schedules=((1.0,),), steps=1, global_batch=1)


def of_graphs(package: Package, **update: Any) -> Manifest:
    """Return the package's manifest as one of several graphs, with its recipe changed."""
    recipe = package.recipe
    names = tuple(group.name for group in recipe.groups)
    whole: dict[str, Any] = {
        "loop": (TurnRecipe(graph="train"),),
        "graphs": {"train": GraphRecipe(groups=names)},
        "groups": tuple(group.model_copy(update={"clock": ("train",)}) for group in recipe.groups),
    }
    return package.manifest.model_copy(
        update={"recipe": recipe.model_copy(update={**whole, **update})}
    )


def test_a_recipe_of_graphs_that_fits_is_taken(packaged: Package) -> None:
    made = of_graphs(packaged)
    made.check("manifest.json")
    assert Recipe.model_validate_json(made.recipe.model_dump_json()) == made.recipe


@pytest.mark.parametrize(
    ("update", "message"),
    [
        ({"main": "other"}, "names an unknown graph"),
        ({"loop": (TurnRecipe(graph="eval"),)}, "names an unknown graph"),
        ({"graphs": {"other": GraphRecipe(groups=())}}, "do not match the training graphs"),
        ({"graphs": {"train": GraphRecipe(groups=("none",))}}, "an unknown group"),
        ({"feeds": {"train": {"none": "train.out"}}}, "fed an input that it does not have"),
        ({"feeds": {"other": {"x": "train.out"}}}, "names an unknown graph"),
        ({"feeds": {"train": {"x": "train.out"}}}, "an unknown output"),
    ],
)
def test_a_recipe_of_graphs_that_does_not_fit_is_refused(
    packaged: Package, update: dict[str, Any], message: str
) -> None:
    inputs = [entry.name for entry in packaged.manifest.graphs["train"].inputs]
    if "x" in update.get("feeds", {}).get("train", {}):
        update = {"feeds": {"train": {inputs[0]: "train.out"}}}
    with pytest.raises(PackageError, match=message):
        of_graphs(packaged, **update).check("manifest.json")


def test_a_parameter_in_two_groups_of_one_graph_is_refused(packaged: Package) -> None:
    first, *others = packaged.recipe.groups
    twin = first.model_copy(update={"name": "twin", "clock": ("train",)})
    names = tuple(group.name for group in (first, *others, twin))
    with pytest.raises(PackageError, match="listed twice"):
        of_graphs(
            packaged, groups=(first, *others, twin), graphs={"train": GraphRecipe(groups=names)}
        ).check("manifest.json")


def test_a_graph_whose_name_no_job_gives_is_refused(packaged: Package) -> None:
    graphs = {**packaged.manifest.graphs}
    graphs["eval-eval-eval"] = graphs.pop("eval")
    with pytest.raises(PackageError, match="a name that no job can produce"):
        packaged.manifest.model_copy(update={"graphs": graphs}).check("manifest.json")


def test_rates_follow_the_turns_of_the_groups_graphs() -> None:
    groups = tuple(
        GroupRecipe(name=name, parameters=(name,), learning_rates=(1.0, 0.5, 0.25), clock=clock)
        for name, clock in (("a", ("a",)), ("both", ("a", "b")))
    )
    recipe = Recipe(
        optimizer="SGD",
        groups=groups,
        steps=2,
        global_batch=1,
        main="a",
        loop=(TurnRecipe(graph="a"), TurnRecipe(graph="b")),
    )
    assert recipe.rates({"a": 1, "b": 0}) == [0.5, 0.5]
    assert recipe.rates({"a": 1, "b": 1}) == [0.5, 0.25]
