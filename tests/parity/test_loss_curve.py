"""Training here and in PyTorch gives the same losses; the benchmark sees where it does not."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorgrad.bench import loss_curve
from tensorgrad.bench import options as bench_options
from tensorgrad.cli import main
from tensorgrad.data import TokenLoader
from tensorgrad.errors import ArgumentError
from tensorgrad.io.readers import read_json
from tensorgrad.train.language import LanguageSettings

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


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="PyTorch is not installed")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let PyTorch seem to be there, for tests that replace its steps."""
    monkeypatch.setattr(bench_options, "find_spec", lambda name: object())


def found(folder: Path) -> dict[str, Any]:
    [row] = read_json(folder / "out" / "loss.json")["rows"]
    return dict(row)


@pytest.mark.parametrize(
    ("dtype", "most"), [("float32", 1e-5), ("bfloat16", 0.01), ("bfloat16-parameters", 0.02)]
)
def test_both_learn_the_same(
    dtype: str, most: float, options: list[str], tmp_path: Path, torch: Any
) -> None:
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
    torch: Any,
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


def test_the_default_case(options: list[str], installed: None) -> None:
    assert next(loss_curve.loss_sweep(data="tokens.npy")).cases == [{
        "data": "tokens.npy", "preset": "gpt2-124M", "layers": 12, "width": 768, "heads": 12,
        "context": 1024, "vocab": 50304, "dtype": "bfloat16-parameters", "grad_dtype": "float32",
        "steps": 1000, "batch": 8, "lr": 6e-4, "warmup": None, "seed": 0, "window": 50,
        "compiled": True,
    }]  # fmt: skip
    assert loss_curve.read_tokens("tokens.npy", 64).shape == (2000,)


def test_without_pytorch_it_cannot_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_options, "find_spec", lambda name: None)
    with pytest.raises(ArgumentError, match="--peer: PyTorch is not installed"):
        next(loss_curve.loss_sweep(data="none.npy"))


def test_both_take_each_step_at_its_learning_rate() -> None:
    settings = LanguageSettings(steps=23, warmup=2, lr=1.0)
    rates: list[float] = []

    def ours(x: Any, y: Any, lr: float) -> Any:
        rates.append(lr)
        return np.float32(x)

    class Batches(TokenLoader):
        def __init__(self) -> None:
            """Have numbers for batches."""

        def batch(self, step: int) -> Any:
            return step, -step

    losses = loss_curve.train_both(ours, lambda x, y, lr: y + 0.5, Batches(), settings)
    assert losses == ([*range(23)], [0.5 - step for step in range(23)])
    assert rates == [settings.learning_rate(step) for step in range(23)]


def test_running_means_are_compared(
    options: list[str], installed: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def peer(ours: Any, device: str, compiled: bool) -> Any:
        asked.append((device, compiled))
        steps = iter(range(24))
        return lambda x, y, lr: 100.0 * (next(steps) == 7)

    monkeypatch.setattr(loss_curve, "peer_step", peer)
    assert main([*options, "--dtype", "float32", "--most", "20"]) == 0
    row = found(tmp_path)
    assert asked == [("cpu", False)]
    ours = np.array([float(word) for word in row["tensorgrad_losses"].split()])
    theirs = np.array([100.0 * (step == 7) for step in range(24)])
    assert [float(word) for word in row["pytorch_losses"].split()] == theirs.tolist()
    windows = [np.convolve(each, np.full(5, 0.2), "valid") for each in (ours, theirs)]
    apart = windows[0] - windows[1]
    assert row["tensorgrad"] == pytest.approx(windows[0][-1], rel=1e-4)
    assert row["pytorch"] == 0
    assert row["largest_difference"] == pytest.approx(abs(apart).max(), rel=1e-4)
    assert row["at_step"] == int(abs(apart).argmax()) + 5
    assert row["mean_difference"] == pytest.approx(apart.mean(), rel=1e-4)
    [sweep] = loss_curve.loss_sweep(data="tokens.npy", most=0.5)
    assert sweep.problem({"largest_difference": 0.5}) == ""
    for far in (0.51, math.nan, ""):
        assert sweep.problem({"largest_difference": far}) == (
            f"running means differ by {far} nats, expected 0.5 or less"
        )
    figure = loss_curve.draw_loss([{}, {**row, "device": "cpu"}])[""]
    assert figure.get_suptitle() == "gpt2-124M, float32, batch 4 x 16, cpu"
    above, below = figure.axes
    assert [line.get_label() for line in above.lines[1::2]] == ["tensorgrad", "pytorch"]
    assert below.lines[0].get_ydata() == pytest.approx(windows[0] - windows[1], rel=1e-3)


def test_an_interrupted_run_says_how_to_go_on(
    options: list[str],
    installed: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def stops(x: Any, y: Any, lr: float) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(loss_curve, "peer_step", lambda *_, **__: stops)
    assert main(options) == 130
    assert "the same command resumes" in caplog.text


def test_bad_arguments_are_one_line(
    options: list[str], installed: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    np.save(tmp_path / "high.npy", np.full(100, 70, np.uint16))
    for more, message in (
        (["--data", "high.npy"], "70"),
        (["--data", "none.npy"], "no such file"),
        (["--window", "25"], "--window: got 25, expected 1 to --steps, 24"),
        (["--warmup", "-1"], "--warmup: got -1"),
    ):
        assert main([*options, *more]) == 1
        assert message in caplog.records[-1].getMessage()
        assert not (tmp_path / "out").exists()
