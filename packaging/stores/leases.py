"""What keeps `gc` from removing the blobs of a push that is under way.

A push writes down which blobs it relies on before it asks which of them are there, and waits while `gc` is at work. `gc` says that it is at
work before it reads what pushes have written down. So, whichever comes first, one of the two sees the other.

Of two gcs one is at work: it has created the lock of the next number. The last lock stays when its time is over, so that no number is taken
twice: who has found it over, and was slow, does not take one that another gc has had since.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from trainload.core.errors import IntegrityError, StorageError
from trainload.packaging.format.manifest import Sha256
from trainload.packaging.stores.releases import MAX_RECORD, Nonce, ReleaseId, Sealed
from trainload.packaging.stores.store import Store

LOCKS = "gc"
PUSHES = "pushes"
GRACE = 24 * 3600.0
"""Seconds after which a push that has said nothing is taken for dead."""
LOCK_SECONDS = 600.0
"""Seconds for which gc holds its lock before it must renew it."""
_RENEW = 600.0
_POLL = 0.2


class PushLease(Sealed):
    """pushes/NONCE.json: a push is under way, or was broken off. `renewed`: seconds since 1970."""

    nonce: Nonce
    blobs: tuple[Sha256, ...]
    renewed: int


class GcLock(Sealed):
    """gc/ID.json: until `expires`, seconds since 1970, gc may be removing blobs. The last one holds."""

    id: ReleaseId
    nonce: Nonce
    expires: int


class Lease:
    """A push's lease on blobs."""

    def __init__(self, store: Store, blobs: Iterable[str]) -> None:
        self._store = store
        self._blobs = tuple(sorted(set(blobs)))
        self._nonce = secrets.token_hex(16)
        self._renewed = 0.0
        self.renew()

    @property
    def path(self) -> str:
        """Its file."""
        return f"{PUSHES}/{self._nonce}.json"

    def renew(self) -> None:
        """Say that the push is under way, unless that was said a moment ago.

        Raises:
            StorageError: gc took this push for dead.
        """
        if time.time() - self._renewed < _RENEW:
            return
        if self._renewed:
            self.check()
        record = PushLease(nonce=self._nonce, blobs=self._blobs, renewed=int(time.time()))
        self._store.files.replace(self.path, record.to_bytes())
        self._renewed = time.time()

    def check(self) -> None:
        """Check that no gc took this push for dead.

        Raises:
            StorageError: gc did.
        """
        if self._store.files.size(self.path) is None:
            raise StorageError(
                "the push was silent for so long that gc took it for dead", where=f"{self._store.url}/{self.path}", cure="Push again."
            )

    def end(self) -> None:
        """Give the lease back."""
        self._store.files.delete(self.path)


@contextmanager
def leased(store: Store, blobs: Iterable[str], on_wait: Callable[[str], None]) -> Iterator[Lease]:
    """A lease on blobs, held from before the block until it has ended without an error.

    After an error the lease stays: the blobs that were sent wait for the push to be repeated.

    Args:
        store: theirs.
        blobs: their sha256.
        on_wait: told, once, if gc is at work and has to be waited for.
    """
    lease = Lease(store, blobs)
    told = False
    while (lock := _last_lock(store)) is not None and lock.expires > time.time():
        if not told:
            on_wait(f"{store.url}: gc is at work; waiting for it, at most {max(1, round(lock.expires - time.time()))} s")
            told = True
        time.sleep(_POLL)
    yield lease
    lease.end()


class GcGuard:
    """gc's lock. `check` before every removal."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._nonce = secrets.token_hex(16)
        self._expires = 0.0
        last = _last_lock(store)
        if last is not None and last.expires > time.time():
            raise StorageError(
                "another gc is at work",
                where=store.url,
                cure=f"Wait for it; if it was killed, its lock ends in {max(1, round(last.expires - time.time()))} s.",
            )
        self._id = f"{int(last.id) + 1 if last is not None else 1:08d}"
        if not store.files.create(self._path, self._record(LOCK_SECONDS)):
            raise StorageError("another gc has just begun", where=store.url, cure="Wait for it.")
        for name in store.files.names(LOCKS):
            if name < f"{self._id}.json":
                store.files.delete(f"{LOCKS}/{name}")

    def check(self) -> None:
        """Renew the lock in time.

        Raises:
            StorageError: somebody else has it, or this process slept past its end.
        """
        left = self._expires - time.time()
        if left > LOCK_SECONDS / 2:
            return
        if left <= LOCK_SECONDS / 10 or not self._is_last():
            raise StorageError("gc lost its lock", where=self._store.url, got="a removal that took too long", cure="Run it again.")
        self._store.files.replace(self._path, self._record(LOCK_SECONDS))

    def end(self) -> None:
        """Give the lock back."""
        if self._is_last():
            self._store.files.replace(self._path, self._record(0.0))

    @property
    def _path(self) -> str:
        return f"{LOCKS}/{self._id}.json"

    def _is_last(self) -> bool:
        last = _last_lock(self._store)
        return last is not None and last.nonce == self._nonce

    def _record(self, seconds: float) -> bytes:
        self._expires = time.time() + seconds
        return GcLock(id=self._id, nonce=self._nonce, expires=int(self._expires)).to_bytes()


def push_leases(store: Store) -> dict[str, PushLease]:
    """Path -> lease of every push that has not ended."""
    found: dict[str, PushLease] = {}
    for name in store.files.names(PUSHES):
        path = f"{PUSHES}/{name}"
        data = store.files.read(path, MAX_RECORD)
        if data is not None:
            found[path] = PushLease.from_bytes(data, f"{store.url}/{path}")
    return found


def _last_lock(store: Store) -> GcLock | None:
    while names := store.files.names(LOCKS):
        path = f"{LOCKS}/{names[-1]}"
        data = store.files.read(path, MAX_RECORD)
        if data is not None:  # else the next gc has removed it, and has a lock of its own
            lock = GcLock.from_bytes(data, f"{store.url}/{path}")
            if path != f"{LOCKS}/{lock.id}.json":
                raise IntegrityError("a lock of gc is that of another number", where=f"{store.url}/{path}", got=lock.id)
            return lock
    return None
