"""Training here and in PyTorch gives the same losses; the benchmark sees where it does not."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.bench import loss_curve

pytest.importorskip("torch", reason="PyTorch is not installed")

SIZES = {"layers": 1, "heads": 2, "width": 16, "context": 16, "vocab": 64}
GIVEN = {"steps": 24, "batch": 4, "window": 5, "lr": 1e-2, "device": "cpu"}


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    follows = np.random.default_rng(0).permutation(64)
    tokens = np.zeros(2000, np.uint16)
    for i in range(1, len(tokens)):
        tokens[i] = follows[tokens[i - 1]]
    np.save(tmp_path / "tokens.npy", tokens)
    words = [word for name, value in (SIZES | GIVEN).items() for word in (f"--{name}", str(value))]
    return ["--data", str(tmp_path / "tokens.npy"), "--out", str(tmp_path / "out"), *words]


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "out" / "loss_curve.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("dtype", "most"), [("float32", 1e-5), ("bfloat16", 0.01), ("bfloat16-parameters", 0.02)]
)
def test_both_learn_the_same(
    dtype: str, most: float, options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert loss_curve.main([*options, "--dtype", dtype, "--most", str(most)]) == 0
    found = rows(tmp_path)
    assert [int(row["step"]) for row in found] == list(range(1, 25))
    assert float(found[0]["tensorgrad"]) == pytest.approx(math.log(64), abs=0.1)
    assert float(found[-1]["pytorch"]) < math.log(64) - 0.5
    assert float(found[0]["lr"]) == 1e-2 > float(found[-1]["lr"])
    assert (tmp_path / "out" / "loss_curve.png").read_bytes().startswith(b"\x89PNG")
    assert f"expected {most:g} or less" in capsys.readouterr().out


def test_another_training_is_an_error(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At 3 % more of a learning rate in PyTorch, and where a loss is not finite."""
    step = loss_curve.peer_step

    def faster(*arguments: Any, **others: Any) -> Any:
        take = step(*arguments, **others)
        return lambda x, y, lr: take(x, y, 1.03 * lr)

    monkeypatch.setattr(loss_curve, "peer_step", faster)
    assert loss_curve.main([*options, "--dtype", "float32", "--most", "1e-3"]) == 1
    monkeypatch.setattr(loss_curve, "peer_step", lambda *_, **__: lambda x, y, lr: math.nan)
    assert loss_curve.main([*options, "--dtype", "float32"]) == 1
    assert "nan" in capsys.readouterr().out


def test_finished_steps_are_kept(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stops(x: Any, y: Any, lr: float) -> float:
        stops.calls += 1  # type: ignore[attr-defined]
        if stops.calls == 13:  # type: ignore[attr-defined]
            raise KeyboardInterrupt
        return 1.0

    stops.calls = 0  # type: ignore[attr-defined]
    monkeypatch.setattr(loss_curve, "peer_step", lambda *_, **__: stops)
    assert loss_curve.main(options) == 130
    assert len(rows(tmp_path)) == 12


def test_bad_arguments_are_one_line(
    options: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    np.save(tmp_path / "high.npy", np.full(100, 70, np.uint16))
    for more, message in (
        (["--data", str(tmp_path / "high.npy")], "70"),
        (["--data", str(tmp_path / "none.npy")], "cannot read"),
        (["--window", "25"], "--window: got 25, expected 1 to --steps, 24"),
    ):
        assert loss_curve.main([*options, *more]) == 1
        assert message in caplog.records[-1].getMessage()
