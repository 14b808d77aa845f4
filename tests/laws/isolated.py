"""Fresh environments: a venv with the built wheel and its declared dependencies.

They have neither the repository nor a network.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import subprocess
import sys
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.house.source import ROOT, STAGES

REFUSING = """
import errno, ipaddress, sys


def refuse(event, args):
    if event in ("socket.connect", "socket.sendto", "socket.getaddrinfo"):
        if event == "socket.getaddrinfo":
            host = args[0]
        else:
            host = args[1][0] if isinstance(args[1], tuple) else "127.0.0.1"
        try:
            inside = ipaddress.ip_address(host).is_loopback
        except ValueError:
            inside = host in (None, "", "localhost")
        if not inside:
            raise OSError(errno.ENETUNREACH, "the network is cut off")


sys.addaudithook(refuse)
"""
"""sitecustomize.py for systems that cannot remove the network.

Python's own sockets then reach only this machine.
"""


@dataclass(frozen=True, slots=True)
class Environment:
    """An isolated Python environment.

    Attributes:
        python: path of the interpreter.
        prefix: words before every command that cut off the network.
    """

    python: Path
    prefix: tuple[str, ...]

    def run(
        self, code: str, cwd: Path, *arguments: str | Path, timeout: float | None = None
    ) -> str:
        """Run `code` in a process that inherits nothing from this one. Return its output.

        Raises:
            AssertionError: the process fails.
        """
        variables = {
            "PATH": os.defpath,
            "HOME": str(cwd),
            "TRAINLOAD_CACHE_DIR": str(cwd / "cache"),
            "LC_ALL": "C.UTF-8",
        }
        command = [*self.prefix, str(self.python), "-c", code, *map(str, arguments)]
        done = subprocess.run(
            command,
            cwd=cwd,
            env=variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


def build_wheel(folder: Path) -> Path:
    """Build the project's wheel in a new folder, from a copy of its source. Return its path."""
    source = folder / "source"
    source.mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE", "src", *STAGES):
        subprocess.run(["cp", "-a", str(ROOT / name), str(source)], check=True)
    options = [
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(folder),
        str(source),
    ]
    built = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *options],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    (found,) = folder.glob("trainload-*.whl")
    return found


def make_environment(folder: Path, wheel: Path) -> Environment:
    """Create an environment in `folder` with the project's wheel.

    Dependencies are linked from the current environment, one by one, since it also has others, such
    as pytest.
    """
    venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
    (site,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (info,) = site.glob("trainload-*.dist-info")
    for distribution in _dependencies(importlib.metadata.Distribution.at(info)):
        _link(distribution, site)
    prefix = _cut_off()
    if not prefix:
        (site / "sitecustomize.py").write_text(REFUSING)
    return Environment(folder / "bin" / "python", prefix)


def make_plain_environment(folder: Path, *names: str) -> Environment:
    """Create an environment in `folder` without this project.

    It has these distributions and their declared dependencies.
    """
    venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
    (site,) = folder.glob("lib/python*/site-packages")
    for name in names:
        root = importlib.metadata.distribution(name)
        for distribution in [root, *_dependencies(root)]:
            _link(distribution, site)
    prefix = _cut_off()
    if not prefix:
        (site / "sitecustomize.py").write_text(REFUSING)
    return Environment(folder / "bin" / "python", prefix)


def _dependencies(root: importlib.metadata.Distribution) -> list[importlib.metadata.Distribution]:
    """Return the declared dependencies of a distribution, transitively and without extras."""
    # the distribution on PyPI; mypy would find the project's folder of that name
    requirements: Any = importlib.import_module("packaging.requirements")
    found: dict[str, importlib.metadata.Distribution] = {}
    left = [root]
    while left:
        parsed = [requirements.Requirement(text) for text in left.pop().requires or ()]
        for name in [
            r.name for r in parsed if r.marker is None or r.marker.evaluate({"extra": ""})
        ]:
            distribution = importlib.metadata.distribution(name)
            if distribution.metadata["Name"] not in found:
                found[distribution.metadata["Name"]] = distribution
                left.append(distribution)
    return list(found.values())


def _link(distribution: importlib.metadata.Distribution, site: Path) -> None:
    tops = {path.parts[0] for path in distribution.files or ()}
    for top in tops:
        if (
            top not in ("..", "__pycache__")
            and not top.endswith(".pth")
            and not (site / top).is_symlink()
        ):
            (site / top).symlink_to(Path(str(distribution.locate_file(top))))


def _cut_off() -> tuple[str, ...]:
    """Return a command prefix that runs a program in its own network namespace.

    The prefix is empty if the system does not allow one.
    """
    for prefix in (("unshare", "--net"), ("unshare", "--map-root-user", "--net")):
        try:
            done = subprocess.run(
                [*prefix, sys.executable, "-c", ""], capture_output=True, check=False
            )
        except FileNotFoundError:
            return ()
        if done.returncode == 0:
            return prefix
    return ()
