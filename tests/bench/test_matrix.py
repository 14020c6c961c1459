from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tensorgrad.bench import options, torch_ddp
from tensorgrad.bench.matrix import (
    PUBLISHED,
    MatrixBench,
    draw_matrix,
    matrix_cases,
    matrix_sweep,
    parallel_cases,
    parallel_sweep,
    table,
    with_scaling,
)
from tensorgrad.bench.steps import RankTimer, settings_of, sized
from tensorgrad.bench.sweep import Row, run_sweep
from tensorgrad.bench.torch_gpt2 import gpt2
from tensorgrad.errors import ArgumentError
from tensorgrad.models.gpt2 import GPT2Config
from tensorgrad.models.transformer_lm import TransformerLMConfig
from tensorgrad.parallel.comm.collectives import Comm
from tensorgrad.parallel.mesh import Mesh
from tensorgrad.parallel.planning.estimate import TrainingJob, estimate
from tests.source_tree import ROOT

TINY = TransformerLMConfig(64, 8, 2, 2, 2, 16, 24)
SHARED: dict[str, Any] = {
    "dtype": "float32", "epoch_tokens": 100_000_000, "windows": 3, "bucket_mb": None,
    "compiled": False, "captured": False,
}  # fmt: skip
CASE: dict[str, Any] = {
    "batch": 2, "dtype": "float32", "steps": 1, "epoch_tokens": 1000, "windows": 1,
    "micro_batches": 1, "bucket_mb": None, "compiled": False, "captured": False,
}  # fmt: skip
PEAKS = """
from tensorgrad.bench.matrix import MatrixBench, matrix_cases
from tensorgrad.parallel.comm.collectives import Comm
from tests.bench.test_matrix import CASE, TINY

(case,) = matrix_cases(TINY, {**CASE, "steps": 6}, 1, ["flash"], ["none"])
bench = MatrixBench(TINY, Comm(), "cpu")
print(*(bench(case)["peak_mb"] for _ in range(2)))
"""


def test_the_defaults_are_the_published_setting() -> None:
    sweep = next(matrix_sweep(comm=Comm(), peer=False, device="cpu"))
    assert sweep.cases[0] == {
        "attention": "unfused", "parallel": "none", "ranks": 1, "world": 1,
        "model": "transformer-lm", "layers": 24, "width": 512, "heads": 16, "context": 256,
        "vocab": 10_000, "hidden": 4096, **SHARED, "batch": 8, "steps": 20, "micro_batches": 1,
    }  # fmt: skip
    assert isinstance(sweep.measure, MatrixBench)
    assert sweep.measure._config == PUBLISHED
    assert not PUBLISHED.tied


def test_a_gpu_has_captured_steps_and_compiled_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "find_spec", lambda name: object())
    cases = next(matrix_sweep(comm=Comm(), kernels=("flash",), device="cuda")).cases
    assert [(case["parallel"], case["compiled"], case["captured"]) for case in cases] == [
        *(("none", False, True), ("pytorch", True, True))
    ]
    assert {case["dtype"] for case in cases} == {"bfloat16-parameters"}
    eager = next(matrix_sweep(comm=Comm(), kernels=("flash",), compiled=False, device="cuda"))
    assert [case["captured"] for case in eager.cases] == [True, False]


def test_every_part_has_its_modes() -> None:
    comm = Comm()
    comm.size = 2
    sweep = next(parallel_sweep(comm=comm, peer=False, device="cpu"))
    assert [(case["parallel"], case["micro_batches"]) for case in sweep.cases] == [
        *(("none", 1), ("naive", 1), ("flat", 1), ("overlap", 1), ("none", 8)),
        *(("model-parallel", 8), ("gpipe", 8), ("1f1b", 8), ("interleaved", 8)),
        *(("tensor", 1), ("tensor-sequence", 1), ("zero1", 1), ("zero2", 1), ("zero3", 1)),
    ]
    assert sweep.cases[1] == {
        "attention": "flash", "parallel": "naive", "ranks": 2, "world": 2, "model": "gpt2",
        "layers": 12, "width": 768, "heads": 12, "context": 1024, "vocab": 50257, "hidden": 3072,
        **SHARED, "batch": 32, "steps": 10, "micro_batches": 1,
    }  # fmt: skip
    peers = [
        (part, case["parallel"])
        for part in ("data", "zero", "tensor")
        for case in parallel_cases(sized("gpt2-124M"), CASE, 2, [part, part], peer=True)
        if case["attention"] == "sdpa"
    ]
    assert peers == [
        *(
            ("data", "pytorch"),
            ("data", "pytorch-ddp"),
            ("zero", "pytorch"),
            ("zero", "pytorch-fsdp"),
        )
    ]


def test_meshes_have_the_micro_batches_of_pipelines() -> None:
    comm = Comm()
    comm.size = 4
    chosen: dict[str, Any] = {"comm": comm, "peer": False, "device": "cpu", "model": "gpt2-1558M"}
    words = ("tp2xdp2", "pp4", "tp2xpp2", "pp4")
    cases = next(parallel_sweep(("zero", "mesh"), meshes=words, **chosen)).cases
    assert [(case["parallel"], case["ranks"], case["micro_batches"]) for case in cases] == [
        *(("none", 1, 1), ("zero1", 4, 1), ("zero2", 4, 1), ("zero3", 4, 1), ("none", 1, 8)),
        *(("tp2xdp2", 4, 8), ("pp4", 4, 8), ("tp2xpp2", 4, 8)),
    ]
    some = next(parallel_sweep(("mesh", "zero"), meshes=("tp4",), modes=("zero2",), **chosen)).cases
    assert [case["parallel"] for case in some] == ["tp4", "zero2"]


@pytest.mark.parametrize(
    ("meshes", "modes", "message"),
    [
        ([], [], "--meshes: got none with the parts zero, mesh, expected meshes such as tp2xdp2"),
        (["tp2xxdp2"], [], "--meshes: got 'tp2xxdp2', expected sizes of dp, pp and tp, such as"),
        (["dp2xdp2"], [], "--meshes: got 'dp2xdp2', expected sizes"),
        (["gpipe"], [], "--meshes: got 'gpipe', expected sizes"),
        (["tp4", "tp2"], [], "--meshes: got tp2, 2 ranks, expected the 4 started"),
        (["pp4"], [], "--meshes: got pp4, 4 stages, expected at most the 2 layers"),
        (["tp4"], ["naive"], "--modes: got naive, expected some of none zero1 zero2 zero3 tp4"),
    ],
)
def test_meshes_that_cannot_be_are_errors(
    meshes: list[str], modes: list[str], message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        parallel_cases(TINY, CASE, 4, ["zero", "mesh"], meshes=meshes, modes=modes)
    with pytest.raises(ArgumentError, match="--meshes: got tp4 with the parts data, expected"):
        parallel_cases(TINY, CASE, 4, ["data"], meshes=["tp4"])


def test_one_rank_measures_kernels_alone(tmp_path: Path) -> None:
    cases = matrix_cases(TINY, CASE, 1)
    assert [case["attention"] for case in cases] == ["unfused", "fused-softmax", "flash"]
    sweep = table("matrix", cases, MatrixBench(TINY, Comm(), "cpu"), "cpu")
    found = run_sweep(sweep, tmp_path, device="cpu", version="1")
    for row in found.rows:
        assert (row["status"], row["parallel"], row["scaling"]) == ("ok", "none", "")
        assert row["tokens_per_second"] == pytest.approx(2 * 8 / row["ms"] * 1e3, rel=1e-3)
        assert row["epoch_s"] == pytest.approx(1000 / row["tokens_per_second"], rel=1e-3)
    assert (tmp_path / "matrix.png").is_file()


@pytest.mark.parametrize(
    ("mode", "sequences"),
    [
        *(("none", 2), ("zero3", 6), ("pytorch-ddp", 6), ("pytorch-fsdp", 6), ("pytorch", 2)),
        *(("gpipe", 2), ("tensor", 2), ("tp3", 2), ("pp1xdp3", 6)),
    ],
)
def test_ranks_with_batches_of_their_own_multiply_the_tokens(
    mode: str, sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = MatrixBench(TINY, Comm(), "cpu")
    measured = "_peer" if mode.startswith("pytorch") else "_ours"
    monkeypatch.setattr(bench, measured, lambda case, timer: {"ms": 500.0})
    row = bench({**CASE, "parallel": mode, "ranks": 1 if mode in ("none", "pytorch") else 3})
    assert row["tokens_per_second"] == sequences * 8 / 0.5
    assert row["epoch_s"] == 1000 / row["tokens_per_second"]


def test_cases_of_ranks_and_of_the_peer() -> None:
    cases = matrix_cases(TINY, CASE, 2, ["flash"], ["zero3", "none"], peer=True)
    assert [(case["parallel"], case["ranks"]) for case in cases] == [
        *(("none", 1), ("zero3", 2), ("pytorch", 1), ("pytorch-fsdp", 2))
    ]


def test_schedules_that_do_not_fit_are_left_out() -> None:
    wide = {**CASE, "micro_batches": 2}
    modes = ["gpipe", "interleaved"]
    shallow = matrix_cases(TINY, wide, 2, ["flash"], modes)  # a model of 2 layers
    assert [case["parallel"] for case in shallow] == ["gpipe"]
    deep = TransformerLMConfig(64, 8, 4, 2, 2, 16)
    assert len(matrix_cases(deep, wide, 2, ["flash"], modes)) == 2
    odd = matrix_cases(deep, CASE, 2, ["flash"], modes)
    assert [case["parallel"] for case in odd] == ["gpipe"]
    with pytest.raises(ArgumentError, match="got one rank"):
        parallel_cases(TINY, CASE, 1, ["zero"])


def test_memory_and_time_of_gpus_are_planned_where_there_are_formulas() -> None:
    config = GPT2Config(64, 8, 2, 2, 16)
    comm = Comm()

    def planned(attention: str, parallel: str, ranks: int = 1, **changed: Any) -> Row:
        (case,) = matrix_cases(config, CASE, 1, [attention], ["none"])
        comm.size, device = ranks, changed.pop("device", "cuda")
        return MatrixBench(config, comm, device)._planned(
            {**case, "parallel": parallel, "ranks": ranks, **changed}
        )

    for name in ("none", "overlap"):
        plan = estimate(TrainingJob(config, Mesh(), 2, dtype="float32"))
        row = planned("flash", name)
        assert row == {"planned_mb": plan.bytes / 1e6, "planned_ms": 1e3 * plan.seconds}
        assert planned("flash", name, device="cpu") == {"planned_mb": plan.bytes / 1e6}
    for name, job in (
        ("zero3", TrainingJob(config, Mesh(4), 8, dtype="float32", zero=3)),
        ("tp2xdp2", TrainingJob(config, Mesh(dp=2, tp=2), 4, 2, dtype="float32")),
        ("pp2xdp2", TrainingJob(config, Mesh(dp=2, pp=2), 4, 2, dtype="float32")),
    ):
        row = planned("flash", name, 4, micro_batches=job.micro_batches, bucket_mb=1e-3)
        plan = estimate(job, bucket=1e3)
        assert row == {"planned_mb": plan.bytes / 1e6, "planned_ms": 1e3 * plan.seconds}
        assert plan.seconds > estimate(job).seconds or name == "zero3"
    for case in (("flash", "naive"), ("flash", "flat"), ("unfused", "none")):
        assert planned(*case) == {}
    assert planned("flash", "none", model="transformer-lm") == {}


def test_scaling_and_overhead_are_against_one_gpu() -> None:
    sizes = {name: 1 for name in matrix_cases(TINY, CASE, 1)[0]}
    alone: Row = {
        **sizes, "attention": "flash", "world": 2, "status": "ok", "device": "cpu",
        "tokens_per_second": 100.0, "peak_mb": 50.0,
    }  # fmt: skip
    row = {**alone, "ranks": 2, "tokens_per_second": 190.0, "peak_mb": 55.0}
    found = with_scaling(row, [{**alone, "attention": "unfused"}, alone])
    assert found["scaling"] == pytest.approx(95)
    assert found["memory_overhead"] == pytest.approx(10)
    for peaks in (({**row, "peak_mb": ""}, alone), (row, {**alone, "peak_mb": ""})):
        found = with_scaling(peaks[0], [peaks[1]])
        assert ("scaling" in found, "memory_overhead" in found) == (True, False)
    assert "scaling" not in with_scaling(row, [{**alone, "attention": "unfused"}])
    assert "scaling" not in with_scaling({**row, "status": "error"}, [alone])
    assert "scaling" not in with_scaling(alone, [alone])
    for mode, other, result in (
        ("overlap", "naive", "speed_up"),
        ("flat", "naive", "speed_up"),
        ("gpipe", "model-parallel", "speed_up"),
        ("tensor-sequence", "none", "speed_up"),
        ("1f1b", "model-parallel", "speed_up"),
        ("tensor", "none", "speed_up"),
        ("pytorch-ddp", "overlap", "ratio"),
        ("pytorch-fsdp", "zero3", "ratio"),
    ):
        before = [{**row, "parallel": other, "ms": 9.0}, {**row, "parallel": "zero", "ms": 1.0}]
        found = with_scaling({**row, "parallel": mode, "ms": 6.0}, before)
        assert found[result] == (6 / 9 if result == "ratio" else 9 / 6)
    assert "ratio" not in with_scaling({**row, "parallel": "pytorch", "ms": 6.0}, before)


def test_pictures_of_a_matrix() -> None:
    case = matrix_cases(TINY, CASE, 2, ["flash"], ["none", "overlap"])
    values = {"tokens_per_second": 8.0, "epoch_s": 4.0, "peak_mb": 2.0, "device": "cpu"}
    rows = [
        {**case[0], **values, "scaling": "", "memory_overhead": ""},
        {**case[1], **values, "scaling": 95.0, "memory_overhead": 10.0},
    ]
    figures = draw_matrix(rows)
    labels = {
        "": ("tokens/s of all ranks", 8, ["", "95.0 %"]),
        "-time": ("time of an epoch (s)", 4, []),
        "-memory": ("memory of the fullest rank (MB)", 2, ["", "10.0 %"]),
    }
    assert set(figures) == set(labels)
    for name, (label, height, notes) in labels.items():
        [axes] = figures[name].axes
        assert axes.get_ylabel() == label
        assert [bar.get_height() for bar in axes.patches] == [height, height]
        assert [text.get_text() for text in axes.texts] == notes
        ticks = [label.get_text() for label in axes.get_xticklabels()]
        assert ticks == ["none\nflash", "overlap\nflash"]
        assert figures[name].get_suptitle() == (
            "2 layers, C 16, T 8, batch 2 a GPU, float32, 2 ranks, cpu"
        )


def test_the_peer_is_connected_once_and_at_the_end_not_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []
    group = SimpleNamespace(destroy_process_group=lambda: calls.append("left"))
    cuda = SimpleNamespace(is_available=lambda: False)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(distributed=group, cuda=cuda))
    monkeypatch.setattr(torch_ddp, "join", lambda torch, comm, device: calls.append(device))

    def training_step(settings: Any, config: Any, device: str, **given: Any) -> Any:
        calls.append((settings.batch, config, given))
        return lambda: None

    monkeypatch.setattr(torch_ddp, "training_step", training_step)
    monkeypatch.setattr(RankTimer, "seconds", lambda timer, step, steps: 0.5)
    cases = matrix_cases(TINY, {**CASE, "compiled": True}, 2, [], peer=True)
    with closing(MatrixBench(TINY, Comm(), "cpu")) as bench:
        rows = [
            bench({**case, "captured": captured})
            for case, captured in zip(cases, (False, True, False), strict=True)
        ]
    assert [row["ms"] for row in rows] == [500, 500, 500]
    given = {"compiled": True, "mode": "default", "together": ""}
    assert calls == [
        "cpu",
        (2, TINY, given),
        (2, TINY, given | {"mode": "reduce-overhead", "together": "ddp"}),
        (2, TINY, given | {"together": "fsdp"}),
        "left",
    ]
    bench.close()
    assert len(calls) == 5


def test_the_peers_take_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    models: list[Any] = []

    def kept(*sizes: Any, **options: Any) -> Any:
        models.append(gpt2(*sizes, **options))
        return models[-1]

    monkeypatch.setitem(torch_ddp.TORCH, "gpt2", kept)
    settings, config = settings_of({"batch": 2, "dtype": "float32"}, GPT2Config(64, 8, 2, 2, 16))
    torch_ddp.join(torch, Comm(), "cpu")
    try:
        for together in ("", "ddp", "fsdp"):
            step = torch_ddp.training_step(settings, config, "cpu", together=together)
            step()
            step()
        alone, replicated, sharded = (list(model.parameters()) for model in models)
        whole = [weight.full_tensor() for weight in sharded]
    finally:
        torch.distributed.destroy_process_group()
    for one, *others in zip(alone, replicated, whole, strict=True):
        assert all((one - other).abs().max() < 1e-6 for other in others)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"batch": 0}, "--batch: got 0"),
        ({"dtype": "int8"}, "--dtype: got 'int8'"),
        ({"micro_batches": 3}, "expected a divisor of the 2"),
    ],
)
def test_bad_arguments_are_errors(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        matrix_cases(TINY, {**CASE, **changed}, 2)


def test_the_first_case_has_no_more_memory_than_the_next() -> None:
    """The process is new: what it allocates once would else be memory of the mode none."""
    result = subprocess.run(
        [sys.executable, "-c", PEAKS],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    first, second = map(float, result.stdout.split())
    assert first == pytest.approx(second, rel=0.15)
