"""Import the helper in a process that has not imported transformers yet, as the tests of this
folder have.
"""

from __future__ import annotations

import sys


def tell_whether_transformers_is_imported() -> None:
    """Import the helper as the first thing of it, and say whether that imports transformers."""
    assert "trainload.huggingface" not in sys.modules
    assert "transformers" not in sys.modules
    import trainload.huggingface  # noqa: F401  # what is asked about

    print("transformers" in sys.modules, flush=True)
