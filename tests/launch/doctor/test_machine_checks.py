"""Checks of one machine, each made to fail by a real environment that lacks something."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from tests.launch.doctor.constrained import distribution, examined, in_namespace
from tests.ports import free_port

from trainload.cli import main as cli
from trainload.launching.doctor.accelerators import examine_gpus, examine_triton
from trainload.launching.doctor.installed_software import TorchFacts
from trainload.launching.doctor.local_network import examine_proxies
from trainload.launching.doctor.machine_limits import examine_memory, examine_processors
from trainload.launching.doctor.storage_checks import examine_store
from trainload.launching.doctor.working_compiler import examine_compiler

CPU = TorchFacts("2.13.0", "CPU", (), "", "")
CUDA = TorchFacts("2.13.0", "CUDA 13.0", (), "The NVIDIA driver on your system is too old", "")
H200 = TorchFacts("2.13.0", "CUDA 13.0", (("NVIDIA H200", 141 * 2**30),) * 8, "", "")


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_path_without_a_compiler_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = examine_compiler()
    assert (found.status, found.found) == ("warning", "no g++ in PATH")
    assert "interpreted" in found.expected


def test_a_compiler_without_pythons_headers_fails_with_the_name_of_their_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = r'for word; do shift; case $word in -I*) ;; *) set -- "$@" "$word" ;; esac; done'
    monkeypatch.setenv("CXX", script(tmp_path / "cxx", f'{without}\nexec g++ "$@"'))
    found = examine_compiler()
    assert found.status == "fails"
    assert "Python.h" in found.found
    assert "python3-dev" in found.hint


def test_a_compiler_for_another_processor_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It succeeds, and its library cannot be loaded."""
    last = r'for word; do :; done; echo "not a library" > "$word"'
    monkeypatch.setenv("CXX", script(tmp_path / "cxx", last))
    found = examine_compiler()
    assert found.status == "fails"
    assert "answer.so" in found.found


def test_a_small_shared_memory_is_a_warning_and_fails_with_gpus() -> None:
    within = in_namespace("--mount", "mount -t tmpfs -o size=8m tmpfs /dev/shm")
    without_gpus = examined("machine_limits", "examine_shared_memory(0)", within=within)
    with_gpus = examined("machine_limits", "examine_shared_memory(8)", within=within)
    assert (without_gpus.status, with_gpus.status) == ("warning", "fails")
    assert with_gpus.found == "8.0 MiB free of 8.0 MiB"
    assert with_gpus.expected.startswith("4.5 GiB")


@pytest.mark.parametrize(("limit", "status"), [(1000, "fails"), (20000, "warning")])
def test_a_low_limit_of_open_files_is_found(limit: int, status: str) -> None:
    within = ["sh", "-c", f'ulimit -n {limit} && exec "$@"', "sh"]
    found = examined("machine_limits", "examine_open_files()", within=within)
    assert found.status == status
    assert found.found.endswith(f"raised to {limit}")


def test_a_full_disk_fails(tmp_path: Path) -> None:
    within = in_namespace("--mount", f"mount -t tmpfs -o size=8m tmpfs {tmp_path}")
    cache = str(tmp_path / "cache")
    found = examined("machine_limits", "examine_disk()", within=within, TRAINLOAD_CACHE_DIR=cache)
    assert found.status == "fails"
    assert f"8.0 MiB free in cache {tmp_path}" in found.found


def test_a_path_that_is_too_long_for_sockets_fails(tmp_path: Path) -> None:
    place = tmp_path / ("long" * 25)
    place.mkdir()
    found = examined("machine_limits", "examine_temporary_files()", TMPDIR=str(place))
    assert found.status == "fails"
    assert "AF_UNIX path too long" in found.found


def test_a_cache_that_others_can_write_to_fails(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    found = examined(
        "machine_limits", "examine_cache()", TRAINLOAD_CACHE_DIR=str(tmp_path / "cache")
    )
    assert found.status == "fails"
    assert "mode 777" in found.found


@pytest.mark.parametrize(("option", "text"), [("noexec", "noexec"), ("ro", "Read-only")])
def test_a_cache_on_a_mount_that_cannot_serve_it_fails(
    option: str, text: str, tmp_path: Path
) -> None:
    within = in_namespace("--mount", f"mount -t tmpfs -o {option},mode=700 tmpfs {tmp_path}")
    found = examined(
        "machine_limits", "examine_cache()", within=within, TRAINLOAD_CACHE_DIR=str(tmp_path)
    )
    assert found.status == "fails"
    assert text in found.found


def proc(root: Path, groups: str, files: dict[str, str]) -> Path:
    """Create the files of a kernel that tell a process's memory and control group."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\n")
    (root / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_memory_limit_of_a_control_group_counts(tmp_path: Path) -> None:
    files = {"pod/memory.max": f"{2**32}\n", "pod/memory.current": f"{2**32 - 2**28}\n"}
    files |= {"pod/memory.stat": "inactive_file 0\n", "memory.max": "max\n"}
    found = examine_memory(proc(tmp_path, "0::/pod/container\n", files))
    assert found.status == "fails"
    assert found.found == "256.0 MiB free of 4.0 GiB, the limit of its control group"


def test_files_that_can_be_dropped_count_as_free_memory(tmp_path: Path) -> None:
    files = {"memory.max": f"{2**32}\n", "memory.current": f"{2**32}\n"}
    files["memory.stat"] = f"inactive_file {3 * 2**30}\n"
    assert examine_memory(proc(tmp_path, "0::/\n", files)).status == "ok"


def test_the_memory_limit_of_version_1_counts(tmp_path: Path) -> None:
    files = {"memory/pod/memory.limit_in_bytes": f"{2**32}\n"}
    files |= {"memory/pod/memory.usage_in_bytes": f"{3 * 2**30}\n"}
    files |= {"memory/pod/memory.stat": "total_inactive_file 0\n"}
    found = examine_memory(proc(tmp_path, "4:memory:/pod\n1:cpu:/\n0::/\n", files))
    assert found.status == "warning"
    assert found.found.startswith("1.0 GiB free of 4.0 GiB")


@pytest.mark.parametrize(
    "files",
    [
        {"cpu.max": "50000 100000\n"},
        {"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"},
    ],
    ids=["version 2", "version 1"],
)
def test_a_cpu_quota_is_a_warning(files: dict[str, str], tmp_path: Path) -> None:
    found = examine_processors(proc(tmp_path, "1:cpu,cpuacct:/\n0::/\n", files))
    assert found.status == "warning"
    assert found.found.startswith("a quota of 0.5 CPUs")


def test_a_machine_without_a_quota_has_its_processors(tmp_path: Path) -> None:
    root = proc(tmp_path, "0::/\n", {"cpu.max": "max 100000\n"})
    assert examine_processors(root).status == "ok"


@contextmanager
def proxy() -> Iterator[str]:
    """A server that answers every request itself, like the login page of a network."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # the name that http.server calls
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"Please log in.")

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://user:hunter2000@127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_proxy_that_intercepts_loopback_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with proxy() as url:
        monkeypatch.setenv("http_proxy", url)
        found = examine_proxies()
    assert found.status == "fails"
    assert found.found.startswith("another server answers requests to 127.0.0.1")
    assert "hunter2000" not in found.found


def test_a_proxy_that_leaves_loopback_alone_is_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    with proxy() as url:
        monkeypatch.setenv("http_proxy", url)
        monkeypatch.setenv("no_proxy", "localhost,127.0.0.1")
        assert examine_proxies().status == "ok"


def test_a_host_name_that_cannot_be_resolved_fails_on_a_node_with_peers() -> None:
    within = in_namespace("--uts", "hostname no-such-host.invalid")
    found = examined("local_network", "examine_host_name(has_peers=True)", within=within)
    assert found.status == "fails"
    assert "no-such-host.invalid cannot be resolved" in found.found


def test_an_unknown_interface_for_gloo_fails() -> None:
    call = "examine_host_name(has_peers=False)"
    found = examined("local_network", call, GLOO_SOCKET_IFNAME="nonexistent0")
    assert found.status == "fails"
    assert "there is no nonexistent0" in found.found
    assert examined("local_network", call, GLOO_SOCKET_IFNAME="lo").status == "ok"


def test_a_torch_that_is_not_supported_fails(tmp_path: Path) -> None:
    path = distribution(tmp_path, "torch", "2.5.1")
    found = examined("installed_software", "examine_torch()", PYTHONPATH=path)
    assert (found.status, found.found) == ("fails", "2.5.1")


def test_a_torch_that_cannot_be_imported_fails_with_its_error(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text('raise ImportError("libcudart.so.13: cannot open")')
    path = distribution(tmp_path, "torch", "2.13.0")
    found = examined("installed_software", "examine_torch()", PYTHONPATH=path)
    assert found.status == "fails"
    assert found.found == "ImportError: libcudart.so.13: cannot open"


def test_a_ray_that_is_not_supported_fails(tmp_path: Path) -> None:
    path = distribution(tmp_path, "ray", "2.9.0")
    found = examined("installed_software", "examine_ray(needed=False)", PYTHONPATH=path)
    assert found.status == "fails"
    assert found.found.startswith("ray 2.9.0, not ")


def test_a_required_package_that_is_too_old_fails(tmp_path: Path) -> None:
    path = distribution(tmp_path, "networkx", "2.8")
    found = examined("installed_software", "examine_packages()", PYTHONPATH=path)
    assert (found.status, found.found) == ("fails", "networkx 2.8, not >=3")


def test_an_extra_whose_package_is_too_old_is_a_warning(tmp_path: Path) -> None:
    path = distribution(tmp_path, "s3fs", "2023.1.0")
    found = examined("installed_software", "examine_extras()", PYTHONPATH=path)
    assert found.status == "warning"
    assert found.found.startswith("s3fs 2023.1.0, not ")


@pytest.mark.parametrize("device", ["nvidia0", "kfd"])
def test_a_gpu_and_a_cpu_build_of_torch_fail(device: str, tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / device).touch()
    found = examine_gpus(CPU, tmp_path)
    assert found.status == "fails"
    assert found.found == f"the machine has /dev/{device}, and torch is a CPU build"


def test_a_driver_that_is_too_old_fails_with_its_version(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    version = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.57.02\n"
    (tmp_path / "proc/driver/nvidia/version").write_text(version)
    found = examine_gpus(CUDA, tmp_path)
    assert found.status == "fails"
    assert "driver on your system is too old" in found.found
    assert "470.57.02" in found.expected


def test_without_gpus_there_is_nothing_to_check(tmp_path: Path) -> None:
    assert examine_gpus(CPU, tmp_path).status == "not applicable"
    assert examine_triton(CPU).status == "not applicable"


def test_gpus_without_triton_fail(tmp_path: Path) -> None:
    assert examine_gpus(H200, tmp_path).found == "8 x NVIDIA H200, 141.0 GiB; CUDA 13.0"
    assert examine_triton(H200).status == "fails"


def test_a_folder_is_a_good_store_and_stays_empty(tmp_path: Path) -> None:
    place = tmp_path / "store"
    assert [each.status for each in examine_store(str(place))] == ["ok", "ok", "ok"]
    assert [path for path in place.rglob("*") if path.is_file()] == []


def test_a_bucket_is_a_good_store(url: str) -> None:
    assert [each.status for each in examine_store(url)] == ["ok", "ok", "ok"]


def test_a_store_that_does_not_answer_fails(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    (found,) = examine_store(f"{url}-elsewhere")
    assert (found.name, found.status) == ("store", "fails")
    assert "cannot be reached" in found.found


def test_an_unknown_protocol_fails() -> None:
    (found,) = examine_store("nonsense://bucket")
    assert found.status == "fails"


def test_the_command_prints_every_check_and_its_exit_status_says_whether_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nonexistent0")
    assert cli.run(["doctor", "--store", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    for name in ("python", "compiler", "shared memory", "store latency"):
        assert f"\n{name} " in text
    assert "host name: expected one of" in text
    assert text.splitlines()[-1].endswith("1 failed")


@pytest.mark.slow
def test_the_json_has_nodes_and_their_checks() -> None:
    command = [sys.executable, "-m", "trainload", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    answer = json.loads(done.stdout)
    (node,) = answer["nodes"]
    names = [check["name"] for check in node["checks"]]
    assert names[:5] == ["python", "packages", "torch", "ray", "extras"]
    assert answer["healthy"] is (done.returncode == 0)
