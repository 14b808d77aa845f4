"""Driver of Chromium: pages, their emulated media and keys, and what they say on the console."""

from __future__ import annotations

import asyncio
import base64
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp

_KEYS = {
    "Tab": {"code": "Tab", "windowsVirtualKeyCode": 9},
    "Enter": {"code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"},
    "Space": {"key": " ", "code": "Space", "windowsVirtualKeyCode": 32, "text": " "},
    "ArrowRight": {"code": "ArrowRight", "windowsVirtualKeyCode": 39},
}


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
            found = await self._socket.receive_json(timeout=120)
            if found.get("id") == self._number:
                if "error" in found:
                    raise RuntimeError(f"{method}: {found['error']['message']}")
                return dict(found["result"])
            self.heard.append((found["method"], found["params"]))

    async def value(self, script: str) -> Any:
        """Return the value of a JavaScript expression."""
        found = await self("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{script[:80]}: {found['exceptionDetails']}")
        return found["result"].get("value")

    async def open(self, path: Path, width: int, scheme: str, *, script: bool = True) -> None:
        """Open a file in a window of this width and color scheme, with or without scripts."""
        await self("Emulation.setScriptExecutionDisabled", value=not script)
        await self(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )
        await self(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        await self("Page.navigate", url=path.as_uri())
        while await self.value("document.readyState") != "complete":
            await asyncio.sleep(0.05)

    async def press(self, key: str) -> None:
        """Press and release a key."""
        fields = {"key": key, **_KEYS[key]}
        await self("Input.dispatchKeyEvent", type="keyDown", **fields)
        fields.pop("text", None)
        await self("Input.dispatchKeyEvent", type="keyUp", **fields)

    async def shoot(self, path: Path, *, whole: bool = True) -> None:
        """Write a screenshot of the whole page, or of the window."""
        shot = await self("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

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
        return list(dict.fromkeys(found))


@contextmanager
def chromium() -> Iterator[str]:
    """Start Chromium; yield the address of its debugging protocol; stop it."""
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
            yield f"http://{line.split('ws://')[1].split('/')[0]}"
        finally:
            process.terminate()
            process.communicate(timeout=30)


@asynccontextmanager
async def new_page(address: str) -> AsyncIterator[Page]:
    """Open an empty page in the Chromium at this address."""
    async with aiohttp.ClientSession() as session:
        async with session.put(f"{address}/json/new?about:blank") as answer:
            target = await answer.json()
        async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=2**28) as socket:
            page = Page(socket)
            for domain in ("Page", "Network", "Log", "Runtime"):
                await page(f"{domain}.enable")
            yield page
