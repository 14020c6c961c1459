from __future__ import annotations

import csv
import io
from pathlib import Path

from tensorgrad.io.tables import to_csv, to_markdown, write_text


def test_markdown_has_a_rule_for_each_column_and_no_bar_inside_a_cell() -> None:
    text = to_markdown(["op", "ms"], [["a|b", "1.5"], ["c", ""]], numbers=1)
    assert text == "| op | ms |\n| --- | --: |\n| a\\|b | 1.5 |\n| c |  |\n"


def test_csv_quotes_every_kind_of_line_break() -> None:
    rows = [["name", "text"], ["a,b", 'x"y'], ["cr\rlf\n", ""]]
    text = to_csv(rows)
    assert text.startswith('name,text\n"a,b","x""y"\n')
    assert list(csv.reader(io.StringIO(text, newline=""))) == rows


def test_text_that_is_not_utf8_is_written(tmp_path: Path) -> None:
    write_text(tmp_path / "a.txt", "é\udce9")
    assert (tmp_path / "a.txt").read_bytes() == "é?".encode()
