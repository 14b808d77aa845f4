"""Open every kind of page in Chromium: `make browser`.

    python -m tests.report.browser [PAGE.html ...] [--layers N] [--output DIR]

Each page is opened at 1,280 and 390 pixels, light and dark. It must load nothing, print nothing on
the console, fit its window, break no number across lines, have the contrast of WCAG AA, be usable
by keyboard, and have the same texts without scripts. A search of a graph page must find lines. The
pages and screenshots are written to DIR.

PAGE.html: your own pages. Without them, pages are made of a run that is killed and resumed, of a
run with failures, of a store, of two packages and of three plans.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.report.browser_pages import pages
from tests.report.chromium import chromium, new_page
from tests.report.page_checks import keyboard, layout, search, seconds_to_show, without_script

from trainload.launching.node.cache import default_cache_dir

WIDTHS = (1280, 390)
SCHEMES = ("light", "dark")
_MOST_BYTES, _MOST_SECONDS, _MOST_SEARCH = 5_000_000, 5.0, 1000.0
"""Limits of a page: its size, the time until it is shown, and the milliseconds of a search."""


async def look(address: str, path: Path, output: Path) -> tuple[list[str], list[str]]:
    """Open a page in each width and color scheme. Return the problems and what was measured."""
    wrong: list[str] = []
    told: list[str] = [f"{path.stat().st_size:,} bytes"]
    async with new_page(address) as page:
        for width in WIDTHS:
            for scheme in SCHEMES:
                await page.open(path, width, scheme)
                await page.shoot(output / f"{path.stem}-{scheme}-{width}.png")
                found = await layout(page, width)
                await page.open(path, width, scheme)
                found += await keyboard(page)
                wrong += [f"{scheme}, {width}: {each}" for each in found]
        await page.open(path, WIDTHS[0], "light")
        seconds = await seconds_to_show(page)
        told.append(f"shown in {seconds:.2f} s")
        if await page.value("document.getElementById('search') !== null"):
            found, milliseconds, message = await search(page, "linear")
            wrong += found
            told.append(f"search in {milliseconds:.0f} ms: {message}")
            if milliseconds > _MOST_SEARCH:
                wrong.append("the search is slow")
            await page.shoot(output / f"{path.stem}-search.png", whole=False)
        for width in WIDTHS:
            wrong += await without_script(page, path, width)
        wrong += page.complaints(path.as_uri())
    if path.stat().st_size > _MOST_BYTES:
        wrong.append(f"it has {path.stat().st_size:,} bytes")
    if seconds > _MOST_SECONDS:
        wrong.append("it is shown late")
    return wrong, told


def browse(paths: Sequence[Path], output: Path) -> int:
    """Open pages in one Chromium, print what was found, and return the number of problems."""
    count = 0
    with chromium() as address:
        for path in paths:
            wrong, told = asyncio.run(look(address, path, output))
            sys.stdout.write(f"{path.stem}: {'; '.join(told)}\n")
            sys.stderr.write("".join(f"{path.stem}: {line}\n" for line in wrong))
            count += len(wrong)
    return count


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pages", nargs="*", type=Path)
    parser.add_argument(
        "--output", type=Path, default=default_cache_dir() / "browser", help="default: %(default)s"
    )
    parser.add_argument(
        "--layers", type=int, default=24, help="layers of the large model; default: %(default)s"
    )
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        paths = [path.absolute() for path in arguments.pages]
        if not paths:
            for name, text in pages(Path(scratch), arguments.layers):
                paths.append(arguments.output.absolute() / f"{name}.html")
                paths[-1].write_text(text, encoding="utf-8")
        count = browse(paths, arguments.output)
    sys.stdout.write(
        f"{len(paths)} pages, {len(paths) * len(WIDTHS) * len(SCHEMES)} screenshots in"
        f" {arguments.output}, {count} problems, {time.monotonic() - began:.0f} s\n"
    )
    sys.exit(1 if count else 0)


if __name__ == "__main__":
    main()
