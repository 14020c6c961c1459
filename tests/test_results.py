"""Documents show what results and code have, and each result names a commit that exists."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tensorgrad.bench import provenance
from tensorgrad.io.files import write_json
from tensorgrad.io.readers import read_json
from tests import figures
from tests.results import (
    BLOCK,
    RESULTS,
    documents,
    problems,
    rendered,
    speeds_without_source,
    without_source,
)

FENCE = re.compile(r"^```.*?^```$|`<!-- end -->`", re.DOTALL | re.MULTILINE)
RESULT = RESULTS / "overhead" / "overhead.json"


@pytest.mark.parametrize("page", documents(), ids=lambda path: str(path.name))
def test_a_document_is_as_rendered(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert rendered(text) == text, "run `python -m tests.results`"
    assert FENCE.sub("", text).count("<!-- end -->") == sum(
        begin != "" for begin, *_ in BLOCK.findall(text)
    )


@pytest.mark.parametrize("page", documents(), ids=lambda path: str(path.name))
def test_all_numbers_of_a_document_have_a_source(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert without_source(text) == []
    assert speeds_without_source(text) == []


def test_a_table_without_a_source_is_found() -> None:
    table = "| model | ms |\n|---|---|\n| 124M | 52.9 |\n"
    assert without_source(table) == ["model | ms"]
    assert without_source("| option | meaning |\n|---|---|\n| --batch | sequences |\n") == []
    begin = "<!-- table overhead/overhead.json show op -->"
    assert without_source(f"{begin}\n{table}\n<!-- end -->") == []
    assert without_source(f"<!-- code presets -->\n{table}\n<!-- end -->") == []


def test_a_speed_without_a_source_is_found() -> None:
    text = "It takes 52.9 ms and moves 3,010\nGB/s; `--most 5 ms` of 9 tokens, 2 MB.\n"
    assert speeds_without_source(text) == ["52.9 ms", "3,010\nGB/s"]
    value = "<!-- value overhead/overhead.json show forward_us -->1.2<!-- end --> us"
    assert speeds_without_source(value) == []


def test_tables_of_code_are_rendered_anew() -> None:
    text = "<!-- code {} -->\nold\n<!-- end -->"
    for name in ("presets", "bubbles"):
        block = rendered(text.format(name))
        assert block == f"<!-- code {name} -->\n\n{getattr(figures, name)()}\n<!-- end -->"
        assert rendered(block) == block
    assert "| gpt2-124M | 12 | 12 | 768 | 1,024 | 124,439,808 |" in figures.presets()
    assert f"| {100 * 3 / (8 + 3):.1f} % |" in figures.bubbles()  # (p - 1) / (m + p - 1)
    with pytest.raises(ValueError, match=r"got nothing, expected a function of tests/figures\.py"):
        rendered(text.format("nothing"))


@pytest.mark.skipif(not provenance.commit(), reason="the code is in no git checkout")
def test_results_are_of_commits_that_exist_and_agree() -> None:
    assert list(problems()) == []
    assert list(RESULTS.rglob("*.json"))


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(RESULT.parent, tmp_path / "overhead")
    return tmp_path


def changed(folder: Path, **values: Any) -> None:
    path = folder / "overhead" / "overhead.json"
    table = read_json(path)
    table["rows"][0] |= values
    write_json(path, table)


@pytest.mark.skipif(not provenance.commit(), reason="the code is in no git checkout")
@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"commit": "0123456789ab"}, "there is no commit 0123456789ab"),
        ({"commit": None}, "there is no commit None"),
        ({"forward_us": 0.1}, "the CSV beside it has another row"),
        ({"status": "error"}, ": error"),
    ],
)
def test_a_result_that_was_changed_by_hand_is_found(
    copy: Path, values: dict[str, Any], words: str
) -> None:
    assert list(problems(copy)) == []
    changed(copy, **values)
    assert any(words in each for each in problems(copy))


def test_results_that_disagree_or_have_no_csv_are_found(copy: Path) -> None:
    shutil.copytree(copy / "overhead", copy / "again")
    assert any("overhead/overhead.json: op add" in each and "again/overhead.json has this case too"
               in each for each in problems(copy))  # fmt: skip
    (copy / "again" / "overhead.csv").unlink()
    assert "again/overhead.json: there is no CSV beside it" in next(problems(copy))


def test_a_table_that_differs_is_rendered_anew(copy: Path) -> None:
    changed(copy, forward_us=0.12345, backward_us=None)
    begin = "<!-- table overhead/overhead.json where op=add show"
    columns = "op = ; forward_us:.2f = forward; forward_us/0.001:,.0f = ns; backward_us:.1f"
    text = f"a\n{begin} {columns} -->\nold\n<!-- end -->\nb"
    assert rendered(text, copy) == (
        f"a\n{begin} {columns} -->\n\n|  | forward | ns | backward_us |\n"
        "| --- | --- | --- | --- |\n| add | 0.12 | 123 |  |\n\n<!-- end -->\nb"
    )
    value = "<!-- value overhead/overhead.json where op=add and length=1000 show forward_us:.1f -->"
    assert rendered(f"{value}9<!-- end -->", copy) == f"{value}0.1<!-- end -->"
    assert rendered(rendered(text, copy), copy) == rendered(text, copy)
    line = rendered("<!-- source overhead/overhead.json --><!-- end -->", copy)
    assert f"commit {read_json(RESULT)['rows'][0]['commit']}, " in line


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ("table overhead/overhead.json where op=none show op", "no row where op=none"),
        ("table overhead/overhead.json show speed", "got the column speed, expected one of op"),
        ("table overhead/overhead.json show op forward", "expected NAME:FORMAT"),
        ("value overhead/overhead.json show op", "got several values, expected one"),
    ],
)
def test_a_wrong_block_is_an_error(block: str, words: str, copy: Path) -> None:
    with pytest.raises(ValueError, match=words):
        rendered(f"<!-- {block} --><!-- end -->", copy)


def test_a_table_of_two_commits_is_an_error(copy: Path) -> None:
    changed(copy, commit="0123456789ab")
    with pytest.raises(ValueError, match="several commits"):
        rendered("<!-- table overhead/overhead.json show op --><!-- end -->", copy)
