"""The small sweeps: CPU steps, overhead, first use, rounding errors, the profiler, generation."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tensorgrad import Tensor
from tensorgrad.bench import cpu, decode, errors, first_use, options, overhead, profiler
from tensorgrad.bench.decode import KERNELS, decode_sweep
from tensorgrad.bench.errors import OPS
from tensorgrad.bench.options import Sizes
from tensorgrad.bench.processes import in_new_process
from tensorgrad.cli import main
from tensorgrad.io.readers import read_json
from tensorgrad.models.gpt2 import GPT2, GPT2Config
from tensorgrad.nn import init

DTYPES = ("float32", "bfloat16")
pytestmark = pytest.mark.slow
SIZES = ["--layers", "1", "--width", "16", "--heads", "2", "--context", "16", "--vocab", "64"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def rows(name: str) -> list[dict[str, Any]]:
    found = list(read_json(f"runs/bench/{name}.json")["rows"])
    assert {row["status"] for row in found} == {"ok"}
    assert Path(f"runs/bench/{name}.png").exists()
    return found


def test_parts_of_a_cpu_step_sum_up() -> None:
    command = ["bench", "cpu", *SIZES, "--batch", "2", "--steps", "1", "--turns", "1", "--no-peer"]
    assert main(command) == 0
    found = {row["part"]: row for row in rows("cpu")}
    assert tuple(found) == cpu.PARTS
    assert all(row["ms"] > 0 and row["peer_ms"] is None for row in found.values())
    parts = sum(found[part]["ms"] for part in cpu.PARTS[:3])
    assert found["step"]["ms"] == pytest.approx(parts, rel=1e-4)


def test_the_default_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "find_spec", lambda name: None)
    gpt2 = {"preset": "gpt2-124M", "layers": 12, "width": 768, "heads": 12, "context": 1024,
            "vocab": 50257, "dtype": "float32"}  # fmt: skip
    assert next(cpu.cpu_sweep()).cases[0] == {
        "part": "forward", "layers": 6, "width": 384, "heads": 6, "context": 256, "batch": 8,
        "vocab": 4096, "steps": 6, "turns": 3, "peer": False, "dtype": "float32",
    }  # fmt: skip
    assert next(overhead.overhead_sweep()).cases[0] == {
        "op": "add", "length": 1000, "repeats": 60, "dtype": "float32"
    }  # fmt: skip
    assert next(first_use.first_use_sweep(device="cpu")).cases == [
        {"caches": caches, **gpt2, "batch": 4} for caches in ("empty", "warm")
    ]
    assert next(profiler.profiler_sweep(device="cpu")).cases == [
        {"source": "host", **gpt2, "batch": 8, "steps": 20, "rounds": 5}
    ]
    monkeypatch.setattr(options, "check_gpu", lambda name: None)
    assert next(decode_sweep()).cases == [
        {"model": model, "batch": batch, "dtype": "bfloat16", "prompt": 16, "new": 256, "peers": ""}
        for model in ("gpt2-124M", "gpt2-1558M")
        for batch in (1, 32)
    ]


def test_both_libraries_take_turns_and_medians_count(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[bool] = []

    def times(function: Any, given: dict[str, Any]) -> list[list[float]]:
        assert function is cpu.step_times
        turns.append(given["peer"])
        return [[len(turns), 2.0, 3.0]]

    monkeypatch.setattr(cpu, "in_new_process", times)
    sizes = {"layers": 1, "width": 16, "heads": 2, "context": 8, "batch": 1, "vocab": 9, "steps": 1}
    monkeypatch.setattr(options, "find_spec", lambda name: object())
    cases = next(cpu.cpu_sweep(**sizes, turns=3, peer=True)).cases
    found = cpu.measure_cpu(cases[0])
    assert turns == [False, True] * 3
    assert (found["forward"]["ms"], found["forward"]["peer_ms"]) == (3, 4)
    assert (found["step"]["ms"], found["step"]["ratio"]) == (8, 9 / 8)


def test_the_step_of_pytorch_has_the_same_parts() -> None:
    pytest.importorskip("torch")
    sizes = {"layers": 1, "width": 16, "heads": 2, "context": 8, "batch": 1, "vocab": 9, "steps": 2}
    found = cpu.step_times(True, sizes)
    assert [len(each) for each in found] == [3, 3]
    assert min(map(min, found)) > 0


def test_a_new_process_returns_json_or_says_why_not() -> None:
    sizes = {"layers": 1, "width": 16, "heads": 3, "context": 8, "batch": 1, "vocab": 9, "steps": 1}
    with pytest.raises(RuntimeError, match=r"step_times in a new process: .*multiple of heads, 3"):
        in_new_process(cpu.step_times, {"peer": False, "sizes": sizes})


def test_overhead_is_what_an_op_takes_beyond_numpy() -> None:
    assert main(["bench", "overhead", "--length", "20", "--repeats", "2"]) == 0
    found = rows("overhead")
    assert [row["op"] for row in found] == ["add", "multiply", "negative", "tanh"]
    for row in found:
        for part in ("forward", "backward"):
            total, numpy = row[f"{part}_total_us"], row[f"{part}_numpy_us"]
            assert row[f"{part}_us"] == pytest.approx(total - numpy, abs=1e-5 * (total + numpy))
            assert min(numpy, total) > 0  # a busy machine may interrupt either


def test_numpys_work_is_that_of_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    x, leaf = Tensor(np.full(1, 0.5, "float32")), Tensor(np.ones(1, "float32"))
    for op, (ours, forward, _) in overhead.OPS.items():
        np.testing.assert_allclose(ours(x, leaf).data, forward(x.data), 1e-6, err_msg=op)
    three = np.full(1, 3, "float32")
    gradients = {op: float(backward(three)[0]) for op, (*_, backward) in overhead.OPS.items()}
    # Gradients of an op of two are summed for the leaf; tanh's input is 1 there.
    assert gradients == {"add": 4, "multiply": 4, "negative": -3, "tanh": 0}
    leaves: list[Tensor] = []

    def recorded(x: Tensor, leaf: Tensor) -> Tensor:
        leaves.append(leaf)
        return x + leaf

    monkeypatch.setitem(overhead.OPS, "add", (recorded, *overhead.OPS["add"][1:]))
    overhead.measure_overhead({"op": "add", "length": 2, "repeats": 1})
    assert len(leaves) == 2 * 2  # chains of forward and of backward
    assert [leaf.grad is not None and leaf.grad[0] for leaf in leaves] == [False, False, 2, 2]


def test_the_fastest_chain_counts_and_its_time_is_shared_by_its_ops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moments = itertools.accumulate(itertools.cycle((0, 3, 0, 1)))  # each second chain takes 1 s
    clock = SimpleNamespace(perf_counter=lambda: next(moments))
    monkeypatch.setattr(overhead, "time", clock)
    found = overhead.measure_overhead({"op": "add", "length": 20, "repeats": 2})
    assert found["forward_total_us"] == found["backward_numpy_us"] == pytest.approx(1e6 / 20)
    assert found["forward_us"] == found["backward_us"] == 0


def test_first_steps_are_of_new_processes_with_their_caches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folders: list[str] = []

    def steps(function: Any, given: dict[str, Any], environment: dict[str, str]) -> list[float]:
        assert function is first_use.first_steps
        folders.append(environment["XDG_CACHE_HOME"])
        kernels = Path(environment["XDG_CACHE_HOME"], "tensorgrad", "kernels")
        kernels.mkdir(parents=True, exist_ok=True)
        (kernels / f"{len(folders)}.cubin").touch()
        return [2.0 / len(folders), 0.5]

    monkeypatch.setattr(first_use, "in_new_process", steps)
    assert main(["bench", "first-use", *SIZES, "--batch", "2", "--device", "cpu"]) == 0
    empty, warm = rows("first-use")
    assert (empty["caches"], empty["first_s"], empty["kernels"]) == ("empty", 2, 1)
    assert (warm["caches"], warm["first_s"], warm["kernels"]) == ("warm", 1, 2)
    assert folders[0] == folders[1]
    assert not Path(folders[0]).exists()


def test_a_first_step_has_a_second() -> None:
    sizes = Sizes(layers=1, width=16, heads=2, context=16, vocab=64)
    run = next(first_use.first_use_sweep(preset="char", batch=2, sizes=sizes, device="cpu"))
    [case, _] = run.cases
    assert min(first_use.first_steps(dict(case), "cpu")) > 0


def test_rounding_errors_are_beside_those_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(errors, "DTYPES", DTYPES)
    assert main(["bench", "errors", "--rows", "64", "--columns", "40", "--device", "cpu"]) == 0
    found = rows("errors")
    assert [(row["dtype"], row["op"]) for row in found] == [(d, op) for d in DTYPES for op in OPS]
    for row in found:
        largest = {"float32": 1e-6, "bfloat16": 0.01}[row["dtype"]]
        assert 0 < row["value_error"] < largest
        assert 0 <= row["gradient_error"] < largest
        if row["value_peer_error"]:
            ratio = row["value_error"] / row["value_peer_error"]
            assert row["value_ratio"] == pytest.approx(ratio, rel=1e-3)


def test_errors_are_relative_and_ratios_are_to_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "find_spec", lambda name: object())
    cases = next(errors.errors_sweep(device="cpu")).cases
    assert cases[0] == {"op": "softmax", "dtype": "float32", "rows": 4096, "columns": 1000}
    assert len(cases) == 3 * len(OPS)
    assert errors._targets((5, 3)).tolist() == [0, 1, 2, 0, 1]
    assert errors._error(np.array([[3.0, 8.0]]), np.array([[3.0, 4.0]])) == 0.8

    def theirs(torch: Any, function: Any, x: Any, dy: Any) -> list[Any]:
        value, gradient = x.sum(0), np.broadcast_to(dy.reshape(-1)[: x.shape[1]], x.shape)
        scale = 1.0 if x.dtype == np.float64 else 1.5
        return [scale * value, gradient]

    monkeypatch.setattr(errors, "importlib", SimpleNamespace(import_module=lambda name: None))
    monkeypatch.setattr(errors, "_theirs", theirs)
    row = errors.measure_errors({**cases[0], "op": "sum columns", "rows": 8, "columns": 4}, "cpu")
    assert 0 < row["value_error"] < 1e-6
    assert row["value_peer_error"] == pytest.approx(0.5)
    assert row["value_ratio"] == row["value_error"] / row["value_peer_error"]
    assert (row["gradient_error"], row["gradient_peer_error"], row["gradient_ratio"]) == (0, 0, 0)


def test_the_profiler_is_measured_by_source() -> None:
    command = ["bench", "profiler", "--preset", "char", *SIZES, "--batch", "2", "--steps", "1"]
    assert main([*command, "--rounds", "1", "--device", "cpu"]) == 0
    [row] = rows("profiler")
    assert (row["source"], row["dtype"]) == ("host", "float32")
    cost = 100 * (row["on_ms"] / row["off_ms"] - 1)
    assert row["cost"] == pytest.approx(cost, rel=1e-3, abs=1e-3)  # times have six digits
    assert row["sum_ratio"] == pytest.approx(
        (row["busy_ms"] + row["gaps_ms"]) / row["off_ms"], 1e-3
    )
    cases = next(profiler.profiler_sweep(preset="char", device="cuda")).cases
    assert [case["source"] for case in cases] == ["host", "events", "cupti"]


def test_cases_of_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "check_gpu", lambda name: None)
    monkeypatch.setattr(options, "find_spec", lambda name: object())
    models: Any = ("gpt2-355M", "gpt2-124M")
    cases = next(decode_sweep(models=models, batches=(1, 8), static=True)).cases
    assert [(case["model"], case["batch"]) for case in cases] == [
        ("gpt2-355M", 1), ("gpt2-355M", 8), ("gpt2-124M", 1), ("gpt2-124M", 8),
    ]  # fmt: skip
    assert {case["peers"] for case in cases} == {"eager static"}
    assert {case["peers"] for case in next(decode_sweep()).cases} == {"eager"}
    assert {case["peers"] for case in next(decode_sweep(peer=False)).cases} == {""}
    [run] = decode_sweep(models=("gpt2-124M",), batches=(1,), kernels=True)
    assert [case["kernel"] for case in run.cases] == list(KERNELS)


def test_generation_is_compared_with_each_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "random_model", lambda name: name)
    monkeypatch.setattr(decode, "_generation", lambda model, batch: {"tokens_per_second": 90})
    rates = {False: 30, True: 45}
    monkeypatch.setattr(decode, "peer_rate", lambda model, batch, static: rates[static])
    row = decode.measure_decode({"model": "gpt2-124M", "batch": 1, "peers": "eager static"})
    assert (row["peer_tokens_per_second"], row["peer_ratio"]) == (30, 3)
    assert (row["static_peer_tokens_per_second"], row["static_peer_ratio"]) == (45, 2)


def test_utilization_of_the_memory() -> None:
    with init.without_values():
        model = GPT2(GPT2Config(vocab_size=10, context=8, layers=1, heads=2, width=8))
    nbytes = 4 * (968 + 2 * 3 * (16 + 128) * 8)  # weights; keys and values of three sequences
    assert decode.utilization(model, 3, 1e6, "NVIDIA H200") == pytest.approx(nbytes / 4.8e6)
    assert decode.utilization(model, 3, 1e6, "NVIDIA T400") is None


@pytest.mark.gpu
def test_generation_is_measured_on_a_gpu() -> None:
    command = ["bench", "decode", "--models", "gpt2-124M", "--batches", "2"]
    assert main([*command, "--no-peer"]) == 0
    [row] = rows("decode")
    assert row["tokens_per_second"] > 0
    assert row["host_ms"] > 0
    assert row["step_ms"] > 0
    assert 0 < row["mbu"] < 1
    assert main([*command, "--kernels"]) == 0
    assert [row["kernel"] for row in rows("decode-kernels")] == list(KERNELS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cpu", "--steps", "0"], "--steps: got 0, expected 1 or more"),
        (["cpu", "--heads", "7"], "expected a multiple of --heads, 7"),
        (["overhead", "--length", "0"], "--length: got 0, expected 1 or more"),
        (["kernels", "--scale", "0"], "--scale: got 0, expected 1 or more"),
        (["kernels", "--load", "-1"], "--load: got -1.0, expected 0 or more"),
        (["model", "--warmup", "-1"], "--warmup: got -1, expected 0 or more"),
        (["comm", "--sizes", "1", "nan"], "--sizes: got nan, expected more than 0"),
        (["buckets", "--sizes", "0"], "--sizes: got 0.0, expected more than 0"),
        (["matrix", "--tokens", "0"], "--tokens: got 0, expected 1 or more"),
        (["decode", "--batches", "4", "0"], "--batches: got 0, expected 1 or more"),
        (["precision", "--counts", "0"], "--counts: got 0, expected 1 or more"),
        (["errors", "--rows", "0"], "--rows: got 0, expected 1 or more"),
        (["profiler", "--rounds", "0", "--device", "cpu"], "--rounds: got 0, expected 1 or more"),
        (["first-use", "--batch", "0", "--device", "cpu"], "--batch: got 0, expected 1 or more"),
        (["kernels", "fast"], "fast"),
        (["parallel", "data", "--device", "cpu", "--dtype", "int8"], "int8"),
    ],
)
def test_errors_are_one_line_and_leave_no_files(
    arguments: list[str], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    if arguments[0] == "errors":
        pytest.importorskip("torch")
    assert main(["bench", *arguments]) == 1
    assert message in caplog.text
    assert not list(Path().iterdir())
