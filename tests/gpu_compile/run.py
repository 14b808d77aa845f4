"""`make gpu-compile`: compile packages for a GPU that this machine does not have, and check what is
compiled.

    python -m tests.gpu_compile.run [--device h100] [--cases demo,gpt2,llama]

Needs torch's build for CUDA; no GPU. Writes benchmarks/results/gpu-compile.json. The exit status is
1 if a check fails. Numbers, speed and several ranks are not proven by this.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tests.gpu_compile.jobs import CASES, ROOT

import trainload
from trainload.launching.described.described_gpu import MODE, described, environment_with
from trainload.sharding.planner.device import DeviceProfile
from trainload.sharding.planner.plan_source import Source
from trainload.sharding.planner.search import costs_of

RESULTS = ROOT / "benchmarks" / "results" / "gpu-compile.json"
_SECONDS = 1800.0
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Place:
    """The inputs and folders of the child processes for a plan.

    Attributes:
        gpu: the described GPU.
        package: the package.
        plan: file of the plan.
        out: folder of what the children write.
        cache: cache of the library that describes the GPU.
    """

    gpu: DeviceProfile
    package: Path
    plan: Path
    out: Path
    cache: Path

    def child(self, verb: str, *, dry: bool = False) -> dict[str, Any]:
        """Run a child, and return what it found."""
        environment = {
            **environment_with(self.gpu, self.cache),
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
            "TORCHINDUCTOR_CACHE_DIR": str(self.out / "inductor"),
            **({MODE: "dry"} if dry else {}),
        }
        command = [sys.executable, "-m", "tests.gpu_compile.child", verb]
        paths = map(str, (self.package, self.plan, self.out))
        subprocess.run([*command, *paths], cwd=ROOT, env=environment, check=True, timeout=_SECONDS)
        found: dict[str, Any] = json.loads((self.out / f"{verb}.json").read_bytes())
        return found


def wrong(gpu: DeviceProfile, found: dict[str, Any], *, wide: bool) -> list[str]:
    """Return what is wrong with what was compiled.

    Args:
        gpu: the described GPU.
        found: what the children have found.
        wide: True if some tensors need 64-bit indices.
    """
    assert gpu.architecture is not None
    expected = f"sm_{gpu.architecture.capability.replace('.', '')}"
    made, loaded = found["compile"], found["load"]
    problems = [f"{name} was not compiled: {why}" for name, why in made["failed"].items()]
    problems += made["elsewhere"]
    if set(made["architectures"]) != {expected}:
        problems.append(f"kernels are for {made['architectures']}, not {expected}")
    problems += [
        f"{name}: products {made['products'][name]}, on a CPU {products}"
        for name, products in made["products_on_cpu"].items()
        if products != made["products"][name]
    ]
    problems += [
        f"{name}: the order of collectives is {code}, not {made['planned'][name]}"
        for name, code in made["written"].items()
        if code != made["planned"][name]
    ]
    problems += [
        f"{name} has {number} configurations"
        for name, number in made["configurations_of_reductions"].items()
    ]
    problems += [
        f"{name}: {operator} is not deterministic"
        for name, operators in made["attention"].items()
        for operator in operators
        if "cudnn" in operator or ("backward" in operator and not operator.startswith("trainload"))
    ]
    if not any(made["attention"].values()):
        problems.append("there is no fused attention")
    if wide and not made["wide"].get("train.only"):
        problems.append("no kernel indexes in 64 bits, although a tensor needs that")
    if loaded["compiled"]:
        problems.append(f"loading compiled: {loaded['compiled']}")
    if "dry" in found and found["dry"]["step"]["waits"] > 1:
        problems.append(f"the host waits {found['dry']['step']['waits']} times in a step")
    if "recorded" in found:
        problems += _wrong_in_recordings(found["recorded"], found["dry"])
    return problems


def _wrong_in_recordings(recorded: dict[str, Any], dry: dict[str, Any]) -> list[str]:
    """Return what is wrong with steps as CUDA graphs."""
    problems = []
    step, launches = recorded["step"], dry["step"]["launches"]
    if step["launches"] > launches / 4 or step["recorded"]:
        problems.append(f"{step['launches']} launches with CUDA graphs, {launches} without")
    if step["waits"] > 1:
        problems.append(f"the host waits {step['waits']} times in a step with CUDA graphs")
    if "aten._local_scalar_dense.default cannot be part of" not in recorded["refused"]:
        problems.append(f"an operator that waits was recorded: {recorded['refused']}")
    return problems


def examined(gpu: DeviceProfile, name: str, scratch: Path) -> dict[str, Any]:
    """Freeze the job of a case, compile it under each of its plans, and return what was found."""
    folder = scratch / name
    folder.mkdir()
    command = [sys.executable, "-m", "tests.gpu_compile.jobs", name, str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=_SECONDS)
    found: dict[str, Any] = {}
    for plan, wanted in CASES[name].plans.items():
        out = folder / plan
        out.mkdir()
        place = Place(gpu, folder / "package.tl", folder / f"{plan}.json", out, scratch / "cache")
        verbs: dict[str, Any] = {"compile": place.child("compile"), "load": place.child("load")}
        if CASES[name].runs and "pipeline" not in plan:
            verbs["dry"] = place.child("dry", dry=True)
            if "offload" not in wanted.options:
                verbs["recorded"] = place.child("recorded", dry=True)
            verbs["estimated_peak_bytes"] = estimated_peak(place)
        verbs["wrong"] = wrong(gpu, verbs, wide=wanted.wide)
        del verbs["compile"]["folder"]
        found[plan] = verbs
        for problem in verbs["wrong"]:
            print(f"{name}, {plan}: {problem}", flush=True)
    return found


def estimated_peak(place: Place) -> int:
    """Return the planner's estimate of the memory of a rank's tensors, in bytes."""
    plan = trainload.Plan.model_validate_json(place.plan.read_bytes())
    return costs_of(Source(trainload.open(place.package)), plan, place.gpu).memory.tensors


def table(found: dict[str, dict[str, Any]]) -> Table:
    """Return a table of what was found."""
    columns = (
        *("job, plan", "kernels", "compile s", "load s", "launches a step, with CUDA graphs"),
        *("host waits", "copies to, from the GPU", "kept for backward MiB", "peak, estimated MiB"),
        *("layer's buckets together", "wrong"),
    )
    shown = Table(*columns)
    for name, plans in found.items():
        for plan, verbs in plans.items():
            made, step = verbs["compile"], verbs.get("dry", {}).get("step")
            spent = sum(s for stage, s in made["seconds"].items() if stage.startswith("compile"))
            recorded = verbs.get("recorded", {}).get("step")
            peak = verbs.get("dry", {}).get("peak_bytes")
            copies = f"{step['copies_to_gpu']}, {step['copies_from_gpu']}" if step else "-"
            shown.add_row(
                f"{name}, {plan}",
                str(made["kernels"]),
                f"{spent:.0f}",
                f"{verbs['load']['seconds']:.1f}",
                f"{step['launches']}, {recorded['launches'] if recorded else '-'}" if step else "-",
                str(step["waits"]) if step else "-",
                copies,
                f"{verbs['dry']['kept_bytes'] / _MIB:,.0f}" if peak else "-",
                f"{peak / _MIB:,.0f}, {verbs['estimated_peak_bytes'] / _MIB:,.0f}" if peak else "-",
                "yes" if any(made["together"].values()) else "no",
                str(len(verbs["wrong"])),
            )
    return shown


def main() -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="h100")
    parser.add_argument("--cases", default=",".join(CASES))
    arguments = parser.parse_args()
    gpu = described(arguments.device)
    with tempfile.TemporaryDirectory() as scratch:
        found = {name: examined(gpu, name, Path(scratch)) for name in arguments.cases.split(",")}
    Console().print(table(found))
    about = {"device": gpu.name, "torch": torch.__version__}
    earlier = json.loads(RESULTS.read_bytes())
    # cases that were not run keep their results, if they are of the same device and torch
    kept = earlier["cases"] if {name: earlier[name] for name in about} == about else {}
    written = {**about, "cases": kept | found}
    RESULTS.write_text(json.dumps(written, indent=1) + "\n")
    return any(verbs["wrong"] for plans in found.values() for verbs in plans.values())


if __name__ == "__main__":
    sys.exit(main())
