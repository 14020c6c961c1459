from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from tensorgrad.cli.compare import compare as compare_command
from tensorgrad.errors import ArgumentError, DataError
from tensorgrad.report import Comparison, compare, to_csv, to_markdown, to_page, to_text
from tensorgrad.report.comparison import ComparedRow
from tests.report.made_run import ENVIRONMENT, make_run, write_lines
from tests.report.test_page import EVIL, Parsed


def rows(comparison: Comparison, section: str) -> dict[str, tuple[str, ...]]:
    return {row.name: row.texts for row in comparison.sections[section]}


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    """Return two runs that differ in learning rate, steps, driver and a package."""
    runs = [make_run(tmp_path / "a", lr=3e-3), make_run(tmp_path / "b", steps=40, lr=1e-3)]
    packages = {"numpy": "2.4.6", "cupy-cuda13x": "14.1.0"}
    change(runs[1] / "environment.json", driver="590.10", packages=packages, command=["other"])
    change(runs[1] / "config.json", out="runs/b")
    return runs


def test_only_what_differs_is_compared(two: list[Path]) -> None:
    found = compare(two)
    assert found.names == ("a", "b")
    assert rows(found, "Configuration") == {"steps": ("60", "40"), "lr": ("0.003", "0.001")}
    assert rows(found, "Environment") == {
        "packages.cupy-cuda13x": ("14.0.1", "14.1.0"),
        "driver": ("580.65", "590.10"),
    }
    result = rows(found, "Result")
    assert result["Status"] == ("finished: 60 steps", "finished: 40 steps")
    assert result["Steps"] == ("60", "40")
    assert result["Tokens"] == ("31,457,280", "20,971,520")
    assert result["Training time"] == ("54 s", "36 s")
    assert result["Tokens/s, mean"] == ("582,542", "582,542")
    assert result["Peak memory"] == ("38,212 MB", "38,212 MB")
    assert found.notes == ()


def test_the_best_value_is_marked_where_values_differ(tmp_path: Path) -> None:
    folders = []
    for name, loss in (("a", 2.0), ("b", 1.5), ("c", 1.50001)):
        (tmp_path / name).mkdir()
        write_lines(tmp_path / name / "metrics.jsonl", [{"step": 1, "validation_loss": loss}])
        folders.append(tmp_path / name)
    best = {row.name: set(row.best) for row in compare(folders).sections["Result"]}
    assert best["Final validation loss"] == {1, 2}  # the best as they are shown
    assert best["Steps"] == set()
    for folder, peak, mfu in zip(folders, (9, 8, 7), (0.5, 0.4, 0.3), strict=True):
        write_lines(folder / "times.jsonl", [{"step": 1, "peak_memory_mb": peak, "mfu": mfu}])
    (folders[1] / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    best = {row.name: set(row.best) for row in compare(folders).sections["Result"]}
    assert (best["Peak memory"], best["MFU, median"]) == ({2}, {0})
    assert best["Final validation loss"] == {2}
    assert best["Final training loss, smoothed"] == set()  # only one run has it
    best = {row.name: set(row.best) for row in compare(folders[1:]).sections["Result"]}
    assert best["Final validation loss"] == set()


def test_a_setting_that_one_run_lacks_is_a_difference(two: list[Path]) -> None:
    change(two[1] / "config.json", zero=1)
    assert rows(compare(two), "Configuration")["zero"] == ("-", "1")
    (two[0] / "environment.json").write_text('{"a": {"x": 1, "y": 2}, "c": [{"x": 1, "y": 2}]}')
    (two[1] / "environment.json").write_text(
        '{"a": {"y": 2, "x": 1}, "c": [{"y": 2, "x": 1}], "new": true}'
    )
    assert rows(compare(two), "Environment") == {"new": ("-", "true")}  # 3 of 4 are shared


def test_runs_that_do_not_differ(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"steps": 3}')
    (tmp_path / "a" / "environment.json").write_text('{"gpu": "none"}')
    (tmp_path / "a" / "metrics.jsonl").write_text('{"step": 1, "lo\n')
    found = compare([tmp_path / "a", tmp_path / "b"])
    assert list(found.sections) == ["Configuration", "Environment", "Result"]
    assert found.notes == (
        "a: metrics.jsonl: skipped 1 damaged line",
        "b: no environment.json to compare",
    )
    html = to_page(found)
    assert '<p class="quiet">Configuration: no differences</p>' in html
    assert '<p class="note">b: no environment.json to compare</p>' in html
    assert "No step has been logged." in html
    (tmp_path / "a" / "environment.json").unlink()
    assert list(compare([tmp_path / "a", tmp_path / "b"]).sections) == ["Configuration", "Result"]


def test_each_form_shows_all_rows_and_marks_the_best() -> None:
    best = ComparedRow("loss", ("1.0", "2.000"), frozenset({0}))
    found = Comparison(("a", "b" * 32), {"Result": [best], "Configuration": []}, ("a_1",), ())
    lines = [
        f"                  a      {'b' * 32}",
        "Result",
        "  loss            1.0 *  2.000",
        "Configuration",
        "  no differences",
        "",
        "note: a_1",
    ]
    assert to_text(found, 59).splitlines() == lines
    assert to_text(found, 58).splitlines() == [
        *("                  a", "Result", "  loss            1.0 *", "Configuration"),
        *("  no differences", ""),
        *(f"                  {'b' * 32}", "Result", "  loss            2.000", "Configuration"),
        *("  no differences", "", "note: a_1"),
    ]
    assert to_markdown(found).splitlines() == [
        f"| Result | a | {'b' * 32} |",
        "| --- | --- | --- |",
        "| loss | **1.0** | 2.000 |",
        "",
        f"| Configuration | a | {'b' * 32} |",
        "| --- | --- | --- |",
        "| no differences |  |  |",
        "",
        "a\\_1",
    ]


def test_runs_of_different_programs_compare_what_they_share(two: list[Path]) -> None:
    other = two[0].with_name("sentiment-1")
    other.mkdir()
    settings = {"steps": 5, "lr": 2.0, "seed": 0, "dropout": 0.5, "hidden": 64, "word_dropout": 0.1}
    (other / "config.json").write_text(json.dumps(settings))
    lines = [{"step": 5, "loss": 0.5}, {"step": 5, "validation_loss": 0.4, "accuracy": 0.8}]
    write_lines(other / "metrics.jsonl", lines)
    found = compare([two[0], other])
    assert rows(found, "Configuration") == {
        "steps": ("60", "5"),
        "lr": ("0.003", "2.0"),
        "dropout": ("0.0", "0.5"),
        "hidden": ("none", "64"),
    }
    assert rows(found, "Environment") == {}  # only one run has it
    result = rows(found, "Result")
    assert result["Accuracy"] == ("-", "0.8000")
    assert result["Tokens"][1] == "-"
    assert not any(row.best for row in found.sections["Result"])
    shared = json.loads((two[0] / "config.json").read_text()).keys() & settings.keys()
    count = len(json.loads((two[0] / "config.json").read_text()).keys() | settings.keys())
    assert found.notes == (
        f"not compared, since not all of these runs have them: {count - len(shared) - 1} settings",
        "sentiment-1: no environment.json to compare",
    )
    assert "figure" in Parsed(to_page(found)).tags


def test_wrong_runs_are_refused(two: list[Path]) -> None:
    with pytest.raises(ArgumentError, match="got 1 run, expected two or more"):
        compare(two[:1])
    with pytest.raises(ArgumentError, match="is given twice, expected different runs"):
        compare([*two, two[0] / ".." / "a"])
    circle = two[0].parent / "circle"
    circle.symlink_to("circle")
    for wrong in (two[0].parent, circle):
        with pytest.raises(DataError, match="expected the folder of a run"):
            compare([two[0], wrong])


def test_runs_of_the_same_name_are_called_by_their_paths(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / name / "run") for name in ("x", "y")]
    assert compare(folders).names == tuple(map(str, folders))


def test_the_table_on_a_terminal(two: list[Path]) -> None:
    lines = to_text(compare(two), 100).splitlines()
    assert lines[0].split() == ["a", "b"]
    assert lines[1:4] == [
        "Configuration",
        "  steps                          60                  40",
        "  lr                             0.003               0.001",
    ]
    assert "Environment" in lines
    assert max(map(len, lines)) < 100


def test_a_narrow_terminal_gets_a_table_for_each_run(two: list[Path]) -> None:
    third = make_run(two[0].with_name("a-very-long-name-of-a-run-that-has-to-be-cut"))
    text = to_text(compare([*two, third]), 60)
    assert text.count("Configuration") == 3
    assert "a-very-long-name-of-a-run-tha..." in text
    for width, tables in ((70, 3), (84, 2), (104, 2), (110, 1)):
        text = to_text(compare([*two, third]), width)
        assert (text.count("Configuration"), max(map(len, text.splitlines())) <= width) == (
            tables,
            True,
        )


def test_markdown_and_csv(two: list[Path]) -> None:
    found = compare(two)
    lines = to_markdown(found).splitlines()
    assert lines[:4] == [
        "| Configuration | a | b |",
        "| --- | --- | --- |",
        "| steps | 60 | 40 |",
        "| lr | 0.003 | 0.001 |",
    ]
    table = list(csv.DictReader(io.StringIO(to_csv(found))))
    assert [line["run"] for line in table] == ["a", "b"]
    assert [float(line["config.lr"]) for line in table] == [3e-3, 1e-3]
    assert table[0]["environment.git.commit"] == ENVIRONMENT["git"]["commit"]  # type: ignore[index]
    assert float(table[0]["result.tokens_per_second"]) == pytest.approx(524_288 / 0.9)
    assert table[1]["result.step"] == "40"
    assert table[0]["result.status"] == "finished: 60 steps"
    assert table[0]["environment.command"] == json.dumps(ENVIRONMENT["command"])
    assert (table[0]["config.dtype"], table[0]["config.preset"]) == ("bfloat16", "small")


def test_text_of_a_run_stays_text(two: list[Path]) -> None:
    evil = f"\x1b[31m|x`y*{EVIL}\n\r"
    change(two[1] / "config.json", data=evil)
    change(two[1] / "environment.json", gpu=evil)
    found = compare(two)
    terminal = to_text(found, 200)
    assert "\\x1b[31m" in terminal
    assert not {"\x1b", "\r", "\u202e"} & set(terminal)
    markdown = to_markdown(found)
    assert "<script>" not in markdown
    assert {line.replace("\\|", "").count("|") for line in markdown.splitlines() if line} == {4}
    page = Parsed(to_page(found))
    assert page.tags.count("script") == 2
    assert "img" not in page.tags
    assert list(csv.DictReader(io.StringIO(to_csv(found))))[1]["config.data"] == evil


def test_the_page_has_curves_of_all_runs(two: list[Path]) -> None:
    (two[1] / "times.jsonl").write_text('{"step": 40, "tokens": 9, "seconds": 9}\n')
    html = to_page(compare(two))
    assert '<td class="best">582,542 (best)</td><td>1</td>' in html
    page = Parsed(html)
    first = page.data["charts"][0]
    assert [(c["run"], c["color"], c["style"]) for c in first] == [
        *((0, 0, "line"), (0, 0, "markers"), (1, 1, "line"), (1, 1, "markers"))
    ]
    for text in ("a: training", "b: validation", "Tokens", "Elapsed time", "What differs"):
        assert text in page.text


def test_a_page_of_many_runs_is_small(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / f"run-{n}", steps=300, every=10, seed=n) for n in range(20)]
    text = to_page(compare(folders))
    assert len(text.encode()) < 3_000_000
    curves = [curve for chart in Parsed(text).data["charts"] for curve in chart]
    assert sum(len(curve["steps"]) for curve in curves) <= 75_000
    assert {curve["color"] for curve in curves} == set(range(8))


def test_the_command(two: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = [tmp_path / f"comparison.{end}" for end in ("html", "csv", "md")]
    assert compare_command(*two, out=places[0], csv=places[1], markdown=places[2]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[-3:]] == list(map(str, places))
    assert all(path.stat().st_size for path in places)
    with pytest.raises(ArgumentError, match=r"--csv: \S+ has the ending '.json', expected .csv"):
        compare_command(*two, csv=tmp_path / "a.json")


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r", " =", "\uff1d", "\n=", "\t@"])
def test_no_cell_of_a_csv_is_a_formula(tmp_path: Path, start: str) -> None:
    formula = f"{start}cmd|' /C calc'!A0"
    folders = [make_run(tmp_path / "a", data=formula), make_run(tmp_path / f"{start}b".strip())]
    (folders[1] / "environment.json").write_text(json.dumps({"gpu": formula, "x": -1.5}))
    rows = list(csv.reader(io.StringIO(to_csv(compare(folders)), newline="")))
    assert f"'{formula}" in rows[1]
    assert f"'{formula}" in rows[2]
    cells = [cell for row in rows for cell in row if cell != "-1.5"]
    assert "-1.5" in rows[2]
    assert not [cell for cell in cells if cell.strip()[:1] in tuple("=+-@\uff1d")]
