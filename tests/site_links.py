"""Check a built site: `python -m tests.site_links build/docs`, which `make docs` runs.

Every link to a file leads to one of the site, every `#anchor` to an element of its page, and no
page fetches anything from another host: scripts, styles, pictures, fonts. Every page has a title.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LINKS = {"a": "href", "area": "href"}  # followed by a reader; all else is fetched
FETCHED = {
    **dict.fromkeys(["audio", "embed", "iframe", "img", "script", "source", "track"], "src"),
    **{"link": "href", "object": "data", "video": "src"},
}
NO_TITLE = "<title>&lt;no title&gt;"  # Sphinx writes this for a page without a heading
URL = re.compile(r"""(?:url\(\s*|@import\s+)["']?([^"')\s]+)""")


class Page(HTMLParser):
    """The links of a page, the files that it fetches, its anchors, and whether it has a title."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.has_title = NO_TITLE not in text
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note the address and the anchor of an element."""
        values = {name: value for name, value in attrs if value}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if address := values.get(LINKS.get(tag, "")):
            self.links.append(address)
        if address := values.get(FETCHED.get(tag, "")):
            self.fetched.append(address)
        self.fetched += URL.findall(values.get("style", ""))


def problems(root: Path) -> Iterator[str]:
    """Yield what is wrong with the titles and links of a site."""
    root = root.resolve()
    pages = {p: Page(p.read_text(encoding="utf-8")) for p in sorted(root.rglob("*.html"))}
    if not pages:
        yield f"{root} has no pages"
    for path, page in pages.items():
        name = path.relative_to(root)
        if not page.has_title:
            yield f"{name} has no title"
        for address in page.fetched:
            if _is_remote(address):
                yield f"{name} fetches {address}"
        for address in dict.fromkeys(page.links + page.fetched):
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file() or not target.is_relative_to(root):
                yield f"{name} links to {address}, which does not exist"
            elif target in pages and not _has(pages[target], unquote(parts.fragment)):
                yield f"{name} links to {address}, which has no such anchor"
    for path in sorted(root.rglob("*.css")):
        for address in URL.findall(path.read_text(encoding="utf-8")):
            if _is_remote(address):
                yield f"{path.relative_to(root)} fetches {address}"


def _is_remote(address: str) -> bool:
    parts = urlsplit(address)
    return bool(parts.netloc) or parts.scheme not in ("", "data")


def _has(page: Page, anchor: str) -> bool:
    return not anchor or anchor in page.anchors


if __name__ == "__main__":
    found = list(problems(Path(sys.argv[1])))
    print(*found, sep="\n", file=sys.stderr, end="\n" if found else "")
    sys.exit(bool(found))
