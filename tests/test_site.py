"""The site has every document and every public name; `make docs` builds it and checks its links."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.site_links import problems
from tests.source_tree import ROOT
from tests.test_docstrings import _public


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pages", ROOT / "docs" / "_ext" / "pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["pages"] = module  # its dataclass looks there
    spec.loader.exec_module(module)
    del sys.modules["pages"]
    return module


def test_every_document_is_in_the_contents(pages: ModuleType) -> None:
    on_disk = {path.relative_to(ROOT) for path in (ROOT / "docs").rglob("*.md")}
    listed = [Path(f"{name}.md") for part in pages.contents(ROOT).values() for name in part]
    assert len(listed) == len(set(listed))
    assert on_disk <= set(listed)


def test_every_public_name_has_an_entry_on_one_page(pages: ModuleType) -> None:
    entries = [value for page in pages.pages() for value in page.entries.values()]
    assert len(entries) == len(set(map(id, entries)))
    assert set(map(id, entries)) == set(map(id, _public("tensorgrad").values()))


def test_every_public_module_has_a_page(pages: ModuleType) -> None:
    import tensorgrad

    names = (f"tensorgrad.{name}" for name in tensorgrad.__all__)
    public = {name for name in names if isinstance(sys.modules.get(name), ModuleType)}
    assert {"tensorgrad", *public} <= {page.module for page in pages.pages()}


def test_every_page_that_answers_a_search_exists(pages: ModuleType) -> None:
    documents = {name for part in pages.contents(ROOT).values() for name in part}
    reference = {f"reference/{page.module}" for page in pages.pages()}
    for name, words in pages.searches(ROOT).items():
        assert name in documents | reference
        assert len(words) == len({word.lower() for word in words}) > 0, name
        assert not any("," in word or ";" in word for word in words), name  # they divide entries


@pytest.mark.parametrize(
    ("html", "problem"),
    [
        ('<a href="other.html#there">', ""),
        ('<a href="https://example.com/x">', ""),
        ('<img src="data:image/png;base64,">', ""),
        ('<p id="a"><a href="#a">', ""),
        ('<a href="#b">', "index.html links to #b, which has no such anchor"),
        ('<a href="other.html#b">', "index.html links to other.html#b, which has no such anchor"),
        ('<a href="lost.html">', "index.html links to lost.html, which does not exist"),
        ('<a href="..">', "index.html links to .., which does not exist"),
        ('<script src="//cdn.example.com/x.js">', "index.html fetches //cdn.example.com/x.js"),
        ('<link href="https://example.com/x">', "index.html fetches https://example.com/x"),
        ("<title>&lt;no title&gt; - x</title>", "index.html has no title"),
        ("<title>A page - x</title>", ""),
        ('<p style="background: url(http://e.com/x)">', "index.html fetches http://e.com/x"),
    ],
)
def test_links_of_a_site(html: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(html)
    (tmp_path / "other.html").write_text('<p id="there">')
    assert list(problems(tmp_path)) == [problem] * bool(problem)


def test_styles_of_a_site_fetch_nothing_from_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "index.html").touch()
    (tmp_path / "x.css").write_text("@font-face { src: url('https://example.com/x.woff') }")
    assert list(problems(tmp_path)) == ["x.css fetches https://example.com/x.woff"]
