"""Libraries of operators are found, and recorded with distribution, version and digest."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from trainload.packaging.format.manifest_records import OpLibraryEntry
from trainload.packaging.libraries.op_libraries import (
    describe_libraries,
    differences,
    modules_of,
    one_provider,
)
from trainload.packaging.libraries.providers import Provider, provider_of
from trainload.packaging.libraries.wheels import make_wheel, unpack_wheel
from trainload.packaging.package import Package

CUSTOM_OP = """
import torch

@torch.library.custom_op("{namespace}::{name}", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    return x / 2
"""
LIBRARY_OBJECT = """
import torch

library = torch.library.Library("{namespace}", "FRAGMENT")
library.define("{name}(Tensor x) -> Tensor")
library.impl("{name}", lambda x: x / 2, "CompositeExplicitAutograd")
"""
FAKE_ALONE = """
import torch

torch.library.define("{namespace}::{name}", "(Tensor x) -> Tensor")
torch.library.impl("{namespace}::{name}", "cpu")(lambda x: x / 2)
torch.library.register_fake("{namespace}::{name}")(lambda x: torch.empty_like(x))
"""
"""A library that only its fake identifies: torch does not record who called `define`.

It does not record this for operators in C++ either.
"""


Write = Callable[..., ModuleType]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """A function that writes and imports a module.

    A module with a version is installed as a distribution.
    """
    monkeypatch.setattr(sys, "path", list(sys.path))
    written: list[str] = []

    def make(name: str, text: str, version: str | None = None) -> ModuleType:
        (tmp_path / "source").mkdir(exist_ok=True)
        file = tmp_path / "source" / f"{name}.py"
        file.write_text(text)
        folder = file.parent
        if version is not None:
            folder = tmp_path / f"site-{name}-{version}"
            metadata = (
                f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}-wheel\nVersion: {version}\n"
            )
            provider = Provider(
                f"{name.replace('_', '-')}-wheel", version, {file.name: file}, metadata
            )
            wheel = make_wheel(provider, name, tmp_path)
            with wheel.open("rb") as opened:
                unpack_wheel(opened, wheel.name, folder)
        sys.path.insert(0, str(folder))
        importlib.invalidate_caches()
        written.append(name)
        return importlib.import_module(name)

    yield make
    for name in written:
        sys.modules.pop(name, None)


def described(namespace: str, name: str, named: str | None = None) -> OpLibraryEntry:
    return describe_libraries(
        [f"torch.ops.{namespace}.{name}.default"], [namespace], {namespace: named}
    )[namespace]


@pytest.mark.matrix("fake_alone")
@pytest.mark.parametrize("how", ["custom_op", "library_object", "fake_alone"])
def test_the_module_that_registers_an_operator_is_found(how: str, write: Write) -> None:
    text = {"custom_op": CUSTOM_OP, "library_object": LIBRARY_OBJECT, "fake_alone": FAKE_ALONE}[how]
    module = write(f"found_by_{how}", text.format(namespace=f"ns_{how}", name="halved"))
    assert described(f"ns_{how}", "halved").modules == (module.__name__,)


def test_a_module_of_the_namespace_s_name_is_taken_where_torch_knows_nothing(write: Write) -> None:
    module = write("named_as_its_namespace", "")
    assert described("named_as_its_namespace", "none").modules == (module.__name__,)
    assert described("named_as_nothing", "none").modules == ()


def test_what_the_user_names_is_taken(write: Write) -> None:
    write("that_registers", CUSTOM_OP.format(namespace="ns_named", name="halved"))
    told = write("that_was_named", "import that_registers\n")
    assert described("ns_named", "halved", told.__name__).modules == ("that_was_named",)
    assert told.__file__ is not None
    assert described("ns_named", "halved", told.__file__).modules == ("that_was_named",)


def test_a_distribution_is_recorded_with_its_version_and_digest(write: Write) -> None:
    module = write(
        "of_a_wheel", CUSTOM_OP.format(namespace="ns_wheel", name="halved"), version="1.2"
    )
    entry = described("ns_wheel", "halved")
    assert (entry.distribution, entry.version) == ("of-a-wheel-wheel", "1.2")
    provider = provider_of(module)
    assert provider is not None
    assert entry.digest == provider.digest


def test_a_module_without_a_distribution_is_recorded_with_its_digest_alone(write: Write) -> None:
    write("of_no_wheel", CUSTOM_OP.format(namespace="ns_loose", name="halved"))
    entry = described("ns_loose", "halved")
    assert (entry.distribution, entry.version) == (None, None)
    assert entry.digest is not None


def test_of_two_distributions_none_is_recorded_and_both_modules_are(write: Write) -> None:
    first = write(
        "first_of_two", LIBRARY_OBJECT.format(namespace="ns_two", name="first"), version="1"
    )
    second = write(
        "second_of_two", LIBRARY_OBJECT.format(namespace="ns_two", name="second"), version="1"
    )
    operators = [f"torch.ops.ns_two.{name}.default" for name in ("first", "second")]
    entry = describe_libraries(operators, ["ns_two"], {})["ns_two"]
    assert entry.modules == (first.__name__, second.__name__)
    assert (entry.distribution, entry.digest) == (None, None)
    assert one_provider(modules_of("ns_two", operators, None)) is None


def told(package: Package, entry: OpLibraryEntry) -> list[str]:
    """Return the differences of a package that was created with this library."""
    manifest = package.manifest.model_copy(
        update={"op_libraries": {"ns_told": entry}, "ops": {"torch.ops.ns_told.halved.default": ""}}
    )
    return differences(manifest, {"ns_told": None})


def test_another_version_of_a_library_is_told_of(packaged: Package, write: Write) -> None:
    write("told_of", CUSTOM_OP.format(namespace="ns_told", name="halved"), version="1.2")
    here = described("ns_told", "halved")
    assert told(packaged, here) == []
    assert told(packaged, here.model_copy(update={"version": "1.1", "digest": "0" * 64})) == [
        "the package was made with the operators ns_told of told-of-wheel 1.1; here they come from"
        " told-of-wheel 1.2"
    ]
    (sentence,) = told(packaged, here.model_copy(update={"digest": "0" * 64}))
    assert "whose files differ here" in sentence
