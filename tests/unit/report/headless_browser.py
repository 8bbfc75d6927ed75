"""A headless Chromium that opens a page, presses keys, and tells what the page has asked for and complained about."""

import asyncio
import base64
import itertools
import json
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run")


class Browser:
    """One page. `complaints` are errors and warnings of its console, `requests` the addresses that it asked for."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._numbers = socket, itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            event = json.loads(message.data)
            if "id" in event:
                self._answers.pop(event["id"]).set_result(event)
            elif event["method"] == "Network.requestWillBeSent":
                self.requests.append(event["params"]["request"]["url"])
            elif event["method"] == "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(event["params"]["exceptionDetails"])[:600])
            elif event["method"] == "Runtime.consoleAPICalled" and event["params"]["type"] in ("error", "warning", "assert"):
                self.complaints.append(str(event["params"]["args"])[:600])
            elif event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] in ("error", "warning"):
                self.complaints.append(event["params"]["entry"]["text"][:600])

    async def call(self, method: str, **parameters: Any) -> Any:
        """The result of a method of the DevTools protocol."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        found = await asyncio.wait_for(answer, 60)
        assert "error" not in found, found
        return found["result"]

    async def open(self, url: str, *, ready: str) -> None:
        """Open `url` and wait until the expression `ready` is true."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)
        await self.until(ready)

    async def run(self, expression: str) -> Any:
        """The value of an expression in the page."""
        found = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, expression: str, *, timeout_s: float = 60.0) -> None:
        """Wait until an expression in the page is true."""
        async with asyncio.timeout(timeout_s):
            while not await self.run(f"Boolean({expression})"):
                await asyncio.sleep(0.05)

    async def press(self, key: str) -> None:
        """Press and release a key."""
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, text=key if kind == "keyDown" else "")

    async def picture(self, path: Path, *, width: int = 1400, height: int = 1000) -> None:
        """Write a picture of the window, of this size."""
        await self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        path.write_bytes(base64.b64decode((await self.call("Page.captureScreenshot"))["data"]))


@asynccontextmanager
async def browser(directory: Path) -> AsyncIterator[Browser]:
    """A page in a browser of its own, whose files are in `directory`; it ends with the body."""
    assert CHROMIUM is not None, "tests without a browser are skipped"
    command = [CHROMIUM, *_OPTIONS, "--remote-debugging-port=0", f"--user-data-dir={directory}", "about:blank"]
    with (directory.parent / "browser.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            port_file = directory / "DevToolsActivePort"
            async with asyncio.timeout(60):
                while not port_file.exists() or "\n" not in port_file.read_text():
                    await asyncio.sleep(0.05)
            port = port_file.read_text().splitlines()[0]
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json") as response:
                    pages = await response.json()
                address = next(page["webSocketDebuggerUrl"] for page in pages if page["type"] == "page")
                async with session.ws_connect(address, max_msg_size=0) as socket:
                    yield Browser(socket)
        finally:
            process.terminate()
