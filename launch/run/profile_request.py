"""Request to profile the next steps of a run; see `contact` for the other requests."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

PROFILE_FILE = "profile-now"
"""Name of the file in the run's folder that makes this request."""


@dataclass(frozen=True, slots=True)
class ProfileRequest:
    """A request to profile the next steps.

    Attributes:
        id: unique name, so that a request counts once.
        steps: number of steps.
        ranks: ranks that are profiled.
        trace_only: True to leave out the pass of the interpreted graphs.
    """

    id: str
    steps: int
    ranks: tuple[int, ...]
    trace_only: bool = False

    @property
    def file(self) -> str:
        """Name of the file in the run's folder that makes this request."""
        return PROFILE_FILE

    def to_json(self) -> bytes:
        """Return the content of its file."""
        return json.dumps(asdict(self)).encode()


def parse_profile_request(content: bytes) -> ProfileRequest:
    """Return the request that a file makes.

    Raises:
        ValueError: it makes none.
    """
    found = json.loads(content)
    try:
        return ProfileRequest(
            str(found["id"]),
            int(found["steps"]),
            tuple(int(rank) for rank in found["ranks"]),
            bool(found["trace_only"]),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"the file {PROFILE_FILE} has no request: {error!r}") from error
