"""The lease of a line: one process at a time runs its ticks.

    lines/LINE/leases/00000007.json, heartbeats/, stops/: see `trainload.core.storage.lease`

Object stores check no fencing token. So whoever takes the place of a holder that has not returned
its lease first writes an entry into the line's history of `current` (`Store.confirm`). A promotion
must follow the entry that was the last one when the lease was taken, and that of a holder that was
paused no longer does.
"""

from __future__ import annotations

from trainload.core.errors import StorageError
from trainload.core.records import Text
from trainload.core.storage.lease import (
    Heartbeat,
    HeldLease,
    Kinds,
    LeaseRecord,
    Leases,
    OtherLease,
    StopRequest,
)
from trainload.packaging.stores.releases import Line
from trainload.packaging.stores.store import Store


class LineLease(LeaseRecord):
    """A lease that was taken for a tick."""

    line: Line
    tick: Text


class LineHeartbeat(Heartbeat):
    """A heartbeat of the holder of a line's lease."""

    line: Line


class LineStop(StopRequest):
    """A request that the holder of a line's lease stops."""

    line: Line


Other = OtherLease[LineLease]
_KINDS = Kinds(LineLease, LineHeartbeat, LineStop)


class Held(HeldLease[LineLease]):
    """A line's lease that this process holds.

    Attributes:
        after: the last entry of the line's history of `current` when it was taken, which a
            promotion must follow.
    """

    after: str | None = None


class LineLeases(Leases[LineLease]):
    """The leases of a line.

    Args:
        store: its store, which must notice that another writer was first.
        line: the line.
        owner: name of this process. Default: its host and number.

    Raises:
        StorageError: the store cannot write under a condition.
    """

    def __init__(self, store: Store, line: str, owner: str | None = None) -> None:
        if not store.files.exclusive:
            raise StorageError(
                "this store does not support conditional writes, which prevent two schedulers from"
                " running the same tick",
                where=store.url,
                hint="Use a folder, S3, or another store that has them (docs/guides/store.md).",
            )
        self._store, self._line = store, line
        where = f"{store.url}, line {line}"
        super().__init__(
            store.files,
            f"lines/{line}",
            where=where,
            kinds=_KINDS,
            hint=(
                "The process that holds the lease now continues the tick; if there is none, run it"
                " again."
            ),
            fields={"line": line},
            owner=owner,
        )

    def take_for(self, tick: str, seconds: float) -> Held | Other:
        """Take the lease for a tick, if nobody holds it. seconds: how long this process may be
        silent.

        Returns:
            The lease; or the one that another process holds.

        Raises:
            StorageError: the store cannot be reached or written.
        """
        held = self.take(seconds, tick=tick)
        if isinstance(held, OtherLease):
            return held
        assert isinstance(held, Held), "_hold makes it"
        try:
            held.after = self._fence(held)
        except BaseException:
            held.leave()  # not returned: whoever comes next must do what was not done here
            raise
        return held

    def _hold(self, record: LineLease, previous: str | None, *, previous_returned: bool) -> Held:
        return Held(self, record, previous, previous_returned=previous_returned)

    def _fence(self, lease: HeldLease[LineLease]) -> str | None:
        """Prevent a promotion by the holder before.

        Returns: the last entry of the history of `current`.
        """
        if lease.previous is None or lease.previous_returned:
            pointer = self._store.current(self._line)
        else:
            reason = (
                f"lease {int(lease.id)} replaces lease {int(lease.previous)}, which was not"
                " released"
            )
            pointer = self._store.confirm(self._line, reason)
        return None if pointer is None else pointer.id
