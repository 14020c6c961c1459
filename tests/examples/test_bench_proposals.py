"""The products that `examples.bench.proposals` measures, and its table."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from examples.bench import proposals
from tensorgrad import backend
from tensorgrad.dtypes import float16, float32
from tensorgrad.models.gpt2 import PRESETS
from tests.source_tree import ROOT


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


def test_a_line_marks_what_is_taken() -> None:
    line: dict[str, Any] = {
        "name": "qkv", "rows": 8192, "columns": 4800, "terms": 1600, "layout": "nt", "us": 210.0,
        "clock_mhz": 1581.9, "watts": 690.8,
        "proposals": [
            {"tile": "192x192", "workspace": 0, "ratio": 1.0, "taken": False},
            {"tile": "128x160", "workspace": 8, "ratio": 0.9, "taken": True},
        ],
    }  # fmt: skip
    ways = "192x192 1.000  128x160* split 0.900"
    assert proposals.to_text(line).split("us  ")[1] == f"1582 MHz, 691 W  {ways}"
    del line["clock_mhz"], line["watts"]  # without nvidia-ml-py
    assert proposals.to_text(line).split("us  ")[1].split() == ways.split()


@pytest.mark.gpu
def test_every_proposal_of_a_small_model_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "proposals.json"
    options = ["--preset", "gpt2-124M", "--batch", "1", "--seconds", "0.001", "--json", str(path)]
    assert proposals.main(options) == 0
    lines = json.loads(path.read_text())
    assert len(lines) == 13
    for line in lines:
        assert sum(each["taken"] for each in line["proposals"]) == 1
        assert line["proposals"][0]["ratio"] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--dtype float16 --grad-dtype bfloat16", "got bfloat16, expected float32 or float16"),
        ("--batch 0", "--batch, --seconds: got 0 and 0.3, expected more than 0"),
        ("--seconds 0", "--batch, --seconds: got 32 and 0.0, expected more than 0"),
    ],
)
def test_bad_options_are_named(
    options: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert proposals.main(options.split()) == 1
    assert message in caplog.text


@pytest.mark.skipif(backend.gpu_count() > 0, reason="has a GPU")
def test_without_a_gpu_it_says_so_and_exits_with_1() -> None:
    program = [sys.executable, "-m", "examples.bench.proposals"]
    ended = subprocess.run(program, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr == "proposals: no GPU was found, expected one to measure on\n"
