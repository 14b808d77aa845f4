"""Types of the manifest's fields, with the values that they accept."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from trainload.capture.job.names import is_dotted_name
from trainload.packaging.format.package_paths import safe_path

_TOKEN = r"[A-Za-z0-9][A-Za-z0-9!#$&^_.+-]{0,126}"


def _of_64_bits(value: int | float) -> int | float:
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise ValueError(f"{value} does not fit into 64 bits")
    return value


def _fqn(name: str) -> str:
    if not is_dotted_name(name):
        raise ValueError(f"{name[:80]!r} is not a dotted name")
    return name


Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
SafePath = Annotated[str, AfterValidator(safe_path)]
Fqn = Annotated[str, AfterValidator(_fqn)]
MediaType = Annotated[str, Field(pattern=rf"^{_TOKEN}/{_TOKEN}(; charset={_TOKEN})?$")]
"""A media type as in RFC 6838, with at most a charset: "text/plain", "text/csv; charset=utf-8"."""
Identifier = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=256)]
Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_-]*$", max_length=64)]
Symbolic = Annotated[str, Field(min_length=1, max_length=256)]
ModuleName = Annotated[
    str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$", max_length=512)
]
DistributionName = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$", max_length=256)
]
DistributionVersion = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.!+-]+$", max_length=256)]
Quantile = Annotated[int | float, AfterValidator(_of_64_bits)]
Option = (
    bool
    | int
    | float
    | Annotated[str, Field(max_length=8192)]
    | tuple[Annotated[str, Field(max_length=8192)], ...]
    | None
)
"""Value of an option of a pass."""
SettingName = Annotated[
    str, Field(pattern=r"^[a-z][a-z_]{0,31}(\.[A-Za-z0-9_][A-Za-z0-9_-]{0,63})?$")
]
"""A setting's name as for `--set`: "lr", "lr.group0", "adapters.rank"."""
