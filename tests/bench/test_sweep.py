from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tensorgrad.bench import sweep as sweep_module
from tensorgrad.bench.pictures import new_figure, plot_lines
from tensorgrad.bench.sweep import (
    Case,
    Row,
    Sweep,
    SweepResult,
    like,
    run_sweep,
    to_markdown,
    together,
)
from tensorgrad.bench.timing import random_array, under_load
from tensorgrad.errors import ArgumentError, CommError, DataError
from tensorgrad.io.files import locked
from tensorgrad.io.readers import read_json
from tensorgrad.kernels.gpu import GpuMonitor
from tensorgrad.parallel.comm.collectives import Comm
from tests.ranks import run_ranks


def draw(rows: Sequence[Row]) -> dict[str, Any]:
    figure = new_figure(title="squares")
    plot_lines(figure.subplots(), rows, "n", "square", ("dtype",))
    return {"": figure}


def with_sum(row: Row, before: Sequence[Row]) -> Row:
    squares = [each["square"] for each in before if each["status"] == "ok"]
    return {**row, "sum": sum(squares) + row["square"]} if row["status"] == "ok" else row


FACTS = {"date": "2026-01-02", "commit": "12345678e012", "versions": "numpy 2.0"}
CASES: list[Case] = [{"n": n, "dtype": "int64"} for n in range(1, 5)]


def square(case: Case) -> Row:
    return {"square": case["n"] ** 2}


def squares(measure: Any = square, cases: Sequence[Case] = CASES) -> Sweep:
    return Sweep("squares", cases, measure, ("square", "sum"), draw, derive=with_sum)


def run(folder: Path, measure: Any = square, cases: Sequence[Case] = CASES) -> SweepResult:
    return run_sweep(squares(measure, cases), folder, device="cpu", version="1.2.3")


@pytest.fixture(autouse=True)
def _quick_pictures(monkeypatch: pytest.MonkeyPatch) -> None:  # drawn in tests of the benchmarks
    monkeypatch.setattr(sweep_module, "provenance", lambda: FACTS)
    monkeypatch.setattr(sweep_module, "save", lambda figure, path: path.write_bytes(b"PNG"))


def lines(folder: Path) -> list[dict[str, str]]:
    with (folder / "squares.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_sweep_writes_rows_a_table_and_a_picture(tmp_path: Path) -> None:
    found = run(tmp_path / "new" / "out")
    folder = tmp_path / "new" / "out"
    names = [f"squares.{kind}" for kind in ("csv", "md", "json", "png")]
    assert [path.name for path in found.paths] == names
    assert found == SweepResult(found.rows, 0, 0, found.paths, pictures=True)
    assert [row["sum"] for row in lines(folder)] == ["1", "5", "14", "30"]
    assert lines(folder)[0] == {
        "n": "1", "dtype": "int64", "square": "1", "sum": "1", "clock_mhz": "", "watts": "",
        "status": "ok", "message": "", "device": "cpu", "version": "1.2.3", **FACTS,
    }  # fmt: skip
    table = read_json(folder / "squares.json")
    assert (table["name"], table["parameters"]) == ("squares", ["n", "dtype"])
    assert table["rows"][3] == {
        "n": 4, "dtype": "int64", "square": 16, "sum": 30, "clock_mhz": None, "watts": None,
        "status": "ok", "message": None, "device": "cpu", "version": "1.2.3", **FACTS,
    }  # fmt: skip
    assert (folder / "squares.md").read_text() == (
        "dtype int64, device cpu\n\n| n | square | sum |\n| --- | --- | --- |\n"
        "| 1 | 1 | 1 |\n| 2 | 4 | 5 |\n| 3 | 9 | 14 |\n| 4 | 16 | 30 |\n"
        "\n2026-01-02, commit 12345678e012, tensorgrad 1.2.3, numpy 2.0\n"
    )


def test_rows_of_another_commit_are_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path)
    monkeypatch.setattr(sweep_module, "provenance", lambda: {**FACTS, "commit": "abc"})
    found = run(tmp_path, cases=CASES[:2])
    assert found.skipped == 0
    assert {row["commit"] for row in found.rows} == {"abc"}
    assert len(read_json(tmp_path / "squares.json")["rows"]) == 2
    assert len(lines(tmp_path)) == 6


def test_cases_that_differ_in_one_parameter_are_measured_together() -> None:
    asked: list[Case] = []

    def measure(case: Case) -> dict[int, Row]:
        asked.append(case)
        return {n: {"square": n * n} for n in range(5)}

    by_n = together("n", measure)
    assert [by_n(case)["square"] for case in CASES] == [1, 4, 9, 16]
    assert asked == [{"dtype": "int64"}]
    assert by_n({"n": 2, "dtype": "int8"}) == {"square": 4}
    assert asked[1:] == [{"dtype": "int8"}]


def test_rows_beside_a_row_have_its_values_device_and_commit() -> None:
    row: Row = {"n": 2, "kind": "a", "device": "cpu", "commit": "c", "status": "ok"}
    other = {**row, "kind": "b"}
    changed = ({"n": 3}, {"device": "gpu"}, {"commit": "d"}, {"status": "error"})
    rows = [row, *({**row, **each} for each in changed), other]
    assert like(row, rows, ("n", "kind")) == [row]
    assert like(row, rows, ("n",)) == [row, other]
    assert like({**row, "n": 2.0}, [row], ("n",)) == [row]  # the CSV's text


class Monitor(GpuMonitor):
    """The means of a GPU whose power rises by 100 watts with each look."""

    watts = 0

    def __init__(self) -> None:
        super().__init__(None)

    def take(self) -> dict[str, float]:
        self.watts += 100
        return {"gpu_utilization": 50, "watts": self.watts}


def test_rows_have_clock_and_power_of_what_was_measured(tmp_path: Path) -> None:
    def measure(case: Case) -> Row:
        if case["n"] == 2:
            return {"square": 4, "clock_mhz": 1600, "watts": 650}  # readings of a part of it
        if case["n"] == 3:
            raise ValueError("not measured")
        return square(case)

    run_sweep(squares(measure), tmp_path, device="cpu", version="1", monitor=Monitor())
    found = [(row["clock_mhz"], row["watts"]) for row in lines(tmp_path)]
    # A look before each case, whose readings do not count, and one after each that succeeds.
    assert found == [("", "200"), ("1600", "650"), ("", ""), ("", "700")]


@pytest.mark.gpu
def test_rows_of_a_busy_gpu_have_its_clock_and_power(tmp_path: Path) -> None:
    pytest.importorskip("pynvml", reason="needs nvidia-ml-py (pip install -e '.[cuda13]')")
    a = random_array((4096, 4096))

    def measure(case: Case) -> Row:
        under_load(lambda _: a @ a, 2)
        return square(case)

    with GpuMonitor(0, 0.05, busy=True) as monitor:
        found = run_sweep(
            squares(measure, CASES[:1]), tmp_path, device="gpu", version="1", monitor=monitor
        )
    assert found.rows[0]["clock_mhz"] > 100
    assert found.rows[0]["watts"] > 50


def test_ctrl_c_keeps_finished_rows_and_a_second_start_measures_the_rest(tmp_path: Path) -> None:
    def stopped(case: Case) -> Row:
        if case["n"] == 3:
            raise KeyboardInterrupt
        assert len(lines(tmp_path)) == case["n"] - 1  # each row is on disk at once
        return square(case)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, stopped)
    assert [row["n"] for row in lines(tmp_path)] == ["1", "2"]
    assert "| 2 | 4 | 5 |" in (tmp_path / "squares.md").read_text()
    assert (tmp_path / "squares.png").is_file()
    measured = []

    def measure(case: Case) -> Row:
        measured.append(case["n"])
        return square(case)

    found = run(tmp_path, measure)
    assert (measured, found.skipped) == ([3, 4], 2)
    assert [row["sum"] for row in found.rows] == [1, 5, 14, 30]


def test_an_unfinished_line_is_measured_again(tmp_path: Path) -> None:
    run(tmp_path, cases=CASES[:2])
    path = tmp_path / "squares.csv"
    path.write_text(path.read_text()[:-9])
    found = run(tmp_path)
    assert found.skipped == 1
    assert [row["n"] for row in lines(tmp_path)] == ["1", "2", "3", "4"]


def test_out_of_memory_is_a_row_and_memory_is_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OutOfMemoryError(RuntimeError):  # PyTorch's is no MemoryError either
        pass

    freed: list[None] = []
    monkeypatch.setattr(sweep_module, "release", lambda: freed.append(None))

    def measure(case: Case) -> Row:
        if case["n"] == 2:
            raise MemoryError("needs at least 9 GB,\n1 GB are free")
        if case["n"] == 3:
            raise OutOfMemoryError("CUDA error")
        return square(case)

    found = run(tmp_path, measure)
    assert [row["status"] for row in found.rows] == ["ok", *["out of memory"] * 2, "ok"]
    assert found.rows[1]["message"] == "needs at least 9 GB, 1 GB are free"
    assert (found.failed, len(freed)) == (0, 4)
    assert run(tmp_path).skipped == 4
    text = (tmp_path / "squares.md").read_text()
    assert "| 2 |  |  | out of memory | needs at least 9 GB, 1 GB are free |" in text


def test_other_errors_are_rows_that_are_measured_again(tmp_path: Path) -> None:
    def measure(case: Case) -> Row:
        if case["n"] == 2:
            raise ValueError(f"n | {'x' * 1000}")
        return square(case)

    found = run(tmp_path, measure)
    assert found.failed == 1
    assert [row["status"] for row in found.rows] == ["ok", "error", "ok", "ok"]
    assert len(found.rows[1]["message"]) == 300
    assert "n \\| x" in (tmp_path / "squares.md").read_text()
    again = run(tmp_path)
    assert (again.skipped, again.failed) == (3, 0)
    assert [row["n"] for row in lines(tmp_path)] == ["1", "3", "4", "2"]


def test_rows_of_other_cases_and_devices_stay_in_the_csv_only(tmp_path: Path) -> None:
    run(tmp_path)
    found = run_sweep(squares(cases=CASES[:1]), tmp_path, device="GPU", version="2")
    assert found.skipped == 0
    assert [(row["n"], row["device"]) for row in found.rows] == [(1, "GPU")]
    assert len(lines(tmp_path)) == 5


def test_bad_files_are_errors_that_name_them(tmp_path: Path) -> None:
    path = tmp_path / "squares.csv"
    for text, kind, words in (
        (b"n,square\n1,1\n", ArgumentError, "has the columns n, square, expected n, dtype"),
        (b"\xff\xfe\n", DataError, "not in UTF-8"),
        (b'"n,dtype\n', DataError, "expected a CSV of an earlier sweep"),
    ):
        path.write_bytes(text)
        with pytest.raises(kind, match=words):
            run(tmp_path)
        assert path.read_bytes() == text
    with pytest.raises(ArgumentError, match="no cases"):
        run(tmp_path, cases=[])
    path.write_bytes(b"")
    assert run(tmp_path).skipped == 0


def test_one_process_writes_to_a_folder(tmp_path: Path) -> None:
    with locked(tmp_path / ".lock", wait=False), pytest.raises(ArgumentError, match="is in use"):
        run(tmp_path)


def test_results_are_columns(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="got results \\['cube'\\]"):
        run(tmp_path, lambda case: {"square": 1, "cube": 1})


def test_without_matplotlib_there_is_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    found = run(tmp_path)
    assert not found.pictures
    assert [path.name for path in found.paths] == ["squares.csv", "squares.md", "squares.json"]


def test_numbers_of_a_table_have_one_format() -> None:
    results = "value", "percent"
    sweep = Sweep("table", [{"n": 1024}], square, results, draw, percents=("percent",))
    values = {
        52471.23: "52,471", 142815: "142,815", 3053.0: "3,053", 1234567.0: "1,234,570",
        -65868.4: "-65,868", 999.96: "1,000", 999.94: "999.9", 12.3456: "12.35", 7.0: "7",
        0.0312345: "0.03123", 0.00003: "3e-05", 0: "0",
    }  # fmt: skip
    for value, words in values.items():
        row: Row = dict.fromkeys(sweep.columns, "")
        row |= {"n": 1024, "value": value, "device": "cpu", "status": "ok"}
        written = sweep_module._numbers({k: sweep_module._text(v) for k, v in row.items()})
        last = to_markdown(sweep, [{**written, "percent": -2.765e-05}]).splitlines()[-1]
        assert last.startswith(f"| 1,024 | {words} | 0.00 |"), last


def test_settings_above_a_table_have_the_format_of_the_table(tmp_path: Path) -> None:
    cases = [{"n": n, "tokens": 65536, "causal": True} for n in (1, 2)]
    sweep = Sweep("table", cases, square, ("square",))
    run_sweep(sweep, tmp_path, device="cpu", version="1")
    text = (tmp_path / "table.md").read_text()
    assert text.startswith("tokens 65,536, causal True, device cpu\n")


def test_a_table_without_rows() -> None:
    assert to_markdown(squares(), []) == "no rows\n"


def test_ranks_that_are_elsewhere_are_asked_three_times() -> None:
    class Elsewhere(Comm):
        answers_at, asked = 3, 0

        def all_gather_objects(self, value: Any) -> list[Any]:
            self.asked += 1
            if self.asked < self.answers_at:
                raise CommError("another call")
            return [value]

    comm = Elsewhere()
    assert sweep_module._of_all_ranks(comm, ["ok"]) == [["ok"]]
    assert comm.asked == 3
    comm.answers_at = 9
    with pytest.raises(CommError, match="another call"):
        sweep_module._of_all_ranks(comm, ["ok"])
    assert comm.asked == 6


@pytest.mark.mpi
def test_a_case_that_fails_on_one_rank_is_a_row_and_the_others_follow(tmp_path: Path) -> None:
    run_ranks(Path(__file__).with_name("sweep_ranks.py"), 2, [tmp_path])
    assert (tmp_path / "lopsided.md").exists()
