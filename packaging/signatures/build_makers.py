"""Whose builds the policies allow to be loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainload.core.errors import PolicyError
from trainload.packaging.builds.build_folder import listed_digests
from trainload.packaging.builds.build_record import BuildRecord
from trainload.packaging.signatures.keys import identity_of
from trainload.packaging.signatures.policy import Policy
from trainload.packaging.signatures.vouching import vouched_for


def allows_builds(policies: Sequence[Policy]) -> bool:
    """Return True if builds of some maker may be loaded: a policy names makers, and none forbids
    all of them.
    """
    rules = [policy.build_makers for policy in policies if policy.build_makers is not None]
    return bool(rules) and all(rules)


def check_maker(path: Path, record: BuildRecord, digest: str, policies: Sequence[Policy]) -> None:
    """Check that every policy with a rule about builds trusts a maker who has signed this one.

    Only build.json and signatures/ of the folder are read.

    Args:
        path: folder of the build.
        record: its record.
        digest: sha256 of the bytes of the record.
        policies: policies that apply.

    Raises:
        PolicyError: a policy does not, or none has such a rule.
        SignatureError: the libraries that check signatures are missing.
    """
    rules = [policy for policy in policies if policy.build_makers is not None]
    if not rules:
        raise PolicyError(
            "no policy says whose builds may be loaded",
            where=str(path),
            hint="Name trusted makers in a policy: build_makers.",
        )
    for policy in rules:
        makers = [
            identity_of(pem, f"build maker {number} of {policy.source}")
            for number, pem in enumerate(policy.build_makers or (), 1)
        ]
        signed, lacking = vouched_for(path, listed_digests(record, digest), makers)
        if not signed:
            reasons = dict.fromkeys(f"{refused.file}: {refused.reason}" for refused in lacking)
            raise PolicyError(
                f"the policy {policy.source} does not trust the build's maker",
                where=str(path),
                expected=f"a signature by one of {len(makers)} build makers",
                got="; ".join(list(reasons)[:3]) or "no maker is trusted",
            )
