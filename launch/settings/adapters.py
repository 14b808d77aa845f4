"""Low-rank adapters (Hu et al. 2021) as a setting: which parameters get one, of which rank, and the
values that they begin with.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from trainload.core.errors import JobError
from trainload.core.storage.places import Where, absolute_place
from trainload.core.suggestions import similar
from trainload.launching.settings.adapter_names import WEIGHT, source_prefix

if TYPE_CHECKING:
    from trainload.autograd_trace.low_rank import LowRank
    from trainload.packaging.format.manifest import Manifest
    from trainload.packaging.format.manifest_records import ParameterEntry


class Adapters(BaseModel):
    """Low-rank adapters in place of whole parameters: W becomes W + alpha / rank * B A, and only A
    and B are trained.

    >>> Adapters(rank=8, layers=("*.q_proj.weight",)).scale
    1.0
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    rank: int = Field(ge=1)
    """Rows of A (rank, in) and columns of B (out, rank)."""
    layers: tuple[str, ...] = Field(min_length=1)
    """Shell patterns of names of parameters W (out, in), each used as the weight of linear layers
    only.
    """
    alpha: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Scale of B A, times the rank. Default: the rank."""
    also: tuple[str, ...] = ()
    """Shell patterns of names of other parameters that are trained (norms, heads).

    All others keep their values.
    """
    source: str | None = None
    """Folder or URL of an adapter of peft whose A and B the run begins with, which all nodes reach.
    Rank, layers and alpha are the adapter's.
    """
    source_digest: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    """SHA-256 of the source's `adapter_model.safetensors`. Default: that of the file at the launch.
    """

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if (self.source is None) != (self.source_digest is None):
            raise ValueError("source and source_digest belong together: see Adapters.from_peft")
        return self

    @classmethod
    def from_peft(
        cls, folder: Where, *, also: Sequence[str] = (), digest: str | None = None
    ) -> Self:
        """Return the adapters of a folder that peft has saved, with which a run continues.

        Args:
            folder: path or URL of a folder with `adapter_config.json` and
                `adapter_model.safetensors`, which all nodes reach.
            also: patterns of names of other parameters that are trained.
            digest: SHA-256 that the weights' file must have; None: any.

        Raises:
            WeightsError: there is no such adapter, it has another digest, or it is not a plain LoRA
                adapter of linear layers.
            StorageError: it cannot be reached.

        >>> Adapters.from_peft("adapter")  # doctest: +SKIP
        """
        from trainload.launching.settings.peft_adapter import check_digest, read_adapter

        place = absolute_place(folder)
        assert place is not None, "a folder is named"
        adapter = read_adapter(place)
        if digest is not None:
            check_digest(adapter, digest, place)
        if adapter.dropout:
            warnings.warn(
                f"{place}: peft trained this adapter with a dropout of {adapter.dropout:g}; a run"
                " trains it without",
                stacklevel=2,
            )
        return cls(
            rank=adapter.rank,
            layers=tuple(f"{module}{WEIGHT}" for module in adapter.modules),
            alpha=adapter.alpha,
            also=tuple(also),
            source=place,
            source_digest=adapter.digest,
        )

    @property
    def scale(self) -> float:
        """Factor of B A."""
        return 1.0 if self.alpha is None else self.alpha / self.rank

    def chosen(self, manifest: Manifest) -> tuple[LowRank, ...]:
        """Return the adapters of a package, in the order of its parameters.

        Raises:
            JobError: a pattern matches nothing, or a parameter that cannot have an adapter of this
                rank; a name is taken.
        """
        parameters = {entry.name: entry for entry in manifest.parameters}
        matrices = [entry.name for entry in manifest.parameters if len(entry.shape) == 2]
        if self.source is None:
            matched = _match_names(self.layers, list(parameters), matrices, "adapters.layers")
        else:
            prefix = source_prefix(self.layers, parameters.keys())
            matched = frozenset(f"{prefix}{name}" for name in self.layers)
        tied = {
            entry.alias_of: entry.name
            for entry in manifest.parameters
            if entry.alias_of is not None
        }
        adapters = tuple(
            self._make_adapter(parameters[name], tied) for name in parameters if name in matched
        )
        names_in_use = {*parameters, *(buffer.name for buffer in manifest.buffers)}
        clash = next(
            (
                name
                for adapter in adapters
                for name in (adapter.down, adapter.up)
                if name in names_in_use
            ),
            None,
        )
        if clash is not None:
            raise JobError(
                "the package already has a parameter with an adapter's name",
                where="adapters.layers",
                got=clash,
                hint=(
                    "The package was frozen with adapters: choose other layers, or freeze it with"
                    " the adapters merged."
                ),
            )
        return adapters

    def trained_beside(self, manifest: Manifest) -> frozenset[str]:
        """Return the parameters that are trained in addition to the adapters.

        Raises:
            JobError: a pattern matches no trained parameter, or one that gets an adapter.
        """
        names = list(
            dict.fromkeys(name for group in manifest.recipe.groups for name in group.parameters)
        )
        matched = _match_names(self.also, names, names, "adapters.also")
        both = sorted(matched & {adapter.weight for adapter in self.chosen(manifest)})
        if both:
            raise JobError(
                "a parameter is selected for an adapter and for training",
                where="adapters.also",
                got=both[0],
                hint="Select it in adapters.layers or in adapters.also, not in both.",
            )
        return matched

    def _make_adapter(self, entry: ParameterEntry, tied: Mapping[str, str]) -> LowRank:
        # this imports torch, which `--help` must not
        from trainload.autograd_trace.low_rank import LowRank

        other = entry.alias_of or tied.get(entry.name)
        if other is not None:
            raise JobError(
                f"{entry.name} and {other} are the same parameter, so an adapter would apply to"
                " both",
                where="adapters.layers",
                got=entry.name,
                hint="Exclude it from the pattern, or train it without an adapter: adapters.also.",
            )
        if len(entry.shape) != 2:
            raise JobError(
                f"{entry.name} is not the weight of a linear layer",
                where="adapters.layers",
                expected="a parameter with two dims (out, in)",
                got=f"shape {tuple(entry.shape)}",
                hint="Match only the weights: '*.q_proj.weight'.",
            )
        if self.rank > min(entry.shape):
            raise JobError(
                "the rank is greater than that of a layer",
                where="adapters.rank",
                expected=(
                    f"at most {min(entry.shape)}, as {entry.name} has shape {tuple(entry.shape)}"
                ),
                got=str(self.rank),
            )
        module, _, last = entry.name.rpartition(".")
        prefix = f"{module}." if module else ""
        return LowRank(
            entry.name, f"{prefix}lora_A.{last}", f"{prefix}lora_B.{last}", self.rank, self.scale
        )


def _match_names(
    patterns: Sequence[str], names: Sequence[str], like: Sequence[str], where: str
) -> frozenset[str]:
    """Return the names that match a pattern.

    Raises:
        JobError: a pattern matches none; the message lists similar names among `like`.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = similar(pattern, like, 5) or list(like[:5])
            raise JobError(
                f"no {'trained ' if where == 'adapters.also' else ''}parameter matches {pattern!r}",
                where=where,
                expected=", ".join(near) + (", ..." if len(like) > len(near) else ""),
                hint=(
                    "Use shell patterns, such as `*.q_proj.weight`. `trainload inspect --json`"
                    " lists the names."
                ),
            )
    return frozenset(
        name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)
    )
