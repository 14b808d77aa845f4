"""Sinks by name: the entry points of the group `trainload.sinks` of all installed distributions.

Names are read from the metadata of distributions; the module of a sink is imported only where a run
uses it. That is code which somebody has installed on the driver's machine, like any library that
trainload imports: packages contain only names of sinks, and can neither bring nor install one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from trainload.core.errors import ClusterError, RequestError, StorageError, raised
from trainload.core.processes import handlers_kept
from trainload.core.suggestions import did_you_mean
from trainload.launching.sinks.protocol import Sink

GROUP = "trainload.sinks"
_OURS = "trainload"
"""Name of our own distribution."""
_METHODS = ("numbers", "text", "close")


def installed_sinks() -> Mapping[str, tuple[EntryPoint, ...]]:
    """Return the names of sinks in alphabetical order, with the entry points that have them.

    Nothing is imported.
    """
    sinks: dict[str, tuple[EntryPoint, ...]] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda each: each.name):
        sinks[point.name] = (*sinks.get(point.name, ()), point)
    return sinks


def check_sinks(sinks: Sequence[str], backend: str) -> None:
    """Raise ClusterError if a sink needs Ray and the run's backend is another one."""
    if "prometheus" in sinks and backend != "ray":
        raise ClusterError(
            "prometheus requires Ray, whose endpoints serve the metrics",
            where="sinks",
            expected="backend ray",
            got=backend,
            hint="Launch on Ray, or remove it from sinks.",
        )


def check_sink_libraries(sinks: Sequence[str]) -> None:
    """Check that the sinks of a run can be used in this process, which is its driver.

    Raises:
        RequestError: no installed distribution has a sink of this name, or several have one.
        StorageError: the library of a sink is not installed, its module cannot be imported, or its
            entry point is not a class or function.
    """
    if repeated := sorted({name for name in sinks if sinks.count(name) > 1}):
        raise RequestError(
            "a sink is named twice",
            where="sinks",
            expected="each sink once",
            got=", ".join(repeated),
        )
    for name in sinks:
        load_sink(name)


def load_sink(name: str) -> Callable[[Path], Sink]:
    """Import a sink, and return its class, which is called with a run's folder.

    The errors are those of `check_sink_libraries`.
    """
    point = _find(name)
    with naming_extra(name), handlers_kept():
        try:
            sink: Callable[[Path], Sink] = point.load()
        except ImportError:
            raise
        # the module is someone else's, and may raise anything
        except (Exception, SystemExit) as error:
            raise StorageError(
                f"the sink {name} cannot be imported",
                where="sinks",
                expected=f"{point.value} of the distribution {_distribution(point)}",
                got=raised(error),
            ) from error
    if not callable(sink):
        raise StorageError(
            f"the sink {name} cannot be made",
            where="sinks",
            expected=f"{point.value}: a class, or a function, that is called with the run's folder",
            got=type(sink).__name__,
        )
    return sink


def check_is_sink(name: str, sink: object) -> None:
    """Raise StorageError if an object lacks a method of `Sink`. `name` is the name of the sink."""
    missing = [each for each in _METHODS if not callable(getattr(sink, each, None))]
    if missing:
        raise StorageError(
            f"the sink {name} lacks methods",
            where="sinks",
            expected=", ".join(_METHODS),
            got=f"{type(sink).__name__}, without {', '.join(missing)}",
        )


def _find(name: str) -> EntryPoint:
    sinks = installed_sinks()
    points = sinks.get(name, ())
    if not points:
        raise RequestError(
            "no sink of this name is installed here",
            where="sinks",
            expected=f"one of {', '.join(sinks)}",
            got=name,
            hint=did_you_mean(name, sinks, "Install the distribution that has it."),
        )
    ours = [point for point in points if _distribution(point) == _OURS]
    if len(ours or points) > 1:
        raise RequestError(
            "several installed distributions have a sink of this name",
            where="sinks",
            expected=f"one distribution with a sink {name}",
            got=", ".join(sorted(map(_distribution, points))),
            hint="Uninstall all but one of them.",
        )
    return (ours or points)[0]


@contextmanager
def naming_extra(name: str) -> Iterator[None]:
    """Convert an ImportError within the context into a StorageError that says what to install.

    `name` is the name of a sink.
    """
    try:
        yield
    except ImportError as error:
        distributions = {_distribution(point) for point in installed_sinks().get(name, ())}
        if _OURS in distributions:
            extra = "ray" if name == "prometheus" else name
            hint = f"Run `pip install 'trainload[{extra}]'`, or remove it from sinks."
        else:
            hint = f"Install what {', '.join(distributions)} needs, or remove it from sinks."
        raise StorageError(
            f"{name} is not installed", where="sinks", got=str(error), hint=hint
        ) from error


def _distribution(point: EntryPoint) -> str:
    return "" if point.dist is None else point.dist.name
