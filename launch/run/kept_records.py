"""Records of a run at a URL that a driver has left on this machine: it was killed, or could not
publish them.
"""

from __future__ import annotations

import logging

from trainload.core.errors import ConflictError
from trainload.core.logs import log_handled
from trainload.core.storage.places import Where, is_url, local_path
from trainload.launching.run.copy_use import used
from trainload.launching.run.driver import driving
from trainload.launching.run.publication import Publication
from trainload.launching.run.run_place import url_of
from trainload.launching.run.working_copy import kept_copies, remove_copy

_log = logging.getLogger(__name__)


def publish_kept(run_dir: Where) -> None:
    """Publish what is left of a run on this machine, before it is resumed.

    Records of a driver that was replaced on another machine stay where they are.

    Args:
        run_dir: a URL, or a working copy; nothing is left of a run in a folder.

    Raises:
        StorageError: somebody drives the run, or its URL cannot be reached or written.
    """
    url = str(run_dir).rstrip("/") if is_url(run_dir) else url_of(local_path(run_dir))
    if url is None:
        return
    for copy in kept_copies(url):
        try:
            with used(copy), driving(copy, Publication(copy, is_left=True)):
                pass
        except ConflictError as error:
            log_handled(_log, f"records of {url} were not published", error)
        else:
            if is_url(run_dir) or copy != local_path(run_dir).absolute():
                remove_copy(copy)
