"""Leases that keep `gc` from removing the blobs of a push that is in progress.

A push records the blobs that it relies on before it checks which of them the store has, and waits
while a gc runs. A gc takes its lease before it reads the records of pushes. So whichever starts
first, one of the two sees the other. Only one gc runs at a time: its lease is that of
`trainload.core.storage.lease`, in the folder `gc`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from trainload.core.errors import StorageError
from trainload.core.records import MAX_RECORD, Nonce, Sealed
from trainload.core.storage.lease import (
    PLAIN,
    HeldLease,
    LeaseRecord,
    Leases,
    LeaseTakenError,
    OtherLease,
)
from trainload.packaging.format.field_types import Sha256
from trainload.packaging.stores.store import Store

GC = "gc"
PUSHES = "pushes"
GRACE = 24 * 3600.0
"""Seconds after which a silent push is considered dead."""
GC_SECONDS = 120.0
"""Seconds without a heartbeat after which the lease of a gc ends."""
_RENEW = 600.0
_POLL = 0.2


class PushLease(Sealed):
    """pushes/NONCE.json: a push that runs, or was interrupted.

    `renewed` is in seconds since 1970.
    """

    nonce: Nonce
    blobs: tuple[Sha256, ...]
    renewed: int


class PushedBlobs:
    """Blobs that a push relies on, recorded in the store so that gc keeps them."""

    def __init__(self, store: Store, blobs: Iterable[str]) -> None:
        self._store = store
        self._blobs = tuple(sorted(set(blobs)))
        self._nonce = secrets.token_hex(16)
        self._renewed = 0.0
        self.renew()

    @property
    def path(self) -> str:
        """Path of the file in the store."""
        return f"{PUSHES}/{self._nonce}.json"

    def renew(self) -> None:
        """Renew the lease, unless it was renewed a moment ago.

        Raises:
            StorageError: a gc considered this push dead.
        """
        if time.time() - self._renewed < _RENEW:
            return
        if self._renewed:
            self.check()
        record = PushLease(nonce=self._nonce, blobs=self._blobs, renewed=int(time.time()))
        self._store.files.replace(self.path, record.to_bytes())
        self._renewed = time.time()

    def check(self) -> None:
        """Check that no gc considered this push dead.

        Raises:
            StorageError: a gc did.
        """
        if self._store.files.size(self.path) is None:
            raise StorageError(
                "the push was idle for so long that gc considered it dead",
                where=f"{self._store.url}/{self.path}",
                hint="Push again.",
            )

    def end(self) -> None:
        """Return the lease."""
        self._store.files.delete(self.path)


@contextmanager
def leased(
    store: Store, blobs: Iterable[str], on_wait: Callable[[str], None]
) -> Iterator[PushedBlobs]:
    """Hold a lease on blobs within the block.

    After an error the lease is kept, so that the blobs that were sent remain for a repeated push.

    Args:
        store: the store.
        blobs: their sha256.
        on_wait: called once with a message if a gc runs, for which the push must wait.
    """
    lease = PushedBlobs(store, blobs)
    announced = False
    while (other := _gc_leases(store).other()) is not None:
        if not announced:
            on_wait(
                f"{store.url}: gc is running; waiting for it for at most"
                f" {max(1, round(other.left))} s"
            )
            announced = True
        time.sleep(_POLL)
    yield lease
    lease.end()


def gc_lease(store: Store) -> HeldLease[LeaseRecord]:
    """Take the lease under which gc removes blobs. `check` it before every removal.

    Raises:
        LeaseTakenError: another gc holds it.
    """
    leases = _gc_leases(store)
    lease = leases.take(GC_SECONDS)
    if isinstance(lease, OtherLease):
        raise LeaseTakenError(
            "another gc is running",
            where=store.url,
            got=lease.record.owner,
            hint=f"Wait for it; if it was killed, its lease ends in {max(1, round(lease.left))} s.",
        )
    leases.forget_before(lease.id)
    return lease


def _gc_leases(store: Store) -> Leases[LeaseRecord]:
    return Leases(store.files, GC, where=f"{store.url}, gc", kinds=PLAIN, hint="Run it again.")


def push_leases(store: Store) -> dict[str, PushLease]:
    """Return path -> lease of every push that has not ended."""
    leases_by_path: dict[str, PushLease] = {}
    for name in store.files.names(PUSHES):
        path = f"{PUSHES}/{name}"
        data = store.files.read(path, MAX_RECORD)
        if data is not None:
            leases_by_path[path] = PushLease.from_bytes(data, f"{store.url}/{path}")
    return leases_by_path
