"""Read a line's entries of MLflow's model registry."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Registered:
    """The versions of a model.

    Attributes:
        releases: number of a version -> the release that it is, such as "2".
        tags: number of a version -> its tags.
        champion: number of the version with the alias `champion`.
        run_ids: number of a version -> its run.
    """

    releases: dict[str, str]
    tags: dict[str, dict[str, str]]
    champion: str
    run_ids: dict[str, str | None]


def registered(model: str, alias: str = "champion") -> Registered:
    """Read a model from the registry at MLFLOW_TRACKING_URI."""
    from mlflow import MlflowClient

    client = MlflowClient()
    versions = {str(each.version): each for each in client.search_model_versions(f"name='{model}'")}
    tags = {number: dict(each.tags) for number, each in versions.items()}
    return Registered(
        {number: each["trainload.release"].rpartition("/")[2] for number, each in tags.items()},
        tags,
        str(client.get_model_version_by_alias(model, alias).version),
        {number: each.run_id for number, each in versions.items()},
    )
