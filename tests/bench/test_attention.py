from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tensorgrad.bench import attention as bench
from tensorgrad.bench import memory, options
from tensorgrad.bench.attention import attention_sweep, draw_attention
from tensorgrad.bench.kernel_jobs import operations
from tensorgrad.bench.sweep import Row, run_sweep
from tensorgrad.errors import ArgumentError, DtypeError
from tensorgrad.nn import ATTENTION_KERNELS


def test_operations_of_forward() -> None:
    assert operations((1, 2, 4, 8), causal=False) == 4 * 2 * 4 * 4 * 8
    assert operations((1, 2, 4, 8), causal=True) == 2 * 2 * 4 * 4 * 8


@pytest.mark.parametrize(
    ("device", "largest", "dtype"), [("cpu", 1024, "float32"), ("cuda", 65536, "bfloat16")]
)
def test_the_default_cases(device: str, largest: int, dtype: str) -> None:
    cases = next(attention_sweep(device=device)).cases
    shared = {"causal": True, "batch": 1, "heads": 16, "dtype": dtype}
    assert list(cases[0].items()) == [
        *(("kernel", ATTENTION_KERNELS[0]), ("length", 128), ("width", 64)),
        *shared.items(),
    ]
    lengths = sorted({case["length"] for case in cases})
    assert (lengths[0], lengths[-1]) == (128, largest)
    assert all(long == 2 * short for short, long in pairwise(lengths))
    assert len(cases) == len(lengths) * 2 * len(ATTENTION_KERNELS)


def test_the_peer_is_a_kernel_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "find_spec", lambda name: object())
    cases = next(attention_sweep(lengths=(8,), widths=(4,), peer=True, device="cpu")).cases
    assert [case["kernel"] for case in cases] == [*ATTENTION_KERNELS, bench.PEER]
    monkeypatch.setattr(options, "find_spec", lambda name: None)
    with pytest.raises(ArgumentError, match="--peer: PyTorch is not installed"):
        next(attention_sweep(peer=True, device="cpu"))


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
        forward, backward = (
            row[f"{part}_ms"] * row[f"{part}_tflops"] for part in ("forward", "backward")
        )
        assert backward == pytest.approx(2.5 * forward, rel=1e-3)
        assert row["peak_mb"] < 1
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
    [run] = attention_sweep(kernels=("unfused", "fused-softmax"), device="cpu", **given)
    found = run_sweep(run, tmp_path, device="cpu", version="1")
    assert [row["status"] for row in found.rows] == ["ok", "ok", *["out of memory"] * 2]
    for row, matrices in zip(found.rows[2:], (5, 2), strict=True):
        assert f"needs at least {matrices * 4096**2 * 4 / 1e9:.1f} GB" in row["message"]


def test_pictures_of_sweeps_with_missing_cases() -> None:
    row: Row = {
        "kernel": "flash", "length": 128, "width": 64, "causal": True, "batch": 1, "heads": 2,
        "dtype": "float32", "device": "cpu", "forward_ms": 1.0, "backward_ms": 2.0,
        "both_ms": 3.0, "forward_mb": "", "peak_mb": "",
    }  # fmt: skip
    assert set(draw_attention([row])) == {"", "-memory"}
    other = {**row, "kernel": "unfused", "both_ms": 6.0}
    equal = {**other, "length": 512, "both_ms": 3.0}
    more = [row, other, {**other, "length": 256}, equal, {**equal, "kernel": "flash"}]
    figures = draw_attention(more)
    assert set(figures) == {"", "-memory", "-ratio"}
    forward, backward = figures[""].axes
    assert (forward.get_ylabel(), backward.get_ylabel()) == ("forward (ms)", "backward (ms)")
    assert forward.get_xlabel() == "sequence length (tokens)"
    [line, _] = backward.lines
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([128, 512], [2.0, 2.0])
    assert line.get_label() == "flash, 64"
    heat, _ = figures["-ratio"].axes
    assert heat.images[0].get_array().filled(-1).tolist() == [[2.0, -1.0, 1.0]]
    assert [(text.get_text(), text.get_color()) for text in heat.texts] == [
        *(("2.0", "black"), ("nan", "white"), ("1.0", "white"))
    ]
    assert [label.get_text() for label in heat.get_xticklabels()] == ["128", "256", "512"]
    assert [label.get_text() for label in heat.get_yticklabels()] == ["64"]
    assert figures["-ratio"].get_suptitle() == (
        "Attention: time of unfused / time of flash\n(causal True, batch 1, 2 heads, float32, cpu)"
    )


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
