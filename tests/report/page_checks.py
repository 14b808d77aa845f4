"""Checks of a page that is open in Chromium."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.report.chromium import Page

_FUNCTIONS = Path(__file__).with_name("page_checks.js").read_text(encoding="utf-8")
_MOST_STOPS = 60
"""Elements that `keyboard` goes to."""


async def call(page: Page, function: str, *arguments: Any) -> Any:
    """Call a function of page_checks.js in a page and return its result."""
    spelled = ", ".join(map(json.dumps, arguments))
    return await page.value(f"(() => {{ {_FUNCTIONS}; return checks.{function}({spelled}); }})()")


async def layout(page: Page, width: int) -> list[str]:
    """Check the width, numbers, words, contrast and headings, as opened and with all details
    open.
    """
    wrong = []
    for state in ("as opened", "with all details open"):
        across = await page.value("document.documentElement.scrollWidth")
        if across > width:
            wrong.append(f"{state}, the page is {across} wide")
        if broken := await call(page, "brokenNumbers"):
            wrong.append(f"{state}, {len(broken)} numbers break across lines: {broken[:5]}")
        if broken := await call(page, "brokenWords"):
            wrong.append(f"{state}, {len(broken)} words break across lines: {broken[:5]}")
        if low := await call(page, "lowContrast"):
            wrong.append(f"{state}, {len(low)} texts have too little contrast: {low[:5]}")
        await call(page, "openAll")
    levels = await call(page, "headings")
    if levels.count(1) != 1 or any(after > before + 1 for before, after in pairwise(levels)):
        wrong.append(f"headings are out of order: {levels}")
    return wrong


async def keyboard(page: Page) -> list[str]:
    """Check that Tab reaches everything that can be used, with a visible focus, and that Enter
    opens and closes details.
    """
    wrong = []
    stops = min(await call(page, "focusable"), _MOST_STOPS)
    reached: set[int] = set()
    is_toggled = False
    for _ in range(stops):
        await page.press("Tab")
        focused = await call(page, "focused")
        if focused is None:
            break
        reached.add(focused["place"])
        if not focused["isVisible"]:
            wrong.append(f"the focus of element {focused['place']} is not visible")
        if focused["opens"] is not None and not is_toggled:
            is_toggled = True
            for expected in (not focused["opens"], focused["opens"]):
                await page.press("Enter")
                if (await call(page, "focused"))["opens"] is not expected:
                    wrong.append("Enter does not open and close details")
    if len(reached) < stops:
        wrong.append(f"Tab reaches {len(reached)} of {stops} elements")
    return wrong


async def without_script(page: Page, path: Path, width: int) -> list[str]:
    """Check that the page has the same texts without scripts, shows no search, and can be used."""
    texts = "document.querySelector('main').textContent"
    await page.open(path, width, "light")
    expected = await page.value(texts)
    await page.open(path, width, "light", script=False)
    wrong = []
    if await page.value(texts) != expected:
        wrong.append("it has other texts")
    if await page.value("document.querySelector('.search')?.checkVisibility() ?? false"):
        wrong.append("it shows a search")
    return [f"without scripts, {each}" for each in (*wrong, *await keyboard(page))]


async def search(page: Page, wanted: str) -> tuple[list[str], float, str]:
    """Search a graph page by keyboard. Return the problems, the milliseconds of a search, and the
    page's message about what was found.
    """
    wrong = []
    await page.press("Tab")
    if await page.value("document.activeElement.id") != "search":
        wrong.append("the first stop of Tab is not the search")
    everything = await call(page, "modulesShown")
    await page("Input.insertText", text=wanted)
    message = str(await page.value("document.getElementById('found').textContent"))
    modules = await call(page, "modulesShown")
    lines, matching = await call(page, "linesShown", wanted)
    if not (0 < modules < everything and 0 < matching == lines and "match" in message):
        wrong.append(
            f"a search for {wanted} shows {modules} of {everything} modules, and {lines} lines, of"
            f" which {matching} match: {message}"
        )
    await call(page, "search", "")
    if await call(page, "modulesShown") != everything:
        wrong.append("an empty search does not show everything again")
    return wrong, await call(page, "search", wanted), message


async def seconds_to_show(page: Page) -> float:
    """Return the seconds until the page was loaded and laid out."""
    return float(await call(page, "secondsToShow"))
