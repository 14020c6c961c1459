"""Training here and in PyTorch gives the same losses; the benchmark sees where it does not."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorgrad.bench import loss_curve
from tensorgrad.cli import main
from tensorgrad.io.readers import read_json

pytest.importorskip("torch", reason="PyTorch is not installed")

SIZES = {"layers": 1, "heads": 2, "width": 16, "context": 16, "vocab": 64}
GIVEN = {"steps": 24, "batch": 4, "window": 5, "lr": 1e-2, "device": "cpu"}


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    follows = np.random.default_rng(0).permutation(64)
    tokens = np.zeros(2000, np.uint16)
    for i in range(1, len(tokens)):
        tokens[i] = follows[tokens[i - 1]]
    np.save(tmp_path / "tokens.npy", tokens)
    words = [word for name, value in (SIZES | GIVEN).items() for word in (f"--{name}", str(value))]
    return ["bench", "loss", "--data", "tokens.npy", "--out", "out", *words]


def found(folder: Path) -> dict[str, Any]:
    [row] = read_json(folder / "out" / "loss.json")["rows"]
    return dict(row)


@pytest.mark.parametrize(
    ("dtype", "most"), [("float32", 1e-5), ("bfloat16", 0.01), ("bfloat16-parameters", 0.02)]
)
def test_both_learn_the_same(dtype: str, most: float, options: list[str], tmp_path: Path) -> None:
    assert main([*options, "--dtype", dtype, "--most", str(most)]) == 0
    row = found(tmp_path)
    curves = [
        [float(x) for x in row[f"{name}_losses"].split()] for name in ("tensorgrad", "pytorch")
    ]
    assert [len(each) for each in curves] == [24, 24]
    assert curves[0][0] == pytest.approx(math.log(64), abs=0.1)
    assert curves[1][-1] < math.log(64) - 0.5
    assert row["pytorch"] == pytest.approx(sum(curves[1][-5:]) / 5, rel=1e-4)
    assert 0 <= row["largest_difference"] <= most
    assert (tmp_path / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_another_training_is_an_error(
    options: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """At 3 % more of a learning rate in PyTorch, and where a loss is not finite."""
    step = loss_curve.peer_step

    def faster(*arguments: Any, **others: Any) -> Any:
        take = step(*arguments, **others)
        return lambda x, y, lr: take(x, y, 1.03 * lr)

    monkeypatch.setattr(loss_curve, "peer_step", faster)
    assert main([*options, "--dtype", "float32", "--most", "1e-3"]) == 1
    assert f"differ by {found(tmp_path)['largest_difference']} nats" in caplog.text
    monkeypatch.setattr(loss_curve, "peer_step", lambda *_, **__: lambda x, y, lr: math.nan)
    assert main([*options, "--dtype", "float32", "--out", "other"]) == 1
    assert "running means differ by nan nats, expected 0.03 or less" in caplog.text


def test_an_interrupted_run_says_how_to_go_on(
    options: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def stops(x: Any, y: Any, lr: float) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(loss_curve, "peer_step", lambda *_, **__: stops)
    assert main(options) == 130
    assert "the same command resumes" in caplog.text


def test_bad_arguments_are_one_line(
    options: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    np.save(tmp_path / "high.npy", np.full(100, 70, np.uint16))
    for more, message in (
        (["--data", "high.npy"], "70"),
        (["--data", "none.npy"], "no such file"),
        (["--window", "25"], "--window: got 25, expected 1 to --steps, 24"),
    ):
        assert main([*options, *more]) == 1
        assert message in caplog.records[-1].getMessage()
        assert not (tmp_path / "out").exists()
