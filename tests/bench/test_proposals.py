"""The products that `tensorgrad bench proposals` measures, and its table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from tensorgrad.bench import proposals
from tensorgrad.cli import main
from tensorgrad.core import backend
from tensorgrad.dtypes import float16, float32
from tensorgrad.io.readers import read_json
from tensorgrad.kernels.gpu import GpuMonitor
from tensorgrad.kernels.matmul import cublas
from tensorgrad.models.gpt2 import PRESETS


@pytest.mark.parametrize(("preset", "chunk"), [("gpt2-124M", 3328), ("gpt2-1558M", 3328)])
def test_products_are_those_of_a_step_but_the_two_with_gelu(preset: str, chunk: int) -> None:
    config = replace(PRESETS[preset], vocab_multiple=128)
    rows, width = 32 * 1024, config.width
    found = list(proposals.products(config, rows, float16, float32))
    block = [each for each in found if "logits" not in each.name]
    assert sum(each.rows * each.columns * each.terms for each in block) == 28 * rows * width**2
    head = [each for each in found if "logits" in each.name]
    assert [(each.rows, each.columns, each.terms) for each in head] == [
        (chunk, 50304, width), (chunk, width, 50304), (50304, width, chunk)
    ]  # fmt: skip
    assert [each.result for each in found if each.layout == "tn"] == [float32] * 5
    assert {each.result for each in found if each.layout != "tn"} == {float16}
    assert {each.operands for each in found} == {float16}


def test_a_case_has_the_rows_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proposals, "check_gpu", lambda name: None)
    sweep = next(proposals.proposals_sweep(batch=2))
    assert sweep.cases[0]["rows"] == 2 * 1024
    assert {case["result_dtype"] for case in sweep.cases} == {"bfloat16", "float32"}


class Plan(NamedTuple):
    """A kernel of cuBLASLt."""

    algorithm: bytes
    workspace: int = 0


def test_a_row_marks_what_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    product = next(proposals.products(PRESETS["gpt2-124M"], 1024, float16, float32))
    plans = [Plan(b"a"), Plan(b"b", 8)]
    found = [
        SimpleNamespace(tile=tile, plan=plan) for tile, plan in zip((209, 29), plans, strict=True)
    ]
    cublaslt = SimpleNamespace(proposals=lambda *_: found, prepare=lambda *_: plans[1])
    monkeypatch.setattr(proposals, "cublaslt", cublaslt)
    monkeypatch.setattr(proposals, "operands", lambda product, seed: None)
    monkeypatch.setattr(cublas, "described", lambda p: None)
    monkeypatch.setattr(proposals, "under_load", lambda call, seconds: 1.0)
    monkeypatch.setattr(proposals, "in_turns", lambda calls, turns: [0.63, 0.567])
    row = proposals.measure_product(product, 0.1, GpuMonitor(None))
    assert row["proposals"] == "192x192 1.000  128x160* split 0.900"
    assert row["us"] == pytest.approx(210)  # on three sets of operands
    assert row["taken_us"] == pytest.approx(189)


@pytest.mark.gpu
def test_every_proposal_of_a_small_model_is_measured(tmp_path: Path) -> None:
    command = ["bench", "proposals", "--batch", "1", "--seconds", "0.001", "--out"]
    assert main([*command, str(tmp_path / "out")]) == 0
    rows = read_json(tmp_path / "out" / "proposals.json")["rows"]
    assert len(rows) == 13
    for row in rows:
        assert row["status"] == "ok"
        assert row["proposals"].count("*") == 1
        assert row["proposals"].split("  ")[0].endswith(" 1.000")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--dtype float16 --grad-dtype bfloat16", "got bfloat16, expected float32 or float16"),
        ("--batch 0", "--batch: got 0, expected 1 or more"),
        ("--seconds 0", "--seconds: got 0.0, expected more than 0"),
    ],
)
def test_bad_options_are_named(
    options: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert main(["bench", "proposals", *options.split()]) == 1
    assert message in caplog.text


@pytest.mark.skipif(backend.gpu_count() > 0, reason="has a GPU")
@pytest.mark.parametrize("name", ["proposals", "decode"])
def test_without_a_gpu_it_says_so_and_exits_with_1(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert main(["bench", name]) == 1
    assert caplog.messages == [f"bench {name}: no GPU was found, expected one to measure on"]
