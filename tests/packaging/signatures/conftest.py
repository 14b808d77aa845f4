"""A fixture with a signed package."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.packaging.signatures.sign_and_verify import sign
from tests.packaging.signers import Signers


@pytest.fixture
def signed(copied: Path, signers: Signers) -> Path:
    """A package that alice signed."""
    sign(copied, signers.alice.key, "alice")
    return copied
