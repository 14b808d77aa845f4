"""The model card of a package in a repository of the Hugging Face Hub: metadata that the Hub reads,
and what a reader has to know to use the package.
"""

from __future__ import annotations

import math

from trainload.exporting.weights_folder import MADE_OF
from trainload.packaging.format.assets import ASSETS
from trainload.packaging.format.manifest import Manifest
from trainload.packaging.package import Package


def model_card(package: Package, repo: str, folder: str) -> str:
    """Return the text of a README.md.

    Args:
        package: the package.
        repo: OWNER/NAME of the repository.
        folder: folder of the repository that has the package.
    """
    manifest = package.manifest
    is_transformers = f"{ASSETS}{MADE_OF}" in manifest.files
    count = sum(math.prod(p.shape) for p in manifest.parameters if p.alias_of is None)
    head = [
        "---",
        f"library_name: {'transformers' if is_transformers else 'trainload'}",
        "tags: [trainload]",
        "---",
    ]
    rows = [
        ("package", package.digest),
        ("program", manifest.program_digest),
        ("parameters", f"{count:,}"),
        ("optimizer", manifest.recipe.optimizer),
        *_training_rows(manifest),
    ]
    inputs = [
        f"- {name}: "
        + ", ".join(
            f"`{spec.name}` {spec.dtype} ({', '.join(map(str, spec.shape))})"
            for spec in graph.inputs
        )
        for name, graph in manifest.graphs.items()
    ]
    pull = [
        "```",
        f"trainload pull hf://{repo} -o {folder}",
        f"trainload launch {folder} --data rows.parquet",
        "```",
    ]
    load = [
        "```python",
        f'model = transformers.AutoModel.from_pretrained("{repo}")  # or config.json\'s class',
        "```",
    ]
    return "\n".join(
        [
            *head,
            "",
            f"# {repo.rpartition('/')[2]}",
            "",
            "A training job as a trainload package: its graphs, its recipe and its weights.",
            "",
            "| | |",
            "|---|---|",
            *(f"| {name} | {value} |" for name, value in rows),
            "",
            "Inputs of the graphs:",
            "",
            *inputs,
            "",
            *pull,
            "",
            *(load if is_transformers and package.has_weights else ()),
            "",
        ]
    )


def _training_rows(manifest: Manifest) -> list[tuple[str, str]]:
    """Return what the card says about the run that made the weights."""
    if manifest.parent is None:
        return [("weights", "as the job was frozen")]
    rows = [("trained from", manifest.parent)]
    if manifest.training is not None:
        rows += [
            ("updates", f"{manifest.training.steps:,}"),
            ("SHA-256 of the rows", manifest.training.data),
        ]
    return rows
