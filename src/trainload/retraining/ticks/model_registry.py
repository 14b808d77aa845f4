"""MLflow's model registry: the current release of a line as a model version with an alias.

What is registered follows from the store alone, so it can be repeated at any time, and is the same
after a promotion by a tick, a manual promotion and a rollback.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from trainload.core.canonical_json import canonical_json, sha256_bytes
from trainload.core.errors import StorageError, first_line, raised
from trainload.core.storage.bounded_files import within_limit
from trainload.launching.run.working_copy import SINK_FILE
from trainload.packaging.stores.releases import Release, shown
from trainload.packaging.stores.store import Store
from trainload.retraining.config.config import Mlflow
from trainload.retraining.ticks.lineage import TICK
from trainload.retraining.ticks.tick_records import R, Taken, Ticks, Trained

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

_SCHEME = "trainload:"
"""Scheme of a version's source. MLflow's servers reject plain paths, which it could read."""
_PAGE = 1000
_MOST_BYTES = 4096
_EXISTS = "RESOURCE_ALREADY_EXISTS"
_MISSING = frozenset({"RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"})
"""Codes of the error about an alias that does not exist, by kind of storage."""


def register_current(settings: Mlflow, store: Store, line: str) -> str | None:
    """Register the current release of a line unless that was done, and let the alias point to it.

    Args:
        settings: the model and its alias.
        store: store of the line.
        line: name of the line.

    Returns:
        The number of the version; None if the line has no current release.

    Raises:
        StorageError: MLflow is not installed, does not respond, or rejects the version.
    """
    pointer = store.current(line)
    if pointer is None:
        return None
    release = store.release(line, shown(pointer.release))
    tags = tags_of(store, release)
    run_id = _mlflow_run(store, release)
    seconds = settings.timeout.total_seconds()
    arguments = (settings, release, tags, run_id)
    return within_limit(
        _register, *arguments, where="MLFLOW_TRACKING_URI", seconds=seconds, who="MLflow"
    )


def check_mlflow() -> None:
    """Check that MLflow is installed. Raises StorageError."""
    try:
        import mlflow  # noqa: F401
    except ImportError as error:
        raise StorageError(
            "mlflow is not installed",
            where="mlflow",
            got=str(error),
            hint="Run `pip install 'trainload[mlflow]'`, or remove the key.",
        ) from error


def tags_of(store: Store, release: Release) -> dict[str, str]:
    """Return the lineage of a release as tags of a model version."""
    tags = {
        "release": f"{store.url}#{release.line}/{release.name}",
        "line": release.line,
        "package": release.package,
        "program": release.program,
        "weights": release.weights,
        "parent": "" if release.parent is None else shown(release.parent),
        **{name: str(value) for name, value in release.facts.items()},
    }
    taken = _record(Taken, store, release)
    if taken is not None:
        files = [(file.name, file.identity) for file in taken.snapshot.good]
        tags["data"] = f"{taken.snapshot.rows} rows of {len(files)} files"
        tags["data.sha256"] = sha256_bytes(canonical_json([list(each) for each in files]))
    return {f"trainload.{name}": value for name, value in tags.items()}


def _register(
    settings: Mlflow, release: Release, tags: Mapping[str, str], run_id: str | None
) -> str:
    check_mlflow()
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    model = settings.model or release.line
    try:
        client = MlflowClient()
        version = _version_of(client, model, release, tags, run_id)
        if _aliased(client, model, settings.alias) != version:
            client.set_registered_model_alias(model, settings.alias, version)
    # the library expects the answers of MLflow's servers, and another one may raise anything
    except Exception as error:
        raise StorageError(
            "MLflow did not register the release",
            where=f"MLFLOW_TRACKING_URI, model {model}",
            got=first_line(error) if isinstance(error, MlflowException) else raised(error),
        ) from error
    return version


def _version_of(
    client: MlflowClient, model: str, release: Release, tags: Mapping[str, str], run_id: str | None
) -> str:
    """Return the number of a release's version, which is created if there is none."""
    from mlflow.exceptions import MlflowException

    source = f"{_SCHEME}{tags['trainload.release']}"
    try:
        client.create_registered_model(model, {"trainload.line": release.line})
    except MlflowException as error:
        if error.error_code != _EXISTS:
            raise
    found = _versions(client, model, source)
    if not found:
        created = client.create_model_version(
            model,
            source,
            run_id,
            dict(tags),
            description=release.message or None,
            await_creation_for=0,
        )
        # another process may have created one at the same time: both take the first
        found = [created, *_versions(client, model, source)]
    return str(min(int(each.version) for each in found))


def _versions(client: MlflowClient, model: str, source: str) -> list[ModelVersion]:
    found: list[ModelVersion] = []
    token: str | None = None
    while True:
        page = client.search_model_versions(f"name='{model}'", max_results=_PAGE, page_token=token)
        found += [each for each in page if each.source == source]
        token = page.token
        if not token:
            return found


def _aliased(client: MlflowClient, model: str, alias: str) -> str | None:
    """Return the number of the version to which an alias points; None if it does not exist."""
    from mlflow.exceptions import MlflowException

    try:
        return str(client.get_model_version_by_alias(model, alias).version)
    except MlflowException as error:
        if error.error_code in _MISSING:
            return None
        raise


def _record(kind: type[R], store: Store, release: Release) -> R | None:
    """Return a record of the tick that created a release; None if no tick did."""
    tick = release.facts.get(TICK)
    return Ticks(store, release.line).read(kind, tick) if isinstance(tick, str) else None


def _mlflow_run(store: Store, release: Release) -> str | None:
    """Return the MLflow run that the run of a release was logged to; None if it is unknown."""
    trained = _record(Trained, store, release)
    if trained is None:
        return None
    from trainload.core.storage.open_files import open_bounded

    content = open_bounded(trained.run_dir).read(SINK_FILE, _MOST_BYTES)
    return None if content is None else content.decode(errors="replace").strip() or None
