"""Packages in repositories of the Hugging Face Hub.

    README.md                           the model card
    config.json, model.safetensors ...  the model, as `trainload export --to huggingface` writes it
    package.tl/                         the package

A repository has commits, but no releases, lines or conditional creation of files, so it is no
store: a push is one commit, and a pull names a revision.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from trainload.core.credentials import without_secrets
from trainload.core.errors import ConflictError, StorageError, raised
from trainload.core.storage.filesystem import failures, unreachable
from trainload.core.versions import VERSION
from trainload.exporting.weights_folder import (
    CARD,
    contents_of,
    transformers_part,
    write_folder,
)
from trainload.packaging.format.package_files import walk
from trainload.packaging.package import Package, open_to_look
from trainload.packaging.stores.package_at_url import fetch_package
from trainload.packaging.stores.push import OnProgress, local_package, unwatched
from trainload.publishing.model_card import model_card

SCHEME = "hf://"
FOLDER = "package.tl"
"""Folder of a repository that has the package."""
_REPOSITORY = re.compile(r"hf://(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[^@\s#?]+))?")
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json")
_CONFLICT = (409, 412)


@dataclass(frozen=True, slots=True)
class HubPushReport:
    """Result of a push to the Hub.

    Attributes:
        store: hf://OWNER/NAME.
        commit: the commit, by which the package can be pulled.
        digest: digest of the package.
        files: number of files of the repository that the commit sets.
        bytes: their size. The Hub stores files with equal bytes once.
    """

    store: str
    commit: str
    digest: str
    files: int
    bytes: int


@dataclass(frozen=True, slots=True)
class HubPullReport:
    """Result of a pull from the Hub.

    Attributes:
        source: hf://OWNER/NAME@COMMIT.
        path: the package.
        digest: digest of the package.
        files: number of its files.
        bytes: their size.
    """

    source: str
    path: Path
    digest: str
    files: int
    bytes: int


def is_hub(store: str | Path) -> bool:
    """Return True for a reference to a repository of the Hub."""
    return str(store).startswith(SCHEME)


def push_hub(
    package: Path, reference: str, *, message: str = "", debug: bool = True
) -> HubPushReport:
    """Publish a package in a repository, as one commit. A new repository is private.

    Files of an earlier push that the package no longer has are removed by the same commit.

    Args:
        package: the package's folder.
        reference: hf://OWNER/NAME, or hf://OWNER/NAME@BRANCH.
        message: message of the commit.
        debug: if True, include debug/.

    Raises:
        StorageError: there is no package, or the Hub cannot be reached or denies access.
        PackageError: the package is damaged; nothing was published.
        ConflictError: somebody else has committed at the same time; nothing was published.
    """
    repo, branch = _parts(reference)
    hub = _library()
    local = local_package(package, debug=debug)
    opened = open_to_look(package)
    with tempfile.TemporaryDirectory(prefix="trainload-hub-") as folder, _failures(reference):
        root = Path(folder)
        _write_model(root, opened, repo)
        files = {path: root / path for path, _ in walk(root)}
        files |= {f"{FOLDER}/{path}": package / path for path in local.files}
        api = hub.HfApi()
        with _answers(reference):
            api.create_repo(repo, exist_ok=True, private=True)
            if branch is not None:
                api.create_branch(repo, branch=branch, exist_ok=True)
            head = api.repo_info(repo, revision=branch)
            stale = [
                path
                for path in (each.rfilename for each in head.siblings or ())
                if path not in files and (path.startswith(f"{FOLDER}/") or _WEIGHTS.fullmatch(path))
            ]
            added = [hub.CommitOperationAdd(path, source) for path, source in sorted(files.items())]
            commit = api.create_commit(
                repo,
                [*added, *(hub.CommitOperationDelete(path) for path in stale)],
                commit_message=message or f"trainload: package {local.digest[:12]}",
                revision=branch,
                parent_commit=head.sha,
            )
        size = sum(path.stat().st_size for path in files.values())
    return HubPushReport(f"{SCHEME}{repo}", commit.oid, local.digest, len(files), size)


def pull_hub(reference: str, path: Path, *, on_progress: OnProgress = unwatched) -> HubPullReport:
    """Fetch the package of a repository. Every byte is checked before the package appears.

    Args:
        reference: hf://OWNER/NAME, or with @REVISION: a branch, a tag or a commit.
        path: a folder that does not exist.
        on_progress: called with the numbers of finished and total bytes.

    Raises:
        StorageError: there is no such repository, revision or package, or `path` is taken.
        IntegrityError: a file is missing or damaged; nothing is left at `path`.
        UnsafePackageError: the package contains something that the format does not allow.
    """
    repo, revision = _parts(reference)
    hub = _library()
    with _failures(reference):
        # the commit, so that a push meanwhile changes nothing
        with _answers(reference):
            commit = hub.HfApi().repo_info(repo, revision=revision).sha
        fetch_package(f"{SCHEME}{repo}@{commit}/{FOLDER}", path, on_progress=on_progress)
    local = local_package(path)
    sizes = [entry.size for entry in local.files.values()]
    return HubPullReport(f"{SCHEME}{repo}@{commit}", path, local.digest, len(sizes), sum(sizes))


def _write_model(root: Path, package: Package, repo: str) -> None:
    """Write the model and the card of a package into an empty folder; an abstract package has only
    a card.
    """
    if package.has_weights:
        contents = contents_of(package.manifest, transformers_part(package) or "")
        note = {
            "package": package.digest,
            "program": package.manifest.program_digest,
            "trainload": VERSION,
        }
        write_folder(root, package, contents, note)
    own_card = f"assets/{CARD}" in package.manifest.files
    if not own_card:
        (root / CARD).write_text(model_card(package, repo, FOLDER), encoding="utf-8")


def _parts(reference: str) -> tuple[str, str | None]:
    """Return the repository and the revision of a reference."""
    match = _REPOSITORY.fullmatch(reference.rstrip("/"))
    if match is None:
        raise StorageError(
            "this does not name a repository of the Hub",
            where=reference,
            expected="hf://OWNER/NAME or hf://OWNER/NAME@REVISION",
        )
    return match["repo"], match["revision"]


def _library() -> ModuleType:
    try:
        import huggingface_hub
    except ImportError as error:
        raise StorageError(
            "the library for hf:// is not installed", hint='pip install "trainload[hub]"'
        ) from error
    return huggingface_hub


@contextmanager
def _answers(where: str) -> Iterator[None]:
    """Convert the errors by which the Hub's library fails to read the responses of another server
    into StorageError.
    """
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        yield
    except (HfHubHTTPError, HFValidationError):
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise StorageError(
            "the server does not respond as the Hub does",
            where=where,
            got=raised(error),
            hint="Check HF_ENDPOINT, and the proxy if there is one.",
        ) from without_secrets(error)


@contextmanager
def _failures(where: str) -> Iterator[None]:
    """Raise errors of the Hub's library as ours."""
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise StorageError(
            "there is no such repository or revision, or it is not visible with this token",
            where=where,
            hint="Log in with `hf auth login`, or set HF_TOKEN.",
        ) from without_secrets(error)
    except HFValidationError as error:
        raise StorageError(str(error), where=where) from error
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        if status in _CONFLICT:
            raise ConflictError(
                "somebody else has committed to the repository at the same time",
                where=where,
                hint="Push again.",
            ) from without_secrets(error)
        if status in (401, 403):
            raise StorageError(
                "the Hub denied access",
                where=where,
                got=f"status {status}",
                hint="Log in with `hf auth login`, or set HF_TOKEN to a token that can write.",
            ) from without_secrets(error)
        raise unreachable(where, error) from without_secrets(error)
    except failures() as error:
        raise unreachable(where, error) from without_secrets(error)
    except RuntimeError as error:
        # so the library ends an upload to the storage of large files
        if not isinstance(error.__cause__, failures()):
            raise
        raise unreachable(where, error.__cause__) from without_secrets(error)
