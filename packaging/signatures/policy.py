"""Policies: rules of a cluster's owner that a package must meet before it is run.

All policies that are found apply: the machine's, the one named by the environment, the one named by
the user, and, on a worker, those that its driver found. So a user can tighten a policy but not
weaken it. docs/guides/trust.md says what each rule protects against.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from trainload.core.canonical_json import sha256_bytes
from trainload.core.errors import PolicyError
from trainload.packaging.format.field_types import Identifier, Sha256
from trainload.packaging.format.manifest import Manifest
from trainload.packaging.format.package_paths import MANIFEST
from trainload.packaging.signatures.keys import identity_of, read_pem
from trainload.packaging.signatures.signature_file import signed_files
from trainload.packaging.signatures.vouching import Refused, vouched_for

POLICY = "TRAINLOAD_POLICY"
"""Environment variable: a policy file."""
SYSTEM_POLICY = Path("/etc/trainload/policy.toml")
"""The machine's policy file, which may be absent."""
MAX_POLICY = 2**20
"""Maximum size of a policy file in bytes."""


class Policy(BaseModel):
    """A self-contained policy, which can be sent to another machine.

    Attributes:
        source: path of the policy file, for messages.
        require_signature: if True, every package must be signed by `signatures` of the
            `identities`.
        identities: public keys or certificates, as PEM.
        signatures: number of identities that must have signed, each with a different key.
        allow: digests of packages that are exempt from the other rules.
        deny: digests of packages that are never run.
        namespaces: namespaces of operators of other libraries that packages may call; None: those
            that the user allows.
        extensions: rule for packages with operator libraries in extensions/. "never": they are not
            run; "signed": they must be signed as for `require_signature`, and then load the
            libraries; None: the user decides.
        build_makers: public keys or certificates, as PEM, of those whose builds may be loaded: a
            build in a store is native code. (): nobody's; None: this policy has no rule, and
            without such a rule in any policy no build is loaded.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    source: str
    require_signature: bool = False
    identities: Annotated[tuple[str, ...], Field(strict=False)] = ()
    signatures: Annotated[int, Field(ge=1)] = 1
    allow: Annotated[tuple[Sha256, ...], Field(strict=False)] = ()
    deny: Annotated[tuple[Sha256, ...], Field(strict=False)] = ()
    namespaces: Annotated[tuple[Identifier, ...], Field(strict=False)] | None = None
    extensions: Literal["never", "signed"] | None = None
    build_makers: Annotated[tuple[str, ...], Field(strict=False)] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        needs_signatures = self.require_signature or self.extensions == "signed"
        if needs_signatures and self.signatures > len(self.identities):
            raise ValueError(
                f"{self.signatures} signatures are required, but there are {len(self.identities)}"
                " identities"
            )
        if not needs_signatures and (self.identities or self.signatures > 1):
            raise ValueError(
                "identities and signatures have no effect without require_signature = true or"
                ' extensions = "signed"'
            )
        for identities in (self.identities, self.build_makers or ()):
            if len(set(identities)) < len(identities):
                raise ValueError("an identity is listed twice")
        if set(self.allow) & set(self.deny):
            raise ValueError(
                f"the digest {min(set(self.allow) & set(self.deny))} is both allowed and denied"
            )
        return self


def read_policy(path: Path) -> Policy:
    """Read a policy from a TOML file.

    An identity is PEM text, or the path of a PEM file relative to the policy's folder.

    Raises:
        PolicyError: the file cannot be read, or is invalid.
        SignatureError: a key cannot be read.
    """
    where = str(path)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_POLICY + 1)
    except OSError as error:
        raise PolicyError(f"the policy cannot be read: {error.strerror}", where=where) from error
    if len(data) > MAX_POLICY:
        raise PolicyError(
            "the policy is too large", where=where, expected=f"at most {MAX_POLICY} bytes"
        )
    try:
        fields = tomllib.loads(data.decode("utf-8"))
    except ValueError as error:
        raise PolicyError(f"the policy is not valid TOML: {error}", where=where) from error
    if "source" in fields:
        raise PolicyError("the policy has an unknown key", where=where, got="source")
    for key in ("identities", "build_makers"):
        identities = fields.get(key)
        if isinstance(identities, list):
            fields[key] = [
                _pem(identity, path) if isinstance(identity, str) else identity
                for identity in identities
            ]
    return _policy({**fields, "source": where}, where)


def _pem(identity: str, policy: Path) -> str:
    name = "an inline identity" if "-----BEGIN " in identity else identity
    text = identity if "-----BEGIN " in identity else read_pem(policy.absolute().parent / identity)
    return identity_of(text, f"{policy}, {name}").pem


def _policy(fields: dict[str, Any], where: str) -> Policy:
    try:
        return Policy.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        keys = ", ".join(name for name in Policy.model_fields if name != "source")
        raise PolicyError(
            f"the policy is invalid: {place + ': ' if place else ''}{first['msg']}",
            where=where,
            expected=f"the keys {keys}" if first["type"] == "extra_forbidden" else "",
        ) from error


def find_policies(policy_file: Path | None = None) -> tuple[Policy, ...]:
    """Return every policy that applies in this process: the machine's, $TRAINLOAD_POLICY, and
    `policy_file`. Each file occurs once.

    Raises: as `read_policy`. Only the machine's file may be missing.
    """
    from_environment = os.environ.get(POLICY)
    files = [Path(from_environment)] if from_environment else []
    files += [policy_file] if policy_file is not None else []
    machine_policies = [read_policy(SYSTEM_POLICY)] if os.path.lexists(SYSTEM_POLICY) else []
    return tuple(
        {
            policy.source: policy
            for policy in (*machine_policies, *(read_policy(path.absolute()) for path in files))
        }.values()
    )


def check_policies(path: Path, policies: Sequence[Policy]) -> str:
    """Check that all policies allow a package to be run.

    The result is valid for the bytes of the manifest that were read here: code that opens the
    package afterwards must compare its digest with the returned one. Every other file is compared
    with the manifest when it is read.

    Args:
        path: the package's folder.
        policies: the policies.

    Returns:
        The package's digest.

    Raises:
        PolicyError: a policy forbids it; the message names the policy and the rule.
        SignatureError: the libraries that check signatures are missing.
        PackageError: the manifest cannot be read.
    """
    from trainload.packaging.package import (
        # imported late: it imports torch's serialization, which modules that only name a policy do
        # not need
        read_manifest,
    )

    data = read_manifest(path)
    digest = sha256_bytes(data)
    manifest = Manifest.from_bytes(data, MANIFEST)
    for policy in policies:
        _check(path, manifest, digest, policy)
    return digest


def which_trusts_extensions(policies: Sequence[Policy], digest: str) -> Policy | None:
    """Return the policy that lets a package load its bundled operator libraries without the user's
    consent, or None.

    Args:
        policies: the policies of `check_policies`.
        digest: the digest that it returned. A policy whose `allow` lists it has not checked
            signatures, and so does not count.
    """
    return next(
        (
            policy
            for policy in policies
            if policy.extensions == "signed" and digest not in policy.allow
        ),
        None,
    )


def _check(path: Path, manifest: Manifest, digest: str, policy: Policy) -> None:
    def refuse(problem: str, got: str, expected: str = "", hint: str = "") -> PolicyError:
        return PolicyError(
            f"the policy {policy.source} forbids running it: {problem}",
            where=str(path),
            expected=expected,
            got=got,
            hint=hint,
        )

    if digest in policy.deny:
        raise refuse("its digest is denied", digest)
    if digest in policy.allow:
        return
    bundled = sorted(file for file in manifest.files if file.startswith("extensions/"))
    if bundled and policy.extensions == "never":
        raise refuse(
            "it contains operator libraries",
            ", ".join(bundled[:3]),
            hint="Install the libraries on every node, and freeze without them.",
        )
    others = (
        sorted(set(manifest.op_libraries) - set(policy.namespaces))
        if policy.namespaces is not None
        else []
    )
    if others:
        allowed = ", ".join(policy.namespaces or ()) or "none"
        raise refuse(
            "it calls operators of libraries that are not allowed",
            ", ".join(others),
            expected=f"only {allowed}",
        )
    if policy.require_signature or (bundled and policy.extensions == "signed"):
        identities = [
            identity_of(pem, f"identity {number} of {policy.source}")
            for number, pem in enumerate(policy.identities, 1)
        ]
        signed, lacking = vouched_for(path, signed_files(manifest, digest), identities)
        # two identities with the same key count once
        count = min(len(signed), len({vouched.signer for vouched in signed}))
        if count < policy.signatures:
            requirement = f"{policy.signatures} of {len(identities)} identities to have signed it"
            raise refuse(
                "it is not signed as required",
                _summarize_refusals(count, lacking),
                expected=requirement,
                hint="Have it signed: trainload sign.",
            )


def _summarize_refusals(count: int, lacking: Sequence[Refused]) -> str:
    reasons = list(dict.fromkeys(f"{refused.file}: {refused.reason}" for refused in lacking))
    more = [f"and {len(reasons) - 3} more reasons"] if len(reasons) > 3 else []
    return "; ".join([str(count) if count else "none", *reasons[:3], *more])
