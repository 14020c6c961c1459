from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tensorgrad.bench import memory, model
from tensorgrad.bench.model import draw_model, measure_model, model_sweep, planned_bytes
from tensorgrad.bench.steps import settings_of
from tensorgrad.bench.sweep import Case, Row, Sweep, SweepResult, run_sweep
from tensorgrad.errors import ArgumentError
from tensorgrad.train.settings import DTYPES

TINY: dict[str, Any] = {"layers": 2, "width": 16, "heads": 2, "context": 8, "batch": 2, "vocab": 64}


def cases_of(**options: Any) -> list[Case]:
    return list(next(model_sweep(device="cpu", **options)).cases)


def measured(sweep: Sweep, device: str, folder: Path) -> SweepResult:
    return run_sweep(sweep, folder, device=device, version="1")


def test_the_five_sizes() -> None:
    cases = cases_of(precision=("float32",))
    counts = [settings_of(case)[1].parameters / 1e9 for case in cases]
    # nearly those of the published GPT-2s, and 2.7B with 32 layers of C 2560, with 10,000 tokens
    assert counts == pytest.approx([0.093, 0.313, 0.722, 1.493, 2.544], abs=0.005)


def test_the_default_case() -> None:
    assert cases_of()[0] == {
        "size": "small", "width": 768, "layers": 12, "heads": 12, "context": 512, "batch": 4,
        "vocab": 10000, "attention": "flash", "dtype": "float32", "recompute": False,
        "captured": False, "warmup": 5, "steps": 10,
    }  # fmt: skip
    dtypes = [case["dtype"] for case in cases_of(sizes=("xl", "small", "xl"))]
    assert dtypes == ["float32", "bfloat16", "bfloat16-parameters"] * 2


def test_a_row_has_means_and_deviations_after_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(((9.0, 9.0, 9.0), (1.0, 2.0, 3.0), (3.0, 2.0, 3.0)))
    monkeypatch.setattr(model, "phases", lambda device, *calls: next(seconds))
    [case] = cases_of(sizes=("small",), precision=("float32",), warmup=(1,), steps=2, **TINY)
    assert model.times(case, "cpu") == {
        "forward_ms": 2e3, "forward_std": 1e3, "backward_ms": 2e3, "backward_std": 0.0,
        "optimizer_ms": 3e3, "optimizer_std": 0.0, "step_ms": 7e3, "step_std": 1e3,
    }  # fmt: skip


def test_attention_that_keeps_scores_is_not_planned() -> None:
    [case] = cases_of(sizes=("small",), precision=("float32",), attention="unfused", **TINY)
    assert planned_bytes(case) is None
    row = measure_model({**case, "warmup": 0, "steps": 1}, "cpu")
    assert row["parameters"] == settings_of(case)[1].parameters
    assert row["tokens_per_second"] == pytest.approx(16e3 / row["step_ms"])
    assert "step_planned_mb" not in row


def test_pictures_of_warm_up_are_drawn_where_it_differs() -> None:
    [case] = cases_of(sizes=("small",), precision=("float32",), warmup=(2,), **TINY)
    parts = ("forward", "backward", "optimizer", "step")
    row: Row = {**case, "device": "cpu", **{f"{part}_std": 0.5 for part in parts}}
    row |= {f"{part}_ms": float(number) for number, part in enumerate(parts, 1)}
    row |= {name: 5.0 for name in ("forward_mb", "step_mb", "forward_planned_mb")}
    row["step_planned_mb"] = 8.0
    figures = draw_model([row])
    assert {name: axes.get_ylabel() for name, [axes] in axes_of(figures)} == {
        "": "ms", "-memory": "MB"
    }  # fmt: skip
    [axes] = figures[""].axes
    assert [bar.get_height() for bar in axes.patches] == [1, 2, 3, 4]
    [axes] = figures["-memory"].axes
    assert [bar.get_height() for bar in axes.patches] == [5, 5, 5, 8]
    assert figures["-memory"].get_suptitle() == "GPT-2: peak memory (batch 2, context 8), cpu"
    figures = draw_model([{**row, "warmup": 0, "step_ms": 9.0}, row])
    [line] = figures["-warmup"].axes[0].lines
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([0, 2], [9, 4])
    assert figures["-warmup"].axes[0].get_xscale() == "linear"
    assert len(figures[""].axes[0].patches) == 4  # the largest warm-up alone


def axes_of(figures: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(name, figure.axes) for name, figure in figures.items()]


def test_phases_precisions_and_warmup(device: str, tmp_path: Path) -> None:
    sweep = next(model_sweep(sizes=("small",), warmup=(0, 1), steps=2, device=device, **TINY))
    assert len(sweep.cases) == 6
    found = measured(sweep, device, tmp_path)
    for row in found.rows:
        assert row["status"] == "ok"
        phases = sum(row[f"{phase}_ms"] for phase in ("forward", "backward", "optimizer"))
        assert phases == pytest.approx(row["step_ms"], rel=1e-3)
        assert row["step_mb"] > row["forward_mb"] > 0
        assert row["step_planned_mb"] > 0
    names = [path.name for path in found.paths]
    assert names[3:] == ["model.png", "model-memory.png", "model-warmup.png"]


def test_a_captured_step_is_timed_as_a_whole(device: str, tmp_path: Path) -> None:
    options = {**TINY, "captured": True, "warmup": (0, 2), "steps": 2}
    precision: Any = ("float32", "float16")
    sweep = next(model_sweep(sizes=("small",), precision=precision, device=device, **options))
    found = measured(sweep, device, tmp_path)
    for row in found.rows:
        assert row["status"] == "ok"
        assert row["step_ms"] > 0
        assert row["forward_ms"] == row["backward_ms"] == row["optimizer_ms"] == ""
        assert row["tokens_per_second"] == pytest.approx(16e3 / row["step_ms"], rel=1e-3)
    assert [path.name for path in found.paths if path.suffix == ".png"]


@pytest.mark.parametrize(
    ("recompute", "dtype"),
    [
        (False, "float32"),
        (False, "bfloat16"),
        (False, "bfloat16-parameters"),
        (True, "bfloat16"),
        (True, "bfloat16-parameters"),
        pytest.param(True, "float32", marks=pytest.mark.nightly),
        *(pytest.param(again, "tf32", marks=pytest.mark.nightly) for again in (False, True)),
    ],
)
def test_memory_is_near_the_formula(
    recompute: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # each thread has a workspace of its own
    monkeypatch.setattr(model, "times", lambda *arguments: {"step_ms": 1.0})  # memory alone
    sizes: dict[str, Any] = {
        "sizes": ("small",),
        "layers": 8,
        "width": 256,
        "heads": 4,
        "context": 128,
        "batch": 2,
        "vocab": 500,
    }
    [case] = cases_of(precision=(dtype,), warmup=(0,), recompute=recompute, steps=1, **sizes)
    fixed = 16 * settings_of(case)[1].parameters  # bytes, whatever the precision
    monkeypatch.setattr(memory, "free_bytes", lambda device: fixed)  # no less is refused
    row = measure_model(case, "cpu")
    assert row["step_ratio"] == pytest.approx(1, abs=0.05)
    # NumPy needs more workspace, and converts 16-bit weights to float32 to multiply with them.
    above = 0.25 if dtype == "bfloat16-parameters" else 0.15
    assert 0.95 < row["forward_ratio"] < 1 + above


def test_memory_that_a_gpu_needed_is_near_the_formula() -> None:
    # bfloat16-parameters with whole master weights, whose halves take 2 bytes a parameter less
    halves = 2 * settings_of(cases_of(sizes=("small",))[0])[1].parameters / 1e6
    measured = {
        "float32": (467.1, 2837), "bfloat16": (614.5, 2447),
        "bfloat16-parameters": (233.6, 2363 - halves),
    }  # fmt: skip
    for case in cases_of(sizes=("small",), precision=tuple(measured)):
        planned = planned_bytes(case)
        assert planned is not None
        forward, step = measured[case["dtype"]]
        assert planned["forward"] / 1e6 == pytest.approx(forward, rel=0.005)
        assert planned["step"] / 1e6 == pytest.approx(step, rel=0.005)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_of_a_gpu_is_near_the_formula(dtype: str) -> None:
    [case] = cases_of(sizes=("small",), precision=(dtype,), warmup=(1,), steps=2)
    row = measure_model(case, "cuda")
    assert row["step_ratio"] == pytest.approx(1, abs=0.05)
    assert row["forward_ratio"] == pytest.approx(1, abs=0.05)


def test_recomputation_is_planned_to_need_less() -> None:
    plain, again = (
        planned_bytes(case)
        for again in (False, True)
        for case in cases_of(sizes=("small",), precision=("float32",), recompute=again)
    )
    assert plain is not None
    assert again is not None
    assert again["step"] < plain["step"]
    assert again["forward"] == plain["forward"]


def test_what_cannot_fit_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10**9)
    [case] = cases_of(sizes=("xl",), precision=("float32",))
    with pytest.raises(MemoryError, match="needs at least 23"):
        measure_model(case, "cpu")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"precision": ["int8"]}, "--dtype: got 'int8'"),
        ({"batch": 0}, "--batch: got 0"),
        ({"heads": 7}, "expected a multiple of heads, 7"),
    ],
)
def test_bad_arguments_are_errors(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        cases_of(**arguments)
