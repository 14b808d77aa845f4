"""Reading of a retraining's configuration from its file: a path or a URL."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import yaml

from trainload.core.errors import RequestError
from trainload.core.storage.open_files import open_bounded
from trainload.core.storage.places import Where, is_url, local_path, split_url
from trainload.retraining.config.config import MOST_BYTES, Config, checked


def read_config(path: Where) -> Config:
    """Read the configuration of a retraining. Relative paths in the file are relative to its
    folder.

    Args:
        path: path or URL of the file.

    Raises:
        RequestError: the file does not exist, is not valid YAML or TOML, or has a key or value that
            is not allowed; names it and what is allowed.
        StorageError: the URL cannot be reached.
    """
    data = _read(path)
    if data is None:
        raise RequestError(
            "there is no such file",
            where=str(path),
            hint="Create one with `trainload retrain init FILE`.",
        )
    if len(data) > MOST_BYTES:
        raise RequestError(
            "the file is too large for a retraining configuration",
            where=str(path),
            expected=f"at most {MOST_BYTES} bytes",
        )
    is_toml = str(path).endswith(".toml")
    try:
        raw = tomllib.loads(data.decode()) if is_toml else yaml.safe_load(data)
    except (tomllib.TOMLDecodeError, yaml.YAMLError, UnicodeDecodeError) as error:
        kind = "TOML" if is_toml else "YAML"
        raise RequestError(
            f"this is not valid {kind}: {' '.join(str(error).split())}", where=str(path)
        ) from error
    if not isinstance(raw, dict):
        raise RequestError(
            "the file does not contain a mapping",
            where=str(path),
            expected="keys and values: `trainload retrain init` writes them",
        )
    folder = split_url(str(path))[0] if is_url(path) else local_path(path).parent
    return _resolve_paths(checked(raw, str(path)), folder)


def _read(path: Where) -> bytes | None:
    """Return the bytes of a file, at most one more than allowed; None if it does not exist."""
    if is_url(path):
        folder, name = split_url(str(path))
        files = open_bounded(folder)
        size = files.size(name)
        return None if size is None else files.part(name, 0, min(size, MOST_BYTES + 1))
    here = local_path(path)
    return here.read_bytes() if here.is_file() else None


def _resolve_paths(config: Config, folder: Where) -> Config:
    """Return the configuration with relative paths resolved against the file's folder or URL."""

    def whole(path: str) -> str:
        if "://" in path or path.startswith("${"):
            return path
        here = Path(path).expanduser()
        if isinstance(folder, Path):
            return str((folder / here).absolute())
        return str(here) if here.is_absolute() else f"{folder}/{path}"

    def reference(path: str) -> str:
        url, sharp, fragment = path.partition("#")
        return whole(url) + sharp + fragment

    def all_of(paths: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(whole(each) for each in paths)

    def command_of(words: tuple[str, ...]) -> tuple[str, ...]:
        # what is at a URL cannot be run
        return tuple(
            whole(word) if number == 0 and "/" in word and isinstance(folder, Path) else word
            for number, word in enumerate(words)
        )

    evaluation, handover, cluster = config.evaluation, config.handover, config.cluster
    changed: dict[str, Any] = {
        "store": whole(config.store),
        "package": None if config.package is None else reference(config.package),
        "runs": whole(config.runs),
        "data": config.data.model_copy(update={"files": all_of(config.data.files)}),
    }
    if evaluation.files is not None:
        changed["evaluation"] = evaluation.model_copy(update={"files": all_of(evaluation.files)})
    if handover is not None:
        changed["handover"] = handover.model_copy(
            update={"place": whole(handover.place), "command": command_of(handover.command)}
        )
    if config.notify is not None:
        changed["notify"] = config.notify.model_copy(
            update={"command": command_of(config.notify.command)}
        )
    if cluster.plan is not None:
        changed["cluster"] = cluster.model_copy(update={"plan": whole(cluster.plan)})
    return config.model_copy(update=changed)
