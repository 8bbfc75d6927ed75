"""The page in a real browser, from file://: it shows what it has to, by keyboard too, and asks nobody for anything."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from headless_browser import CHROMIUM, Browser, browser
from written_run import NASTY, branched, group, write_run

from megatron_rl.data.buffer import BUFFER_FILE, Buffer
from megatron_rl.report import page as page_module
from megatron_rl.report.page import report_run
from megatron_rl.types import Failure

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine (apt-get install chromium)")
READY = "document.querySelector('#where')?.textContent.startsWith('step') && document.readyState === 'complete'"


def looked_at(page: Path, directory: Path, look: Callable[[Browser], Awaitable[Any]]) -> Any:
    """What `look` returns of the open page, which has complained about nothing and asked for nothing but itself."""

    async def see() -> Any:
        async with browser(directory / "profile") as seen:
            await seen.open(page.as_uri(), ready=READY)
            found = await look(seen)
            assert seen.complaints == []
            asked = [url for url in seen.requests if url != page.as_uri() and not url.startswith(("data:", "blob:"))]
            assert asked == [], "the page is self-contained"
            return found

    return asyncio.run(see())


async def groups(seen: Browser) -> AsyncIterator[str]:
    """Show group after group by keyboard, and yield the line above each."""
    name = str(await seen.run("document.querySelector('#where').textContent"))
    yield name
    for _ in range(int(name.partition(" of ")[2].partition(")")[0]) - 1):
        await seen.press("n")
        await seen.until(f"document.querySelector('#where').textContent !== {json.dumps(name)}")
        name = str(await seen.run("document.querySelector('#where').textContent"))
        yield name


def run_of(directory: Path) -> Path:
    """Two steps, whose first kept texts alone: many groups; some with texts that would be markup, with branches, and that failed."""
    words = [f"word {number}\nand more" for number in range(4)]
    name = NASTY.replace("\x00", "")
    nasty = [group(f"{step}{name}", [f"{NASTY} answer"] * 2, [2.0, 2.0], text=f"{NASTY} prompt", metadata={"k": NASTY}) for step in (1, 2)]
    first = [nasty[0], *(group(f"g{number}", words, [0.25 * number, 0.0, 1.0, None]) for number in range(12))]
    failed = group("failed", ["x"], [None], failures=[Failure("error", f"broke {NASTY}")] * 3)
    run = write_run(directory, [first, [nasty[1], branched("branch"), failed, *(group(f"h{n}", words, [0.5] * 4) for n in range(3))]])
    with Buffer(run / BUFFER_FILE) as buffer:
        buffer.prune(1, keep=0)
    return run


def test_a_page_works_from_a_file_and_by_keyboard(tmp_path: Path) -> None:
    pytest.importorskip("altair", reason="the extra report is not installed")
    pytest.importorskip("itables", reason="the extra report is not installed")
    pytest.importorskip("vl_convert", reason="the extra report is not installed")
    page = report_run(run_of(tmp_path / "run"))

    async def look(seen: Browser) -> None:
        await seen.until("document.querySelectorAll('.chart svg').length >= 2")
        await seen.until("document.querySelectorAll('table.dataTable').length >= 2")
        assert await seen.run("window.scrollY") == 0, "it opens at its top"
        sticky = "[...document.querySelectorAll('nav')].filter((one) => getComputedStyle(one).position === 'sticky').length"
        assert await seen.run(sticky) == 1, "the pages of a table have a nav, too, which must not cover the page's own"
        names = [name async for name in groups(seen)]
        assert len(set(names)) == len(names) >= 6
        await seen.press("n")
        await seen.press("p")
        await seen.until(f"document.querySelector('#where').textContent === {json.dumps(names[-2])}")
        await seen.run("document.querySelectorAll('#groups tbody tr')[0].click()")
        await seen.until(f"document.querySelector('#where').textContent === {json.dumps(names[0])}")
        assert await seen.run("document.querySelector('#which').textContent.startsWith('Sample 0')")
        await seen.press("j")
        assert await seen.run("document.querySelector('#which').textContent.startsWith('Sample 1')")
        assert await seen.run("document.querySelectorAll('.card.shown').length") == 1
        await seen.press("k")
        colours = []
        for key in "124":
            await seen.press(key)
            colours.append(await seen.run("[...document.querySelectorAll('.t')].map((one) => getComputedStyle(one).backgroundColor)"))
        assert len({str(colour) for colour in colours}) == 3, "each quantity has its colours"
        assert len(set(colours[2])) > 2 and len(set(colours[1])) == 2, "entropies differ; the advantage is that of trained tokens"
        assert "entropy 0.5" in await seen.run("document.querySelector('.t').title")
        assert await seen.run("document.querySelector('#positions canvas') !== null")
        await seen.run("document.querySelectorAll('#groups tbody tr')[1].click()")
        await seen.until(f"document.querySelector('#where').textContent === {json.dumps(names[1])}")
        assert await seen.run("getComputedStyle(document.querySelector('.t.masked')).opacity") == "0.65"
        # A page at twice the size still has no line beyond its window, but for tables and cards in boxes of their own.
        await seen.call("Emulation.setDeviceMetricsOverride", width=700, height=500, deviceScaleFactor=2, mobile=False)
        assert await seen.run("document.documentElement.scrollWidth <= 720")

    looked_at(page, tmp_path, look)


def test_text_stays_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the page without the extra, which is the same but for charts and sorting."""
    monkeypatch.setattr(page_module, "_charts", lambda: None)
    page = report_run(run_of(tmp_path / "run"))
    assert all(part not in page.read_text() for part in ("<script>alert", "<img src=x", "\x1b[31m", "\u202etxt"))

    async def look(seen: Browser) -> None:
        of = {name: f"document.querySelector('#{name}').textContent" for name in ("head", "cards", "turns")}
        of["tokens"] = "[...document.querySelectorAll('.t')].map((token) => token.textContent).join('')"
        parts: dict[str, list[str]] = {name: [] for name in of}
        async for _ in groups(seen):
            for name, expression in of.items():
                parts[name].append(str(await seen.run(expression)))
        visible = r"</script><script>alert(1)</script><img src=x onerror=alert(2)>&lt;b&gt; \x1b[31m \u202etxt.exe\u202c \x00 \u2028 <!--"
        for name, kind in (("head", "prompt"), ("cards", "answer"), ("turns", "answer"), ("tokens", "answer")):
            assert any(f"{visible} {kind}" in text for text in parts[name]), name
        assert any(f"broke {visible}" in text for text in parts["head"])
        assert any("text alone was kept" in text for text in parts["turns"])
        assert await seen.run("document.querySelectorAll('main img[src=x], main script').length") == 0
        refused = "addEventListener('securitypolicyviolation', (event) => done(event.violatedDirective))"
        asked = "fetch('http://127.0.0.1:9/').catch(() => 0); setTimeout(() => done('none'), 9000)"
        assert await seen.run(f"new Promise((done) => {{ {refused}; {asked} }})") == "connect-src"
        seen.complaints.clear()
        seen.requests.clear()

    looked_at(page, tmp_path, look)
