"""Packages in OCI registries: oci://HOST[:PORT]/NAME[:TAG] or oci://HOST[:PORT]/NAME@sha256:DIGEST.

The library oras is the client: it reads docker's credentials, requests tokens, and retries.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainload.core.canonical_json import sha256_bytes
from trainload.core.errors import IntegrityError, StorageError, TrainloadError, UnsafePackageError
from trainload.core.storage.interface import BLOCK, NO_OPTIONS
from trainload.packaging.format.manifest_records import FileEntry
from trainload.packaging.format.package_paths import MANIFEST
from trainload.packaging.stores.oci_records import (
    IMAGE_MANIFEST,
    MAX_MANIFEST,
    config_bytes,
    files_of,
    manifest_bytes,
)
from trainload.packaging.stores.pull import PullReport, pull_report, write_pulled
from trainload.packaging.stores.push import OnProgress, local_package, unwatched
from trainload.packaging.stores.references import OCI_SCHEME

if TYPE_CHECKING:
    import requests
    from oras.container import Container
    from oras.provider import Registry

_REFERENCE = re.compile(
    r"(?P<host>[A-Za-z0-9.-]+(?::[0-9]{1,5})?|\[[0-9a-fA-F:]+\](?::[0-9]{1,5})?)"
    r"/(?P<name>[a-z0-9]+(?:[._/-]+[a-z0-9]+)*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
_LOOPBACK = re.compile(r"(localhost|127(\.[0-9]{1,3}){3}|\[::1\])(:[0-9]+)?")
_SECONDS = 30.0
"""Timeout for a registry that does not respond."""


@dataclass(frozen=True, slots=True)
class OciPushReport:
    """Result of a push to a registry.

    `artifact` is the digest by which to pull or sign it. Files with equal bytes count once.

    Law: bytes == sent_bytes + present_bytes.
    """

    store: str
    artifact: str
    digest: str
    files: int
    bytes: int
    sent_files: int
    sent_bytes: int
    present_bytes: int


def push_oci(
    package: Path,
    reference: str,
    *,
    message: str = "",
    debug: bool = True,
    options: Mapping[str, Any] = NO_OPTIONS,
    on_progress: OnProgress = unwatched,
) -> OciPushReport:
    """Push a package as an artifact. Only missing blobs are sent; the tag is set last, atomically.

    Args:
        package: the package's folder.
        reference: oci://HOST/NAME:TAG; the tag defaults to "latest".
        message: description of the artifact.
        debug: if True, include debug/.
        options: `insecure`: use HTTP (default: only for this machine); `tls_verify`: False, or a
            file of certificates.
        on_progress: called with the numbers of finished and total bytes.

    Raises:
        StorageError: the registry cannot be reached, or rejects a request.
        PackageError: the package is incomplete or damaged.
    """
    local = local_package(package, debug=debug)
    place = _Repository(reference, options)
    if place.digest is not None:
        raise StorageError("a push needs a tag, not a digest", where=reference)
    blobs: dict[str, tuple[Path, int]] = {}
    for path, entry in local.files.items():
        blobs.setdefault(entry.sha256, (local.path / path, entry.size))
    total, done, sent = sum(size for _, size in blobs.values()), 0, []
    on_progress(0, total)
    for digest, (file, size) in blobs.items():
        if not place.has(digest, size):
            place.send(file, digest, size)
            sent.append(digest)
        done += size
        on_progress(done, total)
    config = config_bytes(place.name, local.manifest, local.files)
    if not place.has(sha256_bytes(config), len(config)):
        place.send_bytes(config)
    artifact = place.publish(manifest_bytes(local.digest, config, local.files, message))
    sent_bytes = sum(blobs[digest][1] for digest in sent)
    return OciPushReport(
        place.url,
        artifact,
        local.digest,
        len(blobs),
        total,
        len(sent),
        sent_bytes,
        total - sent_bytes,
    )


def pull_oci(
    reference: str,
    path: Path,
    *,
    debug: bool = True,
    reuse: Sequence[str | Path] = (),
    options: Mapping[str, Any] = NO_OPTIONS,
    on_progress: OnProgress = unwatched,
) -> PullReport:
    """Pull a package from a registry, like `trainload.packaging.stores.pull.pull` from a store.

    Args:
        reference: oci://HOST/NAME:TAG, or with @sha256:DIGEST of the artifact, which is then
            verified.
        path: the package to write; a folder that does not exist.
        debug: if True, include debug/.
        reuse: further local packages whose files may be reused.
        options: as for `push_oci`.
        on_progress: called with the numbers of finished and total bytes.

    Raises:
        StorageError: the registry cannot be reached or rejects a request, or there is no such
            artifact.
        IntegrityError: received data is damaged.
        UnsafePackageError: the artifact is not a package.
    """
    place = _Repository(reference, options)
    data = place.manifest()
    files = {
        file: entry
        for file, entry in files_of(data, reference).items()
        if debug or not file.startswith("debug/")
    }

    def fetch(entry: FileEntry) -> Iterator[bytes]:
        return place.receive(entry.sha256, entry.size)

    fetched = write_pulled(path, files, fetch, reuse=reuse, on_progress=on_progress)
    return pull_report(place.url, None, f"sha256:{sha256_bytes(data)}", path, files, fetched)


def pin_oci(reference: str, options: Mapping[str, Any] = NO_OPTIONS) -> tuple[str, str]:
    """Return the reference pinned to its artifact's current digest, and the digest of the package.

    Raises:
        StorageError, IntegrityError, UnsafePackageError: as `pull_oci`.
    """
    data = _Repository(reference, options).manifest()
    return (
        f"{reference.partition('@')[0]}@sha256:{sha256_bytes(data)}",
        files_of(data, reference)[MANIFEST].sha256,
    )


class _Repository:
    """A repository of a registry, with its blobs and manifests."""

    def __init__(self, reference: str, options: Mapping[str, Any]) -> None:
        self.url = reference
        match = _REFERENCE.fullmatch(reference.removeprefix(OCI_SCHEME))
        if match is None:
            raise StorageError(
                "this is not a reference to an artifact",
                where=reference,
                expected="oci://HOST/NAME:TAG",
            )
        unknown = set(options) - {"insecure", "tls_verify"}
        if unknown:
            raise StorageError(
                "unknown registry option",
                where=reference,
                expected="insecure, tls_verify",
                got=", ".join(unknown),
            )
        self.name = match["name"]
        self.digest = match["digest"]
        insecure = bool(options.get("insecure", _LOOPBACK.fullmatch(match["host"]) is not None))
        try:
            from oras.container import Container
            from oras.provider import Registry
        except ImportError as error:
            raise StorageError(
                "oras is not installed",
                where=reference,
                hint='Install it: pip install "trainload[oci]".',
            ) from error
        artifact_name = reference.removeprefix(OCI_SCHEME)
        host_marks = set(match["host"]) & {".", ":"}  # oras parses other hosts as part of the name
        self._container: Container = Container(
            artifact_name if host_marks else artifact_name.partition("/")[2], registry=match["host"]
        )
        with self._translate_errors():
            self._registry: Registry = Registry(
                match["host"], insecure=insecure, tls_verify=options.get("tls_verify", True)
            )
            # oras retries for minutes, so an unreachable registry is detected first, by a single
            # request.
            url = f"{self._registry.prefix}://{match['host']}/v2/"
            self._registry.session.get(
                url, timeout=_SECONDS, verify=options.get("tls_verify", True)
            )
            self._registry.auth.load_configs(self._container)

    def has(self, digest: str, size: int) -> bool:
        """Return True if the repository has a blob."""
        layer = {"digest": f"sha256:{digest}", "size": size}
        with self._translate_errors():
            return bool(self._registry.blob_exists(layer, self._container))

    def send(self, file: Path, digest: str, size: int) -> None:
        """Send a file. The registry verifies its digest."""
        layer = {"digest": f"sha256:{digest}", "size": size}
        with self._translate_errors():
            chunked = size > BLOCK  # otherwise oras reads the whole file into memory
            response = self._registry.upload_blob(
                str(file), self._container, layer, do_chunked=chunked, chunk_size=BLOCK
            )
        if response.status_code not in (200, 201, 202):
            hint = (
                "Check the package with `trainload verify`." if response.status_code == 400 else ""
            )
            raise self._make_refusal("a file", response, str(file), hint)

    def send_bytes(self, data: bytes) -> None:
        """Send a small blob."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "blob"
            file.write_bytes(data)
            self.send(file, sha256_bytes(data), len(data))

    def publish(self, data: bytes) -> str:
        """Store the manifest under the tag. Return its digest."""
        with self._translate_errors():
            response = self._request(
                "PUT",
                self._container.manifest_url(),
                data=data,
                headers={"Content-Type": IMAGE_MANIFEST},
            )
        if response.status_code not in (200, 201, 202):
            raise self._make_refusal("the manifest", response, self.url)
        return f"sha256:{sha256_bytes(data)}"

    def manifest(self) -> bytes:
        """Return the bytes of the reference's manifest.

        Raises:
            IntegrityError: they do not have the digest in the reference.
        """
        with self._translate_errors():
            response = self._request(
                "GET",
                self._container.manifest_url(),
                headers={"Accept": IMAGE_MANIFEST},
                stream=True,
            )
            if response.status_code == 404:
                raise StorageError("the registry has no such artifact", where=self.url)
            if response.status_code != 200:
                raise self._make_refusal("the manifest", response, self.url)
            data = b"".join(_read_limited(response, MAX_MANIFEST + 1))
        if len(data) > MAX_MANIFEST:
            raise UnsafePackageError(
                "the artifact's manifest is too large",
                where=self.url,
                expected=f"at most {MAX_MANIFEST} bytes",
            )
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        if self.digest is not None and self.digest != digest:
            raise IntegrityError(
                "the artifact's digest does not match the reference",
                where=self.url,
                expected=self.digest,
                got=digest,
            )
        return data

    def receive(self, digest: str, size: int) -> Iterator[bytes]:
        """Yield a blob's bytes in blocks, at most `size` plus one block."""
        with self._translate_errors():
            response = self._registry.get_blob(self._container, f"sha256:{digest}", stream=True)
            if response.status_code == 404:
                raise IntegrityError(
                    "a file of the artifact is missing", where=f"{self.url}, sha256:{digest}"
                )
            if response.status_code != 200:
                raise self._make_refusal("a file", response, f"sha256:{digest}")
            yield from _read_limited(response, size)

    def _request(self, method: str, url: str, **arguments: Any) -> requests.Response:
        ask: Callable[..., requests.Response] = self._registry.do_request
        return ask(f"{self._registry.prefix}://{url}", method, **arguments)

    def _make_refusal(
        self, subject: str, response: requests.Response, where: str, hint: str = ""
    ) -> StorageError:
        excerpt = " ".join(response.text[:200].split())
        hint = hint or (
            "Log in: docker login, or oras login." if response.status_code in (401, 403) else ""
        )
        return StorageError(
            f"the registry rejected the request for {subject}",
            where=where,
            got=f"status {response.status_code} {excerpt}",
            hint=hint,
        )

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        import requests
        from oras.auth import AuthenticationException

        try:
            yield
        except TrainloadError:
            raise
        except (requests.exceptions.RequestException, OSError) as error:
            raise StorageError(
                f"the registry cannot be reached: {error}", where=self.url
            ) from error
        except AuthenticationException as error:
            raise StorageError(
                f"the registry denied access: {error}",
                where=self.url,
                hint="Log in: docker login, or oras login.",
            ) from error
        except ValueError as error:  # raised by oras for responses that it does not understand
            raise StorageError(
                f"the registry's response cannot be used: {error}", where=self.url
            ) from error


def _read_limited(response: requests.Response, most: int) -> Iterator[bytes]:
    """Yield the body in blocks, up to and including the block that exceeds `most` bytes."""
    size = 0
    with response:
        for block in response.iter_content(BLOCK):
            size += len(block)
            yield block
            if size > most:
                return
