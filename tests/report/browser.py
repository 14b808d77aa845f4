"""Open a report in Chromium: `make browser`.

    python -m tests.report.browser [RUN_DIR] [--output DIR]

Checks that the page loads nothing, prints nothing on the console and fits its window, in light and
dark mode, wide and narrow; and writes screenshots to DIR. RUN_DIR: your own run; without it, a run
is made that is killed and resumed.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp

from trainload.launching.node.cache import default_cache_dir
from trainload.report.runs.page import page_of
from trainload.report.runs.run_folder import read_run

WIDTHS = (1280, 400)
SCHEMES = ("light", "dark")
Call = Callable[..., Awaitable[Any]]


class Page:
    """A Chromium page, used via the debugging protocol. `heard`: (method, params) of its events."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0
        self.heard: list[tuple[str, dict[str, Any]]] = []

    async def __call__(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Call a method and return its result."""
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": arguments})
        while True:
            found = await self._socket.receive_json(timeout=60)
            if found.get("id") == self._number:
                if "error" in found:
                    raise RuntimeError(f"{method}: {found['error']['message']}")
                return dict(found["result"])
            self.heard.append((found["method"], found["params"]))

    async def value(self, script: str) -> Any:
        """Return the value of a JavaScript expression."""
        return (await self("Runtime.evaluate", expression=script, returnByValue=True))["result"][
            "value"
        ]

    def complaints(self, own: str) -> list[str]:
        """Return the console messages, and the requests for anything except the file itself."""
        found = []
        for method, told in self.heard:
            if (
                method == "Network.requestWillBeSent"
                and told["request"]["url"] != own
                and not told["request"]["url"].startswith("data:")
            ):
                found.append(f"it asks for {told['request']['url']}")
            elif method == "Log.entryAdded":
                found.append(f"it says {told['entry']['text']}")
            elif method == "Runtime.consoleAPICalled":
                found.append(f"it says {told['args']}")
            elif method == "Runtime.exceptionThrown":
                found.append(f"it fails: {told['exceptionDetails']['text']}")
        return found


async def look(address: str, path: Path, output: Path) -> list[str]:
    """Open the file in each width and color scheme. Returns the problems."""
    own, wrong = path.as_uri(), []
    async with aiohttp.ClientSession() as session:
        async with session.put(f"{address}/json/new?about:blank") as answer:
            target = await answer.json()
        async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=2**28) as socket:
            page = Page(socket)
            for domain in ("Page", "Network", "Log", "Runtime"):
                await page(f"{domain}.enable")
            for width in WIDTHS:
                for scheme in SCHEMES:
                    await page(
                        "Emulation.setEmulatedMedia",
                        features=[{"name": "prefers-color-scheme", "value": scheme}],
                    )
                    await page(
                        "Emulation.setDeviceMetricsOverride",
                        width=width,
                        height=900,
                        deviceScaleFactor=1,
                        mobile=width < 600,
                    )
                    await page("Page.navigate", url=own)
                    while await page.value("document.readyState") != "complete":
                        await asyncio.sleep(0.05)
                    across = await page.value("document.documentElement.scrollWidth")
                    if across > width:
                        wrong.append(f"at {width} it is {across} wide")
                    if not await page.value("document.querySelectorAll('svg.chart').length"):
                        wrong.append("it has no charts")
                    shot = await page("Page.captureScreenshot", captureBeyondViewport=True)
                    (output / f"report-{scheme}-{width}.png").write_bytes(
                        base64.b64decode(shot["data"])
                    )
            return wrong + page.complaints(own)


def browse(path: Path, output: Path) -> list[str]:
    """Start Chromium, run `look`, and stop Chromium."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        raise SystemExit("there is no Chromium here: apt-get install chromium")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = (
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--remote-debugging-port=0",
        )
        process = subprocess.Popen(
            [program, *options, f"--user-data-dir={profile}", "about:blank"],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        try:
            assert process.stderr is not None
            line = next(line for line in process.stderr if "DevTools listening on" in line)
            address = line.split("ws://")[1].split("/")[0]
            return asyncio.run(look(f"http://{address}", path, output))
        finally:
            process.terminate()
            process.communicate(timeout=30)


def broken_run(folder: Path) -> Path:
    """Create a run of the law tests' GPT that is killed and resumed."""
    from tests.laws.gpt import gpt_job, write_rows

    import trainload

    trainload.freeze(gpt_job(), folder / "gpt.tl")
    data, held_out = (
        write_rows(folder / "train.npz", 91, seed=1),
        write_rows(folder / "held-out.npz", 21, seed=2),
    )
    run_dir = folder / "run"
    options = [
        "--steps",
        "120",
        "--checkpoint-every",
        "25",
        "--eval-every",
        "20",
        "--eval-data",
        held_out,
        "--run-dir",
        run_dir,
    ]
    trainload_command = [sys.executable, "-m", "trainload"]
    launch = [
        *trainload_command,
        "launch",
        folder / "gpt.tl",
        "--data",
        data,
        "--backend",
        "local",
        "--no-compile",
        *options,
    ]
    process = subprocess.Popen(
        [str(part) for part in launch], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    journal = run_dir / "events.jsonl"
    while not journal.exists() or '"step":60,' not in journal.read_text():
        if process.poll() is not None:
            raise SystemExit(f"the run ended with {process.returncode}")
    process.kill()
    process.wait()
    subprocess.run(
        [*trainload_command, "resume", str(run_dir), "--backend", "local"],
        check=True,
        capture_output=True,
    )
    return run_dir


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dir", nargs="?", type=Path)
    parser.add_argument(
        "--output", type=Path, default=default_cache_dir() / "browser", help="default: %(default)s"
    )
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        run_dir = arguments.run_dir or broken_run(Path(scratch))
        path = Path(scratch) / "report.html"
        path.write_text(page_of(read_run(run_dir)), encoding="utf-8")
        wrong = browse(path, arguments.output)
    for line in wrong:
        sys.stderr.write(f"{line}\n")
    sys.stdout.write(f"{len(WIDTHS) * len(SCHEMES)} screenshots in {arguments.output}\n")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
