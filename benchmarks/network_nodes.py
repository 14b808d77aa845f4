"""A Ray cluster whose nodes have network namespaces and interfaces of their own, so that a network
can fail between them.

The head is in this process's namespace. A pair of interfaces connects each node to a bridge:
`cut` takes it down, and `Weather` forwards its frames by hand, late or not at all. Needs root.
"""

from __future__ import annotations

import heapq
import json
import os
import random
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import filelock

_NETWORK = "10.78.0"
_BRIDGE = "tlbr"
_NAME = re.compile(r"tl\d+")
_CONTROL_PORTS = range(20000, 24000)
"""Ports of Ray's processes. Collectives use others."""
_PORTS_EACH = 200
_START_SECONDS = 60.0
_ETHERNET, _IPV4, _TCP = 14, 0x0800, 6
_SOL_PACKET, _PACKET_VNET_HDR, _VNET_BYTES = 263, 15, 10
_FRAME_BYTES = 1 << 17
_VARIABLES = {"GLOO_SOCKET_IFNAME": "eth0", "RAY_AUTH_MODE": "disabled"}


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class NetworkNodes:
    """Cluster of a head without workers and nodes of one CPU; see `fault_cluster.Nodes`."""

    def __init__(self, count: int) -> None:
        os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
        os.environ |= _VARIABLES
        self._names: list[str] = []
        self._is_over = threading.Event()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._threads: list[threading.Thread] = []
        port = _CONTROL_PORTS[0]
        self.address = f"{_NETWORK}.1:{port}"
        # two such clusters would have the same addresses
        self._lock = filelock.FileLock(Path(tempfile.gettempdir(), "trainload-network-nodes.lock"))
        self._lock.acquire(timeout=0)
        _remove(_namespaces())  # left by a process that was killed
        try:
            _ip("link", "add", _BRIDGE, "type", "bridge")
            _ip("addr", "add", f"{_NETWORK}.1/24", "dev", _BRIDGE)
            _ip("link", "set", _BRIDGE, "up")
            options = ["--head", f"--port={port}", "--num-cpus=0", "--include-dashboard=false"]
            self._run("head", [], options, 1)
            for _ in range(count):
                self.add()
        except BaseException:
            self.close()
            raise

    def add(self) -> None:
        """Add a node."""
        number = len(self._names) + 2
        name = f"tl{number}"
        self._names.append(name)
        _ip("netns", "add", name)
        _ip("link", "add", f"{name}b", "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("link", "set", f"{name}b", "master", _BRIDGE, "up")
        inside = ("netns", "exec", name, "ip")
        _ip(*inside, "addr", "add", f"{_NETWORK}.{number}/24", "dev", "eth0")
        _ip(*inside, "link", "set", "eth0", "up")
        _ip(*inside, "link", "set", "lo", "up")
        count = len(self.alive())
        self._run(
            name,
            ["ip", "netns", "exec", name],
            [f"--address={self.address}", "--num-cpus=1"],
            number,
        )
        until = time.monotonic() + _START_SECONDS
        while len(self.alive()) <= count:
            assert time.monotonic() < until, f"{name} did not start"
            time.sleep(0.1)

    def _run(self, name: str, prefix: list[str], options: list[str], number: int) -> None:
        """Run a node, and again whenever it has ended, as a service manager does."""
        first = _CONTROL_PORTS[0] + number * _PORTS_EACH
        command = [
            *prefix,
            *(sys.executable, "-W", "ignore", "-m", "ray.scripts.scripts", "start", "--block"),
            f"--node-ip-address={_NETWORK}.{number}",
            f"--node-manager-port={first}",
            f"--object-manager-port={first + 1}",
            f"--min-worker-port={first + 10}",
            f"--max-worker-port={first + _PORTS_EACH - 1}",
            "--disable-usage-stats",
            *options,
        ]

        def keep() -> None:
            while not self._is_over.is_set():
                self._processes[name] = subprocess.Popen(
                    command,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
                self._processes[name].wait()
                self._is_over.wait(1.0)

        thread = threading.Thread(target=keep, daemon=True)
        self._threads.append(thread)
        thread.start()
        if name == "head":
            _wait_for_port(self.address)

    def alive(self) -> dict[str, str]:
        """Return address -> id of the nodes that the head takes for alive, without the head."""
        code = (
            "import ray, json; ray.init(address='auto', logging_level=40, log_to_driver=False);"
            "print(json.dumps({n['NodeManagerAddress']: n['NodeID']"
            " for n in ray.nodes() if n['Alive']}))"
        )
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            env={**os.environ, "RAY_ADDRESS": self.address},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            return {}
        found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
        found.pop(f"{_NETWORK}.1", None)
        return found

    def interface_of(self, node: str) -> str:
        """Return the bridge's interface to a node, given the node's id."""
        address = next(address for address, each in self.alive().items() if each == node)
        return f"tl{address.rpartition('.')[2]}b"

    @contextmanager
    def cut(self, interface: str) -> Iterator[None]:
        """Take a node's interface down within the context."""
        _ip("link", "set", interface, "down")
        try:
            yield
        finally:
            _ip("link", "set", interface, "up")

    def close(self) -> None:
        """End all nodes, and remove their interfaces."""
        self._is_over.set()
        for process in self._processes.values():
            _kill_with_descendants(process.pid)
        for name in self._names:
            _end_processes_in(name)
        for thread in self._threads:
            thread.join(_START_SECONDS)
        _remove(self._names)
        for name in _VARIABLES:
            del os.environ[name]
        self._lock.release()


def _namespaces() -> list[str]:
    """Return the names of all network namespaces of such nodes."""
    found = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    names = [line.split()[0] for line in found.stdout.splitlines()]
    return [name for name in names if _NAME.fullmatch(name)]


def _remove(names: Sequence[str]) -> None:
    """Remove nodes, with all of their processes and those of the head, and the bridge."""
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            if f"{_NETWORK}.1".encode() in process.read_bytes():  # the head, or it connects to it
                os.kill(int(process.parent.name), signal.SIGKILL)
    for name in names:
        _end_processes_in(name)
        subprocess.run(["ip", "netns", "del", name], check=False)
    found = subprocess.run(
        ["ip", "-json", "link", "show"], capture_output=True, text=True, check=True
    )
    ours = {_BRIDGE, *(f"{name}b{end}" for name in names for end in ("", "n", "f"))}
    for link in {each["ifname"] for each in json.loads(found.stdout)} & ours:
        # with one end of a pair the other one goes
        subprocess.run(["ip", "link", "del", link], check=False, capture_output=True)


def _kill_with_descendants(pid: int) -> None:
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    doomed = [pid]
    for each in doomed:
        doomed += children.get(each, [])
    for each in doomed:
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def _end_processes_in(namespace: str) -> None:
    found = subprocess.run(
        ["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False
    )
    for pid in found.stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def _wait_for_port(address: str) -> None:
    host, _, port = address.rpartition(":")
    until = time.monotonic() + _START_SECONDS
    while True:
        try:
            socket.create_connection((host, int(port)), 1.0).close()
            return
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


class Weather:
    """Forward the frames of a node by hand: those of the control plane late, and not all of them.

    Args:
        interface: the bridge's interface to the node.
        delay: time in seconds for which each frame of the control plane is held, in each
            direction.
        loss: share of these frames that are dropped.

    Attributes:
        forwarded: number of frames of the control plane that were forwarded.
        dropped: number of those that were not.
    """

    def __init__(self, interface: str, delay: float, loss: float) -> None:
        self._delay = delay
        self._loss = loss
        self._chance = random.Random(0)
        self.forwarded = self.dropped = 0
        self._interface = interface
        self._is_over = threading.Event()
        # the node's interface now leads here, and a new one from here to the bridge
        self._near, self._far = f"{interface}n", f"{interface}f"
        _ip("link", "set", interface, "nomaster")
        _ip("link", "add", self._near, "type", "veth", "peer", "name", self._far)
        for name in (interface, self._near, self._far):
            _ip("link", "set", name, "promisc", "on", "up")
        _ip("link", "set", self._far, "master", _BRIDGE)
        self._sockets = [_packet_socket(interface), _packet_socket(self._near)]
        self._thread = threading.Thread(target=self._forward, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Connect the node to the bridge again."""
        self._is_over.set()
        self._thread.join()
        for each in self._sockets:
            each.close()
        _ip("link", "del", self._near)
        _ip("link", "set", self._interface, "master", _BRIDGE)

    def _forward(self) -> None:
        held: list[tuple[float, int, bytes, socket.socket]] = []
        number = 0
        to = {self._sockets[0]: self._sockets[1], self._sockets[1]: self._sockets[0]}
        while not self._is_over.is_set():
            now = time.monotonic()
            while held and held[0][0] <= now:
                _, _, frame, target = heapq.heappop(held)
                with suppress(OSError):  # its queue is full, as on a real network
                    target.send(frame)
            timeout = min(0.1, held[0][0] - now) if held else 0.1
            for source in select.select(self._sockets, [], [], max(0.0, timeout))[0]:
                try:
                    frame, (_, _, kind, *_) = source.recvfrom(_FRAME_BYTES)
                except OSError:
                    continue
                if kind == socket.PACKET_OUTGOING:
                    continue
                delay = 0.0
                if _is_control(frame[_VNET_BYTES:]):
                    if self._chance.random() < self._loss:
                        self.dropped += 1
                        continue
                    self.forwarded += 1
                    delay = self._delay
                number += 1
                heapq.heappush(held, (time.monotonic() + delay, number, frame, to[source]))


def _packet_socket(interface: str) -> socket.socket:
    """Return a socket that receives and sends whole frames, with their offload headers."""
    found = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    found.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    found.bind((interface, 3))
    found.setblocking(False)
    return found


def _is_control(frame: bytes) -> bool:
    """Return True if a frame is TCP from or to a port of Ray's processes."""
    if len(frame) < _ETHERNET + 24 or struct.unpack_from("!H", frame, 12)[0] != _IPV4:
        return False
    if frame[_ETHERNET + 9] != _TCP:
        return False
    start = _ETHERNET + (frame[_ETHERNET] & 15) * 4
    return any(port in _CONTROL_PORTS for port in struct.unpack_from("!HH", frame, start))
