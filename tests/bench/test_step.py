"""The benchmark of training steps measures what it says, without PyTorch and with a fake of it."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tensorgrad.bench import options, torch_ddp
from tensorgrad.bench import step as train_step
from tensorgrad.bench.breakdown import KINDS, kind_of, own_bytes, summed
from tensorgrad.bench.steps import settings_of
from tensorgrad.bench.sweep import run_sweep
from tensorgrad.bench.torch_gpt2 import gpt2
from tensorgrad.cli import main
from tensorgrad.io.readers import read_json
from tensorgrad.models.gpt2 import GPT2Config
from tensorgrad.profile.ceilings import Ceilings
from tensorgrad.profile.recording import Kernel, Range, Recording
from tensorgrad.profile.tables import TimeSpan, spans

SIZES = {"layers": 1, "heads": 2, "width": 16, "context": 16, "vocab": 64}
SHORT = {"seconds": 0.005, "windows": 2, "device": "cpu", "dtype": "float32"}
TINY = [word for name, value in (SIZES | SHORT).items() for word in (f"--{name}", str(value))]
ALONE = [*TINY, "--no-peer"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*options: str) -> int:
    return main(["bench", "step", *options])


def rows(name: str = "step") -> list[dict[str, Any]]:
    return list(read_json(f"runs/bench/{name}.json")["rows"])


def test_rows_have_times_speed_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--preset", "char", "gpt2-124M", "--batch", "2", "4", "--micro-batches", "2"]
    had_torch = "torch" in sys.modules
    assert run(*options, *ALONE, "--recompute", "--recompute-norms") == 0
    assert had_torch or "torch" not in sys.modules
    found = rows()
    assert [(row["preset"], row["batch"]) for row in found] == [
        ("char", 2), ("char", 4), ("gpt2-124M", 2), ("gpt2-124M", 4),
    ]  # fmt: skip
    for row in found:
        assert row["status"] == "ok"
        for name in ("eager_ms", "captured_ms", "host_ms", "first_step_s", "first_captured_s"):
            assert row[name] > 0
        faster = min(row["eager_ms"], row["captured_ms"])
        assert row["tokens_per_second"] == pytest.approx(16e3 * row["batch"] / faster, rel=1e-3)
        assert row["peak_mb"] > 1
        for name in ("mfu", "clock_mhz", "watts", "peer_ms", "ratio"):  # not known on a CPU
            assert row[name] is None
    words = capsys.readouterr().out.partition("host_ms")[0].split()
    assert [word for word in words if word.endswith("_ms")] == ["eager_ms", "captured_ms"]


def test_the_default_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "find_spec", lambda name: object())
    found = next(train_step.step_sweep(device="cpu")).cases
    assert [(row["preset"], row["batch"]) for row in found] == [
        ("gpt2-124M", 32), ("gpt2-124M", 8), ("gpt2-124M", 2), ("gpt2-355M", 16),
        ("gpt2-1558M", 4), ("char", 64),
    ]  # fmt: skip
    assert {row["dtype"] for row in found} == {"bfloat16-parameters"}
    assert {(row["seconds"], row["windows"]) for row in found} == {(1.0, 5)}
    settings = [(row["micro_batches"], row["grad_dtype"]) for row in found]
    assert settings == [(1, "float32")] * 6
    assert not any(row["recompute"] or row["recompute_norms"] for row in found)
    assert len(list(train_step.step_sweep(device="cpu"))) == 1
    assert {row["peer"] for row in found} == {"default reduce-overhead"}
    sizes = [settings_of(row)[1] for row in found]
    assert [each.context for each in sizes] == [1024] * 5 + [256]
    assert [each.rows for each in sizes] == [50304] * 5 + [10112]
    for row in next(train_step.step_sweep(micro_batches=2, device="cpu")).cases:
        assert row["peer"] == "default"


def test_a_model_that_cannot_fit_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    monkeypatch.setattr(train_step, "check_fits", lambda size, device: asked.append(size))
    case = {"batch": 1, **SIZES}
    count = settings_of(case)[1].parameters
    for dtype, grad_dtype in (
        ("float32", "float32"),
        ("bfloat16-parameters", "float32"),
        ("bfloat16-parameters", "bfloat16"),
    ):
        train_step.eager_step({**case, "dtype": dtype, "grad_dtype": grad_dtype}, "cpu")
    assert asked == [16 * count, 18 * count, 16 * count]


def test_windows_are_as_long_as_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = iter((9.0, 0.3, 0.25, 9.0, 2.0, 3.0))  # the first step of each warms up
    monkeypatch.setattr(train_step, "seconds_of", lambda step, device: next(lengths))
    monkeypatch.setattr(train_step, "windows_in_turns", lambda *given: given[1:])
    turns: Any = train_step.turns_of(
        {"seconds": 1.0, "windows": 3}, dict.fromkeys(("fast", "slow"), int), "cpu"
    )
    assert turns == ("cpu", 3, {"fast": 4, "slow": 1})


def test_kinds_are_fractions_of_the_step_and_of_their_floor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(train_step, "eager_step", lambda case, device: None)
    kinds = {"norms": (3.0, 1.5), "gaps": (1.0, None), "copies": (0.0, 2.0)}
    monkeypatch.setattr(train_step, "by_kind", lambda step, device: kinds)
    assert train_step.measure_kinds({}, "cpu") == {
        "norms": {"ms": 3.0, "of_step": 75.0, "floor_ms": 1.5, "of_floor": 50.0},
        "gaps": {"ms": 1.0, "of_step": 25.0},
        "copies": {"ms": 0.0, "of_step": 0.0},
    }


def test_a_row_of_a_gpu_has_its_own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def process(function: Any, given: dict[str, Any]) -> dict[str, Any]:
        assert (function, given["device"]) == (train_step.measure_step, "cuda")
        if given["case"]["batch"] == 8:
            raise RuntimeError("measure_step in a new process: OutOfMemoryError: Out of memory")
        return {"eager_ms": json.loads(json.dumps(given["case"]))["batch"]}

    monkeypatch.setattr(train_step, "in_new_process", process)
    sweep = next(train_step.step_sweep(preset=("char",), batch=(2, 8), device="cuda"))
    found = run_sweep(sweep, Path("out"), device="a GPU", version="1").rows
    assert [(row["status"], row["eager_ms"]) for row in found] == [("ok", 2), ("out of memory", "")]


def test_finished_rows_are_kept_and_the_command_resumes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measure = train_step.measure_step
    seen: list[Any] = []

    def stopped(case: Any, device: str) -> Any:
        if case["batch"] == 3:
            raise MemoryError("not enough")
        if len(seen) == 1:
            raise KeyboardInterrupt
        seen.append(case)
        return measure(case, device)

    command = ["--preset", "char", "--batch", "2", "3", "4", *ALONE]
    monkeypatch.setattr(train_step, "measure_step", stopped)
    assert run(*command) == 130
    with Path("runs/bench/step.csv").open(newline="") as file:
        assert [row["status"] for row in csv.DictReader(file)] == ["ok", "out of memory"]
    monkeypatch.setattr(train_step, "measure_step", measure)
    assert run(*command) == 0
    assert [row["status"] for row in rows()] == ["ok", "out of memory", "ok"]
    assert "2 of 3 rows were in runs/bench before" in capsys.readouterr().out


class FakeTorch:
    """PyTorch's functions that the benchmark calls, with steps that take a time by their mode."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failing: str = "") -> None:
        self.asked: list[dict[str, Any]] = []
        self.resets = 0

        def reset() -> None:
            self.resets += 1

        def training_step(settings: Any, *sizes: Any, **options: Any) -> Any:
            self.asked.append({**options, "dtype": settings.dtype})
            mode = options["mode"]
            if mode == failing:
                raise RuntimeError("CUDA out of memory. Tried to allocate")
            if mode == "default":
                raise ValueError("cannot compile\nbecause")
            return lambda: sum(range(20_000 if mode == "eager" else 60_000))

        compiler, cuda = SimpleNamespace(reset=reset), SimpleNamespace(is_available=lambda: False)
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(compiler=compiler, cuda=cuda))
        monkeypatch.setattr(options, "find_spec", lambda name: object())
        monkeypatch.setattr(torch_ddp, "training_step", training_step)


def test_the_peer_is_the_fastest_compiled_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = FakeTorch(monkeypatch)
    modes = ["--peer-modes", "eager", "default", "reduce-overhead"]
    assert run("--preset", "char", "--batch", "2", *TINY, *modes) == 0
    [row] = rows()
    assert row["peer_ms"] == row["pytorch_reduce_overhead_ms"]
    assert row["pytorch_eager_ms"] > 0  # faster, but not compiled
    assert row["pytorch_default_ms"] is None
    assert row["message"] == "PyTorch default: cannot compile"
    speed = row["tokens_per_second"]
    assert any(  # the faster one is chosen before the turns with PyTorch
        row["ratio"] == pytest.approx(row["peer_ms"] / ms, rel=1e-3)
        and speed == pytest.approx(32e3 / ms, rel=1e-3)
        for ms in (row["eager_ms"], row["captured_ms"])
    )
    assert [(each["compiled"], each["mode"]) for each in torch.asked] == [
        (False, "eager"), (True, "default"), (True, "reduce-overhead"),
    ]  # fmt: skip
    assert {each["dtype"] for each in torch.asked} == {"float32"}
    assert torch.resets == 3


def test_a_peer_without_memory_leaves_our_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeTorch(monkeypatch, failing="reduce-overhead")
    modes = ["--peer-modes", "reduce-overhead", "eager"]
    assert run("--preset", "char", "--batch", "2", *TINY, *modes) == 0
    [row] = rows()
    assert row["status"] == "ok"
    assert row["message"] == "PyTorch reduce-overhead: out of memory"
    assert row["peer_ms"] == row["pytorch_eager_ms"]


@pytest.mark.parametrize("recompute", [False, True])
def test_parts_of_a_step_of_pytorch_sum_up(
    recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    models: list[Any] = []

    config = GPT2Config(64, 8, 2, 2, 16)

    def kept(*sizes: Any, **options: Any) -> Any:
        models.append(gpt2(*sizes, **options))
        return models[-1]

    monkeypatch.setitem(torch_ddp.TORCH, "gpt2", kept)

    for micro_batches, again in ((1, False), (2, recompute)):
        case = {"batch": 4, "micro_batches": micro_batches, "recompute": again}
        torch_ddp.training_step(*settings_of(case, config), "cpu")()
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert (one - other).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seconds", "0"], "--seconds: got 0.0, expected more than 0"),
        (["--batch", "3", "--micro-batches", "2"], "expected a divisor of the 3"),
        (["--heads", "7"], "expected a multiple of --heads, 7"),
    ],
)
def test_bad_options_are_errors(
    options: list[str], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert run(*options, "--no-peer") == 1
    assert message in caplog.text
    assert not Path("runs").exists()


def test_the_breakdown_of_a_step() -> None:
    assert run("--preset", "char", "--batch", "2", *ALONE, "--breakdown") == 0
    found = {row["kind"]: row for row in rows("step-kinds")}
    assert tuple(found) == KINDS
    there = {kind for kind, row in found.items() if row["ms"]}
    known = {
        "matrix products, forward", "matrix products, backward", "attention, forward",
        "attention, backward", "norms", "head and loss", "optimizer", "zeroing",
    }  # fmt: skip
    assert there >= {*known, "gaps"}
    for kind in known:
        assert found[kind]["floor_ms"] > 0
    # Rows have six digits.
    assert sum(row["of_step"] for row in found.values()) == pytest.approx(100, abs=0.01)
    [step] = rows()
    assert step["peer_ms"] is None


def test_kinds_and_floors_of_kernels() -> None:
    def work(number: int, kind: Any, name: str, **facts: Any) -> Range:
        return Range(number, 0, kind, name, 10, 20, **facts)

    half = {"dtype": "bfloat16"}
    ranges = [
        Range(0, -1, "phase", "step", 0, 1000),
        work(1, "op", "feed_forward", flops=4e4, nbytes=100, **half),
        work(2, "backward", "feed_forward", flops=8e4, nbytes=300, shapes=((4, 5),), **half),
        work(3, "op", "layer_norm", nbytes=4000, **half),
        work(4, "phase", "optimizer"),
        work(5, "phase", "zero gradients"),
        work(6, "op", "attention_packed", flops=1e4, nbytes=100, **half),
        work(7, "backward", "attention_packed", flops=2.5e4, nbytes=100, **half),
        work(8, "backward", "gelu", nbytes=100, **half),
    ]
    launched = [  # name, start, end, range
        ("matmul_tile<x>", 0, 100, 1), ("nvjet_hsh_tnt", 100, 150, 2), ("matmul_sum", 150, 300, 2),
        ("reduce_columns<Sum>", 300, 340, 2), ("norm_forward_rows", 340, 380, 3),
        ("adam_step", 400, 500, 4), ("memset", 500, 510, 5), ("attention_forward", 510, 550, 6),
        ("attention_backward", 550, 650, 7), ("elementwise_multiply", 650, 660, 8),
        ("memcpy", 660, 670, -1), ("nvjet_splitKreduce", 670, 680, 2),
        ("void sum_parts<float, float>", 680, 685, 2),
    ]  # fmt: skip
    kernels = [Kernel(name, start, end, range=number) for name, start, end, number in launched]
    recording = Recording(ranges, (0, 1000), kernels, device="x", source="cupti")
    ceilings = Ceilings(bandwidth=1e11, flops={"bfloat16": 1e12})
    found = summed(recording, ceilings, {"optimizer": 9000.0})
    ns = {
        kind: (round(1e6 * ms), floor and round(1e6 * floor)) for kind, (ms, floor) in found.items()
    }
    assert ns == {
        "matrix products, forward": (100, 40), "matrix products, backward": (210, 80),
        "attention, forward": (40, 10), "attention, backward": (100, 25), "norms": (40, 40),
        "head and loss": (0, None), "embedding": (0, None), "elementwise": (10, 1),
        "bias gradients": (45, None),
        "optimizer": (100, 90), "zeroing": (10, None), "copies": (10, None), "gaps": (335, None),
    }  # fmt: skip
    events = Recording(ranges, (0, 1000), [Kernel("feed_forward", 0, 9, range=2)], source="events")
    [span] = spans(events)
    assert kind_of(span, ranges[2]) == "matrix products, backward"
    assert kind_of(TimeSpan("add", "add", "forward", "", 1.0), None) == "elementwise"


def test_bytes_of_the_optimizer() -> None:
    config = GPT2Config(64, 8, 2, 2, 16)
    known = own_bytes(config)
    assert known == {"optimizer": 32 * config.parameters, "zeroing": 4 * config.parameters}


def test_a_llama_is_measured_as_a_gpt2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_step, "peak_of", lambda device, dtype, ranks: 1e9)
    sizes = ["--layers", "1", "--heads", "4", "--width", "16", "--context", "8", "--vocab", "64"]
    options = ["--dtype", "float32", "--seconds", "0.005", "--windows", "1", "--device", "cpu"]
    assert run("--preset", "llama-124M", "--batch", "2", "--no-peer", *sizes, *options) == 0
    [row] = rows()
    assert (row["preset"], row["heads"], row["status"]) == ("llama-124M", 4, "ok")
    flops = settings_of({**row, "recompute_norms": False})[1].training_flops()
    assert row["mfu"] == pytest.approx(flops * row["tokens_per_second"] / 1e9, rel=1e-3)
