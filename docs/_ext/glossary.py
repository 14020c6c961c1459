"""The terms of the glossary, and the first use of each in a text.

An entry is a section of docs/reference/glossary.md. Its title is a form of the term, unless it says
in parentheses which meaning of a common word it has; a line "Also: a, b." has other forms. In a
text the first letter may be of either case, and an s may follow.

Needs no Sphinx. Tests: tests/test_reference.py.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator

PAGE = "docs/reference/glossary"
FOLDERS = ("docs/guides/", "docs/how-to/", "docs/chapters/")


class Terms:
    """The terms of a glossary.

    Args:
        text: the page, in Markdown.

    Attributes:
        titles: the title of the entry of each form.
        pages: the page that explains a term, by the title of its entry.
    """

    def __init__(self, text: str) -> None:
        _, *parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
        self.titles: dict[str, str] = {}
        self.pages: dict[str, str] = {}
        for title, entry in zip(parts[::2], parts[1::2], strict=True):
            also = re.match(r"\s*Also: ([^.]+)\.", entry)
            forms = [title] * ("(" not in title) + (re.split(r",\s+", also[1]) if also else [])
            for form in forms:
                self.titles[_folded(form)] = title
            self.pages[title] = _page_of(entry)
        longest = sorted(self.titles, key=len, reverse=True)
        words = "|".join(map(_pattern_of, longest))
        self._pattern = re.compile(rf"(?<![\w-])({words})s?(?![\w-])")

    def uses(self, text: str, used: set[str]) -> Iterator[tuple[int, int, str]]:
        """Yield start, end and title of the first use of each term; add the titles to `used`."""
        for match in self._pattern.finditer(text):
            title = self.titles[_folded(match[1])]
            if title not in used:
                used.add(title)
                yield match.start(), match.end(), title


def _page_of(entry: str) -> str:
    link = re.search(r"\]\(([^)#]+)\.md", entry)
    return posixpath.normpath(posixpath.join(posixpath.dirname(PAGE), link[1])) if link else ""


def _folded(form: str) -> str:
    form = " ".join(form.split())
    return form[0].lower() + form[1:]


def _pattern_of(form: str) -> str:
    words = r"\s+".join(map(re.escape, form.split()))  # they may be on two lines
    return f"[{re.escape(form[0] + form[0].upper())}]{words.removeprefix(re.escape(form[0]))}"
