"""The bookkeeping of tables, with events made by hand."""

from __future__ import annotations

import csv
from dataclasses import replace

import pytest

from tensorgrad.profile.ceilings import Ceilings
from tensorgrad.profile.recording import Kernel, Range, clipped, intersection, length, union
from tensorgrad.profile.tables import (
    Table,
    TableRow,
    attention_split,
    busy_times,
    kernel_table,
    layer_kind,
    layer_table,
    op_table,
    short_name,
    to_csv,
    to_markdown,
)
from tests.profile.steps import Step, made


def step(number: int, start: int, end: int) -> Range:
    return Range(number, -1, "phase", "step", start, end)


def op(number: int, parent: int, name: str, start: int, end: int, **facts: object) -> Range:
    known = {"phase": "forward", "dtype": "float32", **facts}
    return Range(number, parent, "op", name, start, end, **known)  # type: ignore[arg-type]


def total(table: Table) -> float:
    return sum(row.seconds for row in table.rows)


def test_intervals() -> None:
    assert union([(5, 7), (0, 2), (1, 3), (7, 8), (9, 9)]) == [(0, 3), (5, 8)]
    assert intersection([(0, 3), (5, 8)], [(2, 6), (7, 20)]) == [(2, 3), (5, 6), (7, 8)]
    assert clipped([(0, 3), (5, 8)], (2, 6)) == [(2, 3), (5, 6)]
    assert length([(0, 3), (5, 8)]) == 6


def test_on_the_cpu_ops_and_gaps_are_the_step() -> None:
    recording = made(
        *(step(0, 0, 1000), step(1, 1000, 2000)),
        *(op(2, 0, "matmul", 100, 500, flops=2e3), op(3, 0, "matmul", 500, 700, flops=2e3)),
        op(4, 1, "exp", 1200, 1400, nbytes=800),
        Range(5, 1, "phase", "optimizer", 1500, 1900),
        op(6, -1, "exp", 0, 2000, thread=1),  # another thread
        op(7, 1, "exp", 1900, 2100),  # which ends after the steps
    )
    recording = replace(recording, window=(0, 2000))
    table = op_table(recording)
    assert table.step == pytest.approx(1e-6)
    rows = {row.name: row for row in table.rows}
    assert rows["matmul"].seconds == pytest.approx(300e-9)
    assert rows["matmul"].calls == 1
    assert rows["matmul"].mean == pytest.approx(300e-9)
    assert rows["matmul"].flops_per_second == pytest.approx(4e3 / 600e-9)
    assert rows["exp"].bytes_per_second == pytest.approx(800 / 200e-9)
    assert rows["optimizer"].fraction == pytest.approx(0.2)
    assert rows["optimizer"].phase == "optimizer"
    assert {row.dtype for row in table.rows} == {"float32", ""}
    assert busy_times(recording) == [(100, 700), (1200, 1400), (1500, 2000)]
    assert table.gaps == pytest.approx(350e-9)
    assert (table.steps, table.title) == (2, "op")
    assert [row.name for row in table.rows] == ["matmul", "optimizer", "exp"]


def test_an_op_inside_another_counts_once() -> None:
    recording = made(
        step(0, 0, 1000),
        Range(1, 0, "backward", "checkpoint(f)", 100, 900),
        Range(2, 1, "layer", "layer", 200, 800),
        op(3, 2, "exp", 300, 600),
    )
    table = op_table(recording)
    assert {row.name: round(row.seconds * 1e9) for row in table.rows} == {
        "checkpoint(f)": 500,
        "exp": 300,
    }
    assert total(table) + table.gaps == pytest.approx(table.step)
    assert table.overlap == pytest.approx(0)


def test_kernels_on_two_streams_and_gaps_are_the_step() -> None:
    recording = made(
        step(0, 0, 300),
        op(1, 0, "linear", 10, 20, flops=6e3, nbytes=60),
        op(2, 0, "gelu", 20, 30),
        Range(3, 0, "phase", "all-reduce", 30, 40),
        kernels=(
            Kernel("gemm", 100, 300, 0, 0, 1),
            Kernel("reduce", 300, 400, 0, 0, 1),
            Kernel("gelu", 450, 500, 0, 0, 2),
            Kernel("ncclAllReduce", 350, 480, 1, 0, 3),
            Kernel("memset", 900, 1000, 0, 0, -1),
        ),
        source="cupti",
    )
    for table in (op_table(recording), kernel_table(recording), layer_table(recording)):
        assert table.step == pytest.approx(1e-6)  # the GPU ends after the host
        assert table.busy == pytest.approx(500e-9)
        assert table.overlap == pytest.approx((50 + 30) * 1e-9)
        assert total(table) - table.overlap + table.gaps == pytest.approx(table.step)
    ops = {row.name: row for row in op_table(recording).rows}
    assert ops["linear"].seconds == pytest.approx(300e-9)
    assert ops["linear"].flops == pytest.approx(6e3)
    assert ops["memset"].seconds == pytest.approx(100e-9)
    kernels = {row.name: row for row in kernel_table(recording).rows}
    assert kernels["gemm"].flops == pytest.approx(4e3)  # by time
    assert kernels["gemm"].nbytes == pytest.approx(40)


def test_events_of_an_op_inside_another_count_once() -> None:
    recording = made(
        step(0, 0, 1000),
        Range(1, 0, "backward", "checkpoint(f)", 0, 10),
        op(2, 1, "exp", 2, 4),
        kernels=(Kernel("exp", 200, 300, 0, 0, 2), Kernel("checkpoint(f)", 100, 900, 0, 0, 1)),
        source="events",
    )
    table = op_table(recording)
    assert {row.name: round(row.seconds * 1e9) for row in table.rows} == {
        "checkpoint(f)": 700,
        "exp": 100,
    }
    assert total(table) + table.gaps == pytest.approx(table.step)


def test_the_table_of_a_real_step_sums_up() -> None:
    recording = Step().recorded(2).recording
    for table in (op_table(recording), layer_table(recording)):
        assert total(table) + table.gaps == pytest.approx(table.step, rel=1e-6)
        assert 0 <= table.gaps < table.step
    assert table.steps == 2
    rows = {(row.name, row.phase): row for row in op_table(recording).rows}
    assert rows["attention_packed", "backward"].calls == 2
    names = {row.name for row in layer_table(recording).rows}
    assert {"blocks.*.attention", "blocks.*.feed_forward", "norm"} <= names


def test_nothing_recorded() -> None:
    table = op_table(made(step(0, 0, 0)))
    assert (table.rows, table.step, table.gaps) == ([], 0, 0)
    assert "gaps" in to_markdown(table)
    assert to_csv(table).count("\n") == 3


def test_softmax_against_matrix_products_inside_attention() -> None:
    inside = {"layer": "blocks.0.attention"}
    recording = made(
        step(0, 0, 1000),
        op(1, 0, "matmul", 0, 100, **inside),
        op(2, 0, "softmax", 100, 400, **inside),
        Range(3, 0, "backward", "softmax", 400, 500, phase="backward", **inside),  # type: ignore[arg-type]
        op(4, 0, "swapaxes", 500, 510, **inside),
        op(6, 0, "exp", 510, 520, **inside),
        op(5, 0, "linear", 600, 900, layer="blocks.0.attention.qkv"),
    )
    found = {name: round(1e9 * each) for name, each in attention_split(recording).items()}
    assert found == {"matrix products": 100, "softmax": 410, "layout": 10}


def test_text_of_a_table() -> None:
    recording = made(
        step(0, 0, 1000),
        op(1, 0, "matmul", 0, 500, flops=500.0, nbytes=100),
        op(2, 0, "a|b", 500, 600, nbytes=10),
        op(3, 0, "rare", 600, 601),
    )
    table = op_table(recording)
    text = to_markdown(table, Ceilings(1e9, {"float32": 2e9}), 2)
    lines = text.splitlines()
    assert len({line.replace(r"\|", "").count("|") for line in lines}) == 1
    assert "| matmul | forward | 1 | 0.001 | 50.0 | 0.5 | 0.2 (20 %) | 0.001 (50 %) |" in lines
    assert r"a\|b" in text
    assert "*1 more*" in text
    assert "*gaps* |  |  | 0.000 | 39.9 |" in text
    rows = list(csv.DictReader(to_csv(table).splitlines()))
    assert [row["op"] for row in rows] == ["matmul", "a|b", "rare", "(overlap)", "(gaps)"]
    assert float(rows[0]["fraction"]) == 0.5
    assert {len(row) for row in rows} == {11}


def test_the_csv_has_every_figure() -> None:
    rows = [
        TableRow("linear", "backward", 1.5, 3e-3, 0.25, 6e9, 9e6, "bfloat16"),
        TableRow("step", "", 0, 0, 0, 5, 5, ""),
    ]
    assert (rows[1].mean, rows[1].bytes_per_second, rows[1].flops_per_second) == (0, 0, 0)
    table = Table("op", rows, 2, 12e-3, 9e-3, 1e-3)
    assert to_csv(table).splitlines() == [
        "op,phase,calls,ms,fraction,mean_us,gb_per_s,tflop_per_s,flops,bytes,dtype",
        "linear,backward,1.5,3.0000,0.2500,2000.00,3.0,2.000,6000000000,9000000,bfloat16",
        "step,,0,0.0000,0.0000,0.00,0.0,0.000,5,5,",
        "(overlap),,,-1.0000,-0.0833,,,,,,",
        "(gaps),,,3.0000,0.2500,,,,,,",
    ]
    assert to_markdown(table).splitlines()[2:] == [
        "| linear | backward | 1.5 | 3.000 | 25.0 | 2000.0 | 3 | 2 |",
        "| step |  | 0 | 0.000 | 0.0 | 0.0 |  |  |",
        "| *overlap of streams* |  |  | -1.000 | -8.3 |  |  |  |",
        "| *gaps* |  |  | 3.000 | 25.0 |  |  |  |",
        "| *step* |  |  | 12.000 | 100.0 |  |  |  |",
    ]
    many = Table("op", [rows[0]] * 31, 1, 1, 1, 0)
    assert to_markdown(many).splitlines()[-3].startswith("| *1 more* |  |  | 3.000 | 0.3 |")


def test_ranges_that_are_work() -> None:
    kinds = {
        (kind, name): Range(0, -1, kind, name, 0, 1)
        for kind in ("phase", "layer", "op", "backward")
        for name in ("step", "optimizer")
    }
    work = {key for key, each in kinds.items() if each.is_work}
    assert {key for key, each in kinds.items() if each.is_op} == work - {("phase", "optimizer")}
    assert work == {("phase", "optimizer"), *(k for k in kinds if k[0] in ("op", "backward"))}
    assert made(*kinds.values()) == made(*kinds.values())
    assert "_by_number" not in repr(made(*kinds.values()))


def test_names() -> None:
    assert layer_kind("blocks.11.attention.qkv") == "blocks.*.attention.qkv"
    assert layer_kind("layers.3") == "layers.*"
    assert layer_kind("") == "(no layer)"
    assert short_name("void softmax_forward<float>(float*, int)") == "softmax_forward<float>"
    assert short_name("gemm<(Mode)1>(Args<(int)2>)") == "gemm<(Mode)1>"
    assert short_name("x" * 80) == "x" * 80
    assert short_name("x" * 81) == "x" * 77 + "..."
