from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tensorgrad.errors import ArgumentError, DataError
from tensorgrad.io.readers import read_json_lines
from tensorgrad.train.log import StepLog, read_metrics, read_samples
from tests.disk import full_disk

RECORDS = [{"step": 0, "validation_loss": 5.0}] + [
    {"step": step, "loss": 5.0 / step} for step in range(1, 6)
]


def write(path: Path, step: int, records: list[dict[str, float]]) -> None:
    log = StepLog(path, step)
    for record in records:
        log.write(record)
    log.sync()
    log.close()


def test_a_resumed_log_equals_an_undisturbed_one(tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole.jsonl", tmp_path / "resumed.jsonl"
    write(whole, -1, RECORDS)
    write(resumed, -1, RECORDS[:5])
    with resumed.open("a") as file:
        file.write('{"step": 5, "lo')  # a kill in the middle of a line
    assert read_metrics(resumed) == RECORDS[:5]
    write(resumed, 2, RECORDS[3:])
    assert resumed.read_bytes() == whole.read_bytes()
    assert read_metrics(resumed) == RECORDS


def test_a_new_run_begins_with_an_empty_log(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, -1, RECORDS)
    write(path, -1, RECORDS[:1])
    assert read_metrics(path) == RECORDS[:1]


def test_a_line_without_its_end_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')
    write(path, 9, [{"step": 2}])
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_damaged_line_does_not_cost_those_after_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = ['{"step": 1}', '{"st\x00p": 2}', '{"step": "3"}', '{"step": 4}', '{"step": 5}']
    path.write_text("\n".join(lines) + "\n")
    write(path, 4, [{"step": 5, "loss": 1.0}])
    assert path.read_text() == "\n".join(lines[:4]) + '\n{"step": 5, "loss": 1.0}\n'
    assert [record["step"] for record in read_metrics(path)] == [1, 4, 5]


def test_a_full_disk_is_said_with_the_name_of_the_file(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "metrics.jsonl", -1, text=True)
    with full_disk(100):
        with pytest.raises(OSError, match=r"too large: '.*metrics\.jsonl'"):
            log.write({"step": 1, "text": "x" * 200})
        with pytest.raises(OSError, match=r"too large: '.*metrics\.jsonl'"):
            log.close()


def test_values_that_are_not_numbers_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    wrong = ['"x"', "[1]", "{}", "true", "NaN", "1e999", "9" * 5000, "[" * 100_000]
    lines = ['{"step": 1, "loss": null}', *(f'{{"step": 2, "loss": {one}}}' for one in wrong)]
    lines += ['{"step": true}', '{"step": 3, "step": 4}', "[1]", "\u00e4", '{"step": 5, "loss": 2}']
    path.write_text("\n".join([*lines, ""]), encoding="latin1")
    expected: list[dict[str, Any]] = [{"step": 1, "loss": None}, {"step": 5, "loss": 2}]
    assert read_metrics(path) == expected


@pytest.mark.parametrize(
    ("record", "text", "expected"),
    [
        ({"loss": 1.0}, False, "a step, numbers or None"),
        ({"step": 1, "loss": "a"}, False, "a step, numbers or None"),
        ({"step": True}, False, "a step, numbers or None"),
        ({"step": 1, "text": [1]}, True, "a step, numbers, text or None"),
    ],
)
def test_a_line_that_is_not_read_is_not_written(
    tmp_path: Path, record: dict[str, Any], text: bool, expected: str
) -> None:
    log = StepLog(tmp_path / "a.jsonl", -1, text)
    with pytest.raises(ArgumentError, match=rf"^a.jsonl: a line has {{.*}}, expected {expected}, "):
        log.write(record)
    log.write({"step": 1, "loss": None})
    log.close()
    assert (tmp_path / "a.jsonl").read_text() == '{"step": 1, "loss": null}\n'


def test_samples_have_text(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    texts = ["plain", "two\nlines", "für \u2028 \x00", "<script>"]
    samples = [{"step": n, "prompt": "a", "text": text} for n, text in enumerate(texts)]
    log = StepLog(path, -1, text=True)
    for sample in samples:
        log.write(sample)
    log.close()
    assert read_samples(path) == samples
    assert read_metrics(path) == []
    with path.open("a") as file:
        file.write('{"step": 4, "text": "no prompt"}\n{"step": 5, "prompt": ["a"], "text": "b"}\n')
    assert read_samples(path) == samples
    StepLog(path, 1, text=True).close()
    assert read_samples(path) == samples[:2]


def test_an_endless_line_takes_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    with path.open("ab") as file:
        file.truncate(1 << 25)  # zeros, which are not on the disk
    tracemalloc.start()
    try:
        assert read_metrics(path) == [{"step": 1}]
        assert tracemalloc.get_traced_memory()[1] < 1 << 23
    finally:
        tracemalloc.stop()


def test_a_hole_of_a_terabyte_is_refused_soon(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    reads: list[Callable[[], object]] = [
        lambda: read_metrics(path),
        lambda: StepLog(path, 1),
        lambda: list(read_json_lines(path)),
    ]
    for read in reads:
        os.truncate(path, 1 << 27)
        with pytest.raises(DataError, match=rf"{path} has a line of more than 67,108,864 bytes"):
            read()
        os.truncate(path, 1 << 40)
        with pytest.raises(DataError, match=rf"{path} has 1,.* bytes, of which .* on disk"):
            read()
    assert path.stat().st_size == 1 << 40


def test_a_fifo_or_device_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with pytest.raises(DataError, match=rf"cannot read {path}: No such file"):
        read_metrics(path)
    os.mkfifo(path)
    with pytest.raises(DataError, match=rf"{path} is a FIFO or a device"):
        read_metrics(path)
    with pytest.raises(DataError, match=rf"{path} is a FIFO or a device"):
        StepLog(path, -1)
