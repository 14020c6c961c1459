from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tensorgrad.bench import attention as bench
from tensorgrad.bench import memory
from tensorgrad.bench.attention import attention_sweep, draw_attention
from tensorgrad.bench.kernel_jobs import operations
from tensorgrad.bench.sweep import Row, run_sweep
from tensorgrad.errors import DtypeError
from tensorgrad.nn import ATTENTION_KERNELS


def test_operations_of_forward() -> None:
    assert operations((1, 2, 4, 8), causal=False) == 4 * 2 * 4 * 4 * 8
    assert operations((1, 2, 4, 8), causal=True) == 2 * 2 * 4 * 4 * 8


def test_every_kernel_is_measured(device: str, tmp_path: Path) -> None:
    dtype: Any = "float32" if device == "cpu" else "bfloat16"
    [found] = attention_sweep(lengths=(32, 17), widths=(16,), heads=2, dtype=dtype, device=device)
    cases = found.cases
    assert [case["length"] for case in cases] == [17] * 3 + [32] * 3
    result = run_sweep(found, tmp_path, device=device, version="1")
    for row in result.rows:
        assert row["status"] == "ok"
        assert min(row["forward_ms"], row["backward_ms"], row["both_ms"]) > 0
        assert row["peak_mb"] >= row["forward_mb"] > 0
        assert row["forward_tflops"] == pytest.approx(
            operations((1, 2, row["length"], 16), row["causal"]) / row["forward_ms"] / 1e9, rel=1e-3
        )
    names = {path.name for path in result.paths}
    assert (tmp_path / "attention.png").read_bytes().startswith(b"\x89PNG")
    assert names >= {"attention.png", "attention-memory.png", "attention-ratio.png"}


def test_flash_needs_less_memory_than_scores(device: str) -> None:
    given: Any = {"lengths": (256,), "widths": (16,), "heads": 4, "dtype": "float32"}
    [found] = attention_sweep(kernels=("unfused", "flash"), device=device, **given)
    unfused, flash = (found.measure(case)["peak_mb"] for case in found.cases)
    assert unfused > 5 * 4 * 256 * 256 * 4 / 1e6
    assert unfused > 2 * flash


def test_what_cannot_fit_is_not_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10_000_000)
    given: Any = {"lengths": (16, 4096), "widths": (16,), "heads": 1, "dtype": "float32"}
    [run] = attention_sweep(kernels=("unfused",), device="cpu", **given)
    found = run_sweep(run, tmp_path, device="cpu", version="1")
    assert [row["status"] for row in found.rows] == ["ok", "out of memory"]
    assert "needs at least 0.3 GB" in found.rows[1]["message"]


def test_pictures_of_sweeps_with_missing_cases() -> None:
    row: Row = {
        "kernel": "flash", "length": 128, "width": 64, "causal": True, "batch": 1, "heads": 2,
        "dtype": "float32", "device": "cpu", "forward_ms": 1.0, "backward_ms": 2.0,
        "both_ms": 3.0, "forward_mb": "", "peak_mb": "",
    }  # fmt: skip
    assert set(draw_attention([row])) == {"", "-memory"}
    other = {**row, "kernel": "unfused", "both_ms": 6.0}
    more = [row, other, {**other, "length": 256}, {**row, "causal": False}]
    assert set(draw_attention(more)) == {"", "-memory", "-ratio"}


def test_bad_arguments_are_errors() -> None:
    with pytest.raises(DtypeError):
        next(attention_sweep(dtype="float7", device="cpu"))  # type: ignore[arg-type]
    assert bench.PEER not in ATTENTION_KERNELS


@pytest.mark.gpu
def test_flash_is_faster_on_long_sequences() -> None:
    given: Any = {"lengths": (4096,), "widths": (64,), "device": "cuda"}
    [found] = attention_sweep(kernels=("unfused", "flash"), **given)
    unfused, flash = (found.measure(case)["both_ms"] for case in found.cases)
    assert unfused > 3 * flash
