"""A store's files in a folder."""

from __future__ import annotations

from pathlib import Path

from trainload.core.storage.folder_files import FolderFiles


def test_pruning_removes_empty_folders_but_not_the_root(tmp_path: Path) -> None:
    """Another rank may be creating the root: it fails if the root vanishes meanwhile."""
    root = tmp_path / "checkpoints"
    (root / "step-1" / "draft").mkdir(parents=True)
    (root / "step-2").mkdir()
    (root / "step-2" / "index.json").touch()
    FolderFiles(root).prune("")
    assert sorted(path.name for path in root.iterdir()) == ["step-2"]
    (root / "step-2" / "index.json").unlink()
    FolderFiles(root).prune("")
    assert root.is_dir()
