"""Look at a built site in Chromium: `python -m tests.site_browser build/docs/VERSION`.

Each page at three widths, light and dark, and printed: nothing is wider than the page, cut off or
upon something else, and nothing comes from another host. Each search leads to its page.
Needs Playwright and a Chromium (the group `browser`), and takes some minutes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tqdm import tqdm

from tests.source_tree import ROOT

SEARCHES = ROOT / "docs" / "searches.json"  # by page: what leads there
WIDTHS = {"phone": 390, "tablet": 820, "screen": 1400}
PAPER = 718  # A4 between margins of 1 cm, at 96 dots an inch
SHOWN = ("index", "docs/guides/training", "docs/chapters/attention", "reference/tensorgrad.ops")

# A function that lists the faults of the page as it is drawn now.
LAYOUT = r"""(printed) => {
    const problems = [];
    const root = document.documentElement;
    if (root.scrollWidth > root.clientWidth)
        problems.push(`is ${root.scrollWidth - root.clientWidth} px too wide`);
    const shown = (text) => JSON.stringify(text.trim().replace(/\s+/g, " ").slice(0, 40));
    const styles = new Map();
    const style = (element) => {
        if (!styles.has(element)) styles.set(element, getComputedStyle(element));
        return styles.get(element);
    };
    const clips = printed ? /auto|scroll|hidden|clip/ : /hidden|clip/;
    const article = document.querySelector("article") || document.body;
    for (const element of article.querySelectorAll("*")) {
        const excess = element.scrollWidth - element.clientWidth;
        if (excess > 1 && element.clientWidth > 1 && clips.test(style(element).overflowX))
            problems.push(`cuts ${excess} px off ${shown(element.textContent)}`);
    }
    const rows = new Map();
    const walker = document.createTreeWalker(article, NodeFilter.SHOW_TEXT);
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
        const parent = node.parentElement;
        if (!node.data.trim() || parent.closest("math, svg, script, style")) continue;
        const {visibility, position} = style(parent);
        if (visibility === "hidden" || position === "absolute") continue;
        const range = document.createRange();
        range.selectNodeContents(node);
        for (const box of range.getClientRects()) {
            let [left, right] = [box.left, box.right];
            for (let e = parent; e !== article && e; e = e.parentElement) {
                if (!/auto|scroll/.test(style(e).overflowX)) continue;
                const frame = e.getBoundingClientRect();
                [left, right] = [Math.max(left, frame.left), Math.min(right, frame.right)];
            }
            if (right - left < 1) continue;
            const row = Math.floor(box.top / 40);
            for (const near of [row - 1, row, row + 1])
                for (const other of rows.get(near) || [])
                    if (Math.min(right, other.right) - Math.max(left, other.left) > 3 &&
                        Math.min(box.bottom, other.bottom) - Math.max(box.top, other.top) > 6)
                        problems.push(`draws ${shown(node.data)} upon ${shown(other.text)}`);
            if (!rows.has(row)) rows.set(row, []);
            rows.get(row).push({left, right, top: box.top, bottom: box.bottom, text: node.data});
        }
    }
    return [...new Set(problems)].slice(0, 5);
}"""


def layouts(page: Any, address: str) -> Iterator[tuple[str, list[str]]]:
    """Draw a page in each way; yield the way and what is wrong."""
    page.goto(address)
    for colors in ("light", "dark"):
        page.emulate_media(media="screen", color_scheme=colors)
        for name, width in WIDTHS.items():
            page.set_viewport_size({"width": width, "height": 1000})
            yield f"{name}, {colors}", page.evaluate(LAYOUT, False)
    page.emulate_media(media="print", color_scheme="light")
    page.set_viewport_size({"width": PAPER, "height": 1000})
    yield "printed", page.evaluate(LAYOUT, True)


def search(page: Any, address: str, words: str) -> list[str]:
    """Return the pages of the first three results of a search."""
    page.goto(f"{address}/search.html?q={quote(words)}")
    page.wait_for_function(
        "Search.output && !document.querySelector('#search-progress')?.innerText.includes('...') "
        "&& /finished|did not match/i.test(document.querySelector('#search-results').innerText)"
    )
    links = page.eval_on_selector_all("#search-results li a", "all => all.map(a => a.href)")
    pages = [link.removeprefix(f"{address}/").partition(".html")[0] for link in links]
    return list(dict.fromkeys(pages))[:3]


def problems(site: Path, shots: Path | None) -> Iterator[str]:
    """Yield what a reader of the site would stumble over."""
    from playwright.sync_api import sync_playwright

    address = site.resolve().as_uri()
    names = sorted(p.relative_to(site).as_posix() for p in site.rglob("*.html"))
    names = [name for name in names if not name.startswith("_modules/")]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        page = browser.new_page()
        fetched: set[str] = set()
        page.on("request", lambda request: fetched.add(request.url))
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(f"{page.url}: {error}"))
        for name in tqdm(names, "pages"):
            for way, found in layouts(page, f"{address}/{name}"):
                yield from (f"{name} ({way}) {problem}" for problem in found)
                if shots and name.removesuffix(".html") in SHOWN:
                    file = f"{name.removesuffix('.html')}-{way}".replace("/", "-")
                    page.screenshot(path=shots / f"{file.replace(', ', '-')}.png")
        page.emulate_media(media="screen")
        wanted: dict[str, set[str]] = {}
        for name, searches in json.loads(SEARCHES.read_text()).items():
            for words in searches:
                wanted.setdefault(words, set()).add(name)
        for words, right in tqdm(wanted.items(), "searches"):
            found = search(page, address, words)
            if not right & set(found):
                yield f"a search for {words!r} leads to {found}, expected one of {sorted(right)}"
        other = (url for url in sorted(fetched) if not url.startswith(("file:", "data:")))
        yield from (f"fetches {url}" for url in other)
        # Sphinx's search fetches pages for their excerpts, which no browser allows on a disk.
        failed = (error for error in errors if not error.endswith("Failed to fetch"))
        yield from (f"a script fails: {error}" for error in failed)
        browser.close()


def main() -> None:
    """Print what is wrong, and exit with 1 if anything is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("site", type=Path, help="the folder of a version")
    parser.add_argument("--shots", type=Path, help="write pictures of some pages to this folder")
    options = parser.parse_args()
    found = 0
    for problem in problems(options.site, options.shots):
        tqdm.write(problem, file=sys.stderr)
        found += 1
    sys.exit(found > 0)


if __name__ == "__main__":
    main()
