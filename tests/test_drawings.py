"""The drawings of the chapters are those of tests/drawings.py, and each chapter shows its own."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from tests.drawings import DRAWINGS, FOLDER, tile_kinds
from tests.excerpts import LANGUAGES
from tests.results import BLOCK
from tests.svg import WIDTH, Drawing

NAME = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_drawing_is_up_to_date(name: str) -> None:
    written = (FOLDER / f"{name}.svg").read_text(encoding="utf-8")
    assert written == DRAWINGS[name]().svg(), "run python -m tests.drawings"


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_chapter_shows_its_drawing_with_words_for_it(name: str) -> None:
    text = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
    (words,) = re.findall(rf"!\[([^]]*)\]\({name}\.svg\)", text)
    assert len(words) > 40


@pytest.mark.parametrize("page", sorted(FOLDER.glob("*.md")), ids=lambda page: str(page.stem))
def test_a_chapter_has_a_drawing_and_an_excerpt(page: Path) -> None:
    assert page.stem in DRAWINGS
    text = page.read_text(encoding="utf-8")
    kinds = [match[2] for match in BLOCK.finditer(text)]
    assert "excerpt" in kinds
    assert set(LANGUAGES.values()) & set(re.findall(r"^```(\w+)$", text, re.MULTILINE))


def test_a_drawing_is_svg_with_text_on_a_panel() -> None:
    d = Drawing("a < b", 40)
    d.box(10, 4, 60, 20, "a < b")
    d.line((10, 30), (50, 30))
    root = ElementTree.fromstring(d.svg())
    assert root.get("viewBox") == f"0 0 {WIDTH} 40"
    assert [text.text for text in root.iter(f"{NAME}text")] == ["a < b"]
    panel = next(root.iter(f"{NAME}rect"))
    assert (panel.get("width"), panel.get("height")) == (str(WIDTH), "40")


def test_words_that_do_not_fit_are_an_error() -> None:
    d = Drawing("title", 40)
    with pytest.raises(ValueError, match="title: 'words' at 350, 20 is outside"):
        d.text(350, 20, "words")
    with pytest.raises(ValueError, match=r"title: \('many words',\) does not fit 20 x 20"):
        d.box(10, 10, 20, 20, "many words")
    with pytest.raises(ValueError, match=r"the box .* is outside"):
        d.box(10, 30, 20, 20)


def test_tiles_of_a_causal_mask() -> None:
    assert tile_kinds(4, 4, 2, 2).tolist() == [[1, 0], [2, 1]]
    assert tile_kinds(4, 6, 2, 2).tolist() == [[2, 1, 0], [2, 2, 1]]  # the last queries
    kinds = tile_kinds(8, 8, 1, 1)
    np.testing.assert_array_equal(kinds > 0, np.tri(8, dtype=bool))
