"""Import the helper in a new process, since the tests of this folder have imported transformers."""

from __future__ import annotations

import sys


def tell_whether_transformers_is_imported() -> None:
    """Import the helper first and print whether that imports transformers."""
    assert "trainload.huggingface" not in sys.modules
    assert "transformers" not in sys.modules
    import trainload.huggingface  # noqa: F401  # the import under test

    print("transformers" in sys.modules, flush=True)
