"""Pages of the site that are made when it is built.

- The files at the repository's root that people read are pages of the section Project.
- The reference of the Python API has a page for each part, made from the stub of public names, so
  a new public name is in it.

Links between these files and the pages of docs/ are the repository's own, and are rewritten. A link
whose text is the name of a page has the page's title.
"""

from __future__ import annotations

import ast
import posixpath
import re
import shutil
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "build" / "api"
STUB = ROOT / "src" / "trainload" / "__init__.pyi"
PROJECT = {
    "ARCHITECTURE.md": "project/architecture.md",
    "CHANGELOG.md": "project/changelog.md",
    "CODE_OF_CONDUCT.md": "project/code-of-conduct.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
}
"""File at the root -> its page."""
PARTS = {
    "freezing": ("Freezing jobs", ("capture", "freezing", "passes", "transforms", "exporting")),
    "planning": ("Planning", ("sharding",)),
    "running": ("Running and observing", ("launching",)),
    "packages": ("Packages, stores and trust", ("packaging", "publishing")),
    "errors": ("Errors", ("core",)),
}
"""Page of the API -> its title and the folders that define its names."""
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#]+)((?:#[^)\s]*)?)\)")


def public_names() -> dict[str, str]:
    """Return each public name and the module that defines it."""
    nodes = ast.parse(STUB.read_text()).body
    return {
        alias.asname or alias.name: f"trainload.{node.module}"
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def api_page(part: str) -> str:
    """Return the text of a page of the API."""
    title, folders = PARTS[part]
    lines = [f"# {title}", ""]
    # what is called, then what it returns and takes
    by_kind = sorted(public_names().items(), key=lambda each: (each[0][0].isupper(), each[0]))
    for name, module in by_kind:
        if module.split(".")[1] in folders:
            lines += [
                f"::: {module}.{name}",
                "    options:",
                f"      heading: trainload.{name}",
                f"      toc_label: {name}",
                "",
            ]
    return "\n".join(lines)


def on_startup(command: str, dirty: bool) -> None:
    """Copy the sources: griffe follows no links and reads no namespace packages.

    It is done before the configuration is read, since mkdocstrings looks for the folder then.
    """
    shutil.rmtree(SOURCES, ignore_errors=True)
    shutil.copytree(
        ROOT / "src" / "trainload",
        SOURCES / "trainload",
        ignore=shutil.ignore_patterns("__pycache__", "*.pyi"),
    )
    for folder in (path for path in SOURCES.rglob("*") if path.is_dir()):
        (folder / "__init__.py").touch()


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made here."""
    undocumented = {module.split(".")[1] for module in public_names().values()} - {
        folder for _, folders in PARTS.values() for folder in folders
    }
    if undocumented:
        raise ValueError(f"PARTS has no page for the names of {sorted(undocumented)}")
    for name, page in PROJECT.items():
        if (ROOT / name).exists():
            files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    for part in PARTS:
        files.append(File.generated(config, f"reference/api/{part}.md", content=api_page(part)))
    return files


def _title(path: Path) -> str:
    """Return the title of a page, or "" if there is none."""
    heading = re.search(r"^# (.+)$", path.read_text(), re.MULTILINE) if path.is_file() else None
    return heading[1] if heading else ""


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links from and to files at the root to their pages."""
    place = page.file.src_uri
    at_root = next((name for name, made in PROJECT.items() if made == place), None)
    source = at_root or f"docs/{place}"

    def link(match: re.Match[str]) -> str:
        text, target, anchor = match.groups()
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        made = PROJECT.get(path) or path.removeprefix("docs/")
        if path not in PROJECT and not path.startswith("docs/"):
            # a file of the repository is named; the strict build reports what does not exist
            return f"{text} (`{path}`)" if (ROOT / path).is_file() else match[0]
        if text.endswith(".md"):  # a reader of the repository sees files, one of the site titles
            text = _title(ROOT / path) or text
        return f"[{text}]({posixpath.relpath(made, posixpath.dirname(place))}{anchor})"

    return _LINK.sub(link, markdown)
