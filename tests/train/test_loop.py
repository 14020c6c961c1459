from __future__ import annotations

import logging
import math
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tensorgrad import Tensor, random
from tensorgrad.core import backend
from tensorgrad.errors import ArgumentError, CheckpointError, DtypeError, TrainingError
from tensorgrad.models.gpt2 import GPT2, GPT2Config
from tensorgrad.ops.cross_entropy import cross_entropy
from tensorgrad.optim import AdamW, Fp8Scales, LossScaler
from tensorgrad.train import config
from tensorgrad.train.checkpoint import list_checkpoints, load_checkpoint
from tensorgrad.train.log import read_metrics
from tensorgrad.train.loop import Trainer, mean_loss
from tensorgrad.train.settings import TrainSettings
from tensorgrad.train.strategy import OneProcess, Strategy, count_targets
from tensorgrad.train.times import Clock
from tests.disk import full_disk
from tests.processes import started
from tests.train.tiny_run import MODEL, SMALL, make_trainer


def bits(trainer: Trainer) -> dict[str, bytes]:
    """Return everything that the next step depends on."""
    optimizer = trainer.optimizer.state_dict()
    found = {name: t.numpy().tobytes() for name, t in trainer.model.state_dict().items()}
    for name, value in optimizer.items():
        array = backend.to_numpy(value) if backend.is_array(value) else np.asarray(value)
        found[f"optimizer {name}"] = array.tobytes()
    if trainer.scaler is not None:
        found["scaler"] = str(trainer.scaler.state_dict()).encode()
    return found


def metrics(folder: Path) -> bytes:
    return (folder / "metrics.jsonl").read_bytes()


def steps_of(folder: Path) -> list[int]:
    return [load_checkpoint(path).step for path in list_checkpoints(folder / "checkpoints")]


def test_a_run_learns_and_leaves_what_it_should(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, plot=True)
    outcome = trainer.run()
    assert outcome.finished
    assert (outcome.step, outcome.skipped) == (24, 0)
    assert outcome.tokens_per_second > 0
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in records if "loss" in r] == list(range(1, 25))
    measured = {r["step"]: r["validation_loss"] for r in records if "validation_loss" in r}
    assert list(measured) == [0, 6, 12, 18, 24]
    assert measured[0] == pytest.approx(math.log(32), abs=0.1)
    assert measured[24] < measured[0] - 0.3
    first = next(r for r in records if r["step"] == 1)
    assert first["lr"] == pytest.approx(1e-2 / 4)
    assert first["gradient_norm"] > 0
    assert steps_of(tmp_path) == [24, 20]
    assert outcome.checkpoint == tmp_path / "checkpoints" / "step-00000024"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bfloat16-parameters", "float16"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_run_in_pieces_equals_one_in_one(tmp_path: Path, dtype: str, micro_batches: int) -> None:
    options: dict[str, Any] = {"dtype": dtype, "micro_batches": micro_batches}
    whole = make_trainer(tmp_path / "whole", **options)
    whole.run()
    for stop_after in (3, 4, 6, None):
        part = make_trainer(tmp_path / "parts", stop_after=stop_after, **options)
        assert part.resume() == (part.step > 0)
        outcome = part.run()
        assert outcome.finished == (stop_after is None)
    assert part.step == 24
    assert bits(part) == bits(whole)
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_a_run_of_8_bits_resumes_to_the_same_bits(tmp_path: Path, device: str) -> None:
    options: dict[str, Any] = {
        **{"dtype": "fp8", "micro_batches": 2, "model_device": device, "steps": 9},
        **{"evaluate_every": 4, "model_config": replace(MODEL, layers=3)},
    }
    whole = make_trainer(tmp_path / "whole", **options)
    whole.run()
    for number, stop_after in enumerate((1, 4, None)):
        part = make_trainer(
            tmp_path / "parts", stop_after=stop_after, capture=number != 1, **options
        )
        part.resume()
        part.run()
    assert bits(part) == bits(whole)
    assert isinstance(whole.scaler, Fp8Scales)
    assert isinstance(part.scaler, Fp8Scales)
    assert part.scaler.state_dict() == whole.scaler.state_dict()
    assert part.scaler.state_dict()["updates"] == 9
    assert len(part.scaler.names) == 4


def test_clipped_elements_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer(tmp_path, dtype="fp8", model_config=replace(MODEL, layers=3))
    with caplog.at_level(logging.INFO):
        trainer._tell_clipped({"a": (1, 0, 2), "b": (0, 0, 0)})
        trainer._tell_clipped({"a": (1, 0, 2), "b": (0, 0, 0)})
        trainer._tell_clipped({"a": (1, 0, 3), "b": (0, 4, 0)})
    told = [record.getMessage() for record in caplog.records if "clipped" in record.getMessage()]
    assert told == [
        "step 0: 3 elements were clipped to 8 bits since the last time, 3 with a",
        "step 0: 5 elements were clipped to 8 bits since the last time, 4 with b",
    ]


@pytest.mark.parametrize("optimizer", ["muon", "lion", "adafactor", "sgd"])
def test_a_run_with_any_optimizer_learns_and_resumes(tmp_path: Path, optimizer: str) -> None:
    options: dict[str, Any] = {
        **{"optimizer_name": optimizer, "dtype": "bfloat16-parameters", "schedule": "wsd"},
        **{"steps": 14, "lr": {"lion": 3e-3, "sgd": 0.5, "adafactor": 0.1}.get(optimizer, 1e-2)},
    }
    whole = make_trainer(tmp_path / "whole", **options)
    whole.run()
    for stop_after in (5, None):
        part = make_trainer(tmp_path / "parts", stop_after=stop_after, **options)
        part.resume()
        part.run()
    assert bits(part) == bits(whole)
    records = read_metrics(tmp_path / "whole" / "metrics.jsonl")
    losses = [r["validation_loss"] for r in records if "validation_loss" in r]
    assert losses[-1] < losses[0] - 0.05


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["muon", "lion", "adafactor", "sgd"])
def test_captured_steps_of_any_optimizer_are_those_of_eager_ones(
    tmp_path: Path, optimizer: str
) -> None:
    options: dict[str, Any] = {"optimizer_name": optimizer, "model_device": "cuda:0", "steps": 12}
    eager = make_trainer(tmp_path / "eager", capture=False, **options)
    eager.run()
    captured = make_trainer(tmp_path / "captured", **options)  # seeds the generator again
    captured.run()
    assert captured._captured is not None
    assert captured._captured.graphs == 1
    assert bits(captured) == bits(eager)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bfloat16-parameters", "float16"])
def test_captured_steps_are_those_of_an_eager_run(tmp_path: Path, dtype: str) -> None:
    """With dropout and accumulation; a run in pieces too, of which one is eager."""
    options: dict[str, Any] = {
        **{"dtype": dtype, "micro_batches": 2, "model_device": "cuda:0", "lr": 3e-3},
        **{"steps": 200, "evaluate_every": 50, "checkpoint_every": 50, "log_every": 10},
        "model_config": GPT2Config(vocab_size=32, context=64, layers=2, heads=2, width=64,
                                   dropout=0.1),
    }  # fmt: skip

    def made(name: str, **more: Any) -> Trainer:
        trainer = make_trainer(tmp_path / name, **options, **more)
        if trainer.scaler is not None:  # with overflows, as it grows often
            trainer.scaler = LossScaler(2.0**20, interval=20)
        return trainer

    eager = made("eager", capture=False)
    eager.run()
    whole = made("captured")
    whole.run()
    assert whole._captured is not None
    assert whole._captured.graphs == 1
    for number, stop_after in enumerate((70, 50, 80)):
        pieces = made("pieces", stop_after=stop_after, capture=number != 1)
        assert pieces.resume() == (number > 0)
        pieces.run()
    assert pieces.step == 200
    expected = bits(eager), metrics(tmp_path / "eager")
    assert (bits(whole), metrics(tmp_path / "captured")) == expected
    assert (bits(pieces), metrics(tmp_path / "pieces")) == expected


@pytest.mark.gpu
def test_a_step_that_cannot_be_captured_runs_eagerly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    eager = make_trainer(tmp_path / "eager", capture=False, model_device="cuda:0")
    eager.run()
    trainer = make_trainer(tmp_path / "reads", model_device="cuda:0")
    loss = trainer._loss

    def reads(x: Any, y: Any) -> Tensor:
        found = loss(x, y)
        assert float(found) > 0
        return found

    trainer._loss = reads
    trainer.run()
    assert bits(trainer) == bits(eager)
    lines = [text for text in caplog.messages if "captured" in text]
    assert len(lines) == 1
    assert "steps are not captured: graph.capture: Tensor.__float__ at tests/train/" in lines[0]


def test_nothing_to_resume_begins_at_the_beginning(tmp_path: Path) -> None:
    assert not make_trainer(tmp_path).resume()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"generator": {"seed": -1, "draw": 0}}, "seed is -1, expected an integer"),
        ({"generator": 3}, "generator is 3"),
        ({"metrics": None}, "metrics is None"),
        ({"settings": [1]}, r"settings is \[1\]"),
        ({"model": [1]}, r"model is \[1\], expected settings"),
        ({"scaler": None}, "expected a scale from"),
        ({"optimizer": {"step": -1, "lr": 1.0}}, "step is -1"),
        ({"optimizer": [1]}, "state is a list, expected a mapping"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    make_trainer(tmp_path, dtype="float16", steps=6).run()
    found = load_checkpoint(list_checkpoints(tmp_path / "checkpoints")[0])
    trainer = make_trainer(str(tmp_path), dtype="float16", steps=6)  # type: ignore[arg-type]
    assert trainer.scaler is not None
    trainer.scaler.load_state_dict({"scale": 4.0, "streak": 1})
    random.set_state({"seed": 1, "draw": 2, "stream": 3})
    arrays = [parameter.numpy().copy() for parameter in trainer.model.parameters()]
    with pytest.raises(CheckpointError, match=message) as caught:
        trainer.load(replace(found, state={**found.state, **change}))
    assert str(found.path) in str(caught.value)
    assert trainer.step == 0
    assert trainer.scaler.state_dict() == {"scale": 4.0, "streak": 1}
    assert random.get_state() == {"seed": 1, "draw": 2, "stream": 3}
    for before, parameter in zip(arrays, trainer.model.parameters(), strict=True):
        np.testing.assert_array_equal(before, parameter.numpy())


def test_a_new_run_does_not_replace_another(tmp_path: Path) -> None:
    make_trainer(tmp_path, stop_after=6).run()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ArgumentError, match=r"has checkpoints of a run, .* or resume\(\) first"):
        make_trainer(tmp_path).run()
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_a_damaged_checkpoint_costs_steps_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = make_trainer(tmp_path / "whole")
    whole.run()
    make_trainer(tmp_path / "parts", stop_after=12).run()
    newest = list_checkpoints(tmp_path / "parts" / "checkpoints")[0]
    (newest / "rank-00000.safetensors").write_bytes(b"")
    again = make_trainer(tmp_path / "parts")
    assert again.resume()
    assert again.step == 10
    assert "step-00000012" in caplog.text
    again.run()
    assert bits(again) == bits(whole)
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")


def test_looking_at_the_loss_less_often_changes_nothing(tmp_path: Path) -> None:
    for every in (1, 7):
        make_trainer(tmp_path / str(every), log_every=every).run()
    assert metrics(tmp_path / "1") == metrics(tmp_path / "7")


def test_parts_of_a_batch_add_up_to_it(tmp_path: Path) -> None:
    ends = []
    for micro_batches in (1, 4):
        config = replace(MODEL, dropout=0.0)
        trainer = make_trainer(
            tmp_path / str(micro_batches), None, config, micro_batches=micro_batches
        )
        trainer.run()
        ends.append(np.concatenate([p.numpy().ravel() for p in trainer.model.parameters()]))
    one, four = ends
    assert not np.array_equal(one, four)  # otherwise nothing was cut
    np.testing.assert_allclose(one, four, rtol=0, atol=2e-4)


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    sizes: Any = {"width": np.int64(16), "dropout": np.float32(0.5)}
    numbers: dict[str, Any] = {"steps": np.int64(5), "lr": np.float32(0.25), "seed": np.uint8(1)}
    shape = replace(MODEL, **sizes)
    trainer = make_trainer(tmp_path, model_config=shape, **numbers)
    config.save(trainer.settings, tmp_path)
    assert trainer.run().finished
    read = vars(config.load(TrainSettings, tmp_path))
    again = make_trainer(tmp_path, model_config=shape, **read)
    assert again.resume()
    assert bits(again) == bits(trainer)


def test_a_batch_that_does_not_divide_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ArgumentError, match="micro_batches is 3 and a batch has 4 rows, expected a divisor"
    ):
        make_trainer(tmp_path, micro_batches=3).run()
    with pytest.raises(
        ArgumentError,
        match="micro_batches is 4 and a batch has 4 rows, 2 on each of 2 ranks, expected",
    ):
        make_trainer(tmp_path, Two(), micro_batches=4).run()


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            (Tensor(np.ones((4, 8))),),
            r"a batch is a tuple of \['Tensor'\], expected a tuple of NumPy",
        ),
        (np.ones((4, 8), int), "a batch is a ndarray, expected a tuple of NumPy arrays"),
        ((np.ones((0, 8), int),) * 2, "a batch has 0 rows, expected one or more"),
        (None, "batches ended after step 0, expected one for each of the 24 steps"),
    ],
)
def test_batches_that_are_none_are_named(batch: Any, message: str, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer._batches = lambda step: iter([] if batch is None else [batch])
    with pytest.raises(ArgumentError, match=message):
        trainer.run()


@pytest.mark.parametrize(
    ("loss", "got"),
    [(3.0, "float"), (Tensor(np.ones(1)), r"shape \(1,\)")],
    ids=["float", "vector"],
)
def test_a_loss_that_is_not_a_scalar_is_refused(loss: Any, got: str, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer._loss = lambda *batch: loss
    with pytest.raises(ArgumentError, match=f"loss returned {got}, expected a scalar tensor"):
        trainer.run()
    with pytest.raises(ArgumentError, match=f"loss returned {got}, expected a scalar tensor"):
        mean_loss(trainer.model, trainer._loss, [(np.ones(1),)])


def test_a_resumed_run_may_get_more_steps_but_not_fewer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = make_trainer(tmp_path / "whole", schedule="constant")
    whole.run()
    make_trainer(tmp_path / "parts", schedule="constant", steps=7).run()
    fewer = make_trainer(tmp_path / "parts", schedule="constant", steps=6)
    with pytest.raises(CheckpointError, match="--steps is 7 there, got 6, expected 7 or more"):
        fewer.resume()
    more = make_trainer(tmp_path / "parts", schedule="constant")
    with caplog.at_level(logging.INFO):
        assert more.resume()
    assert "resuming from step 7 of 24" in caplog.text
    assert more.run().finished
    assert bits(more) == bits(whole)


def test_a_longer_schedule_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_trainer(tmp_path, steps=12).run()
    make_trainer(tmp_path, steps=12).resume()
    assert caplog.text == ""
    more = make_trainer(tmp_path)
    more.resume()
    rates = [make_trainer(tmp_path / "new", steps=12)._schedule(11), more._schedule(12)]
    assert rates[1] > 2 * rates[0]
    words = f"the longer schedule, {rates[1]:.3g} at step 13 after {rates[0]:.3g} at step 12"
    assert f"24 steps instead of 12: the learning rate follows {words}" in caplog.text


@pytest.mark.parametrize(
    ("fingerprint", "error", "message"),
    [
        ({"settings": {}}, ArgumentError, "fingerprint has 'settings' with {}, expected mappings"),
        ({"step": {}}, ArgumentError, "fingerprint has 'step'"),
        ({"data": 3}, ArgumentError, "fingerprint has 'data' with 3, expected mappings"),
        ({"data": {"key": math.inf}}, ArgumentError, "save: data.key is inf"),
        ({"data": {"key": {1}}}, DtypeError, "JSON does not support a set"),
    ],
)
def test_a_checkpoint_that_could_not_be_read_is_refused_before_the_first_step(
    tmp_path: Path, fingerprint: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make_trainer(tmp_path, fingerprint=fingerprint).run()
    assert list(tmp_path.iterdir()) == []


def test_a_measure_that_could_not_be_read_is_refused_before_the_first_step(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    cases: list[tuple[Any, str]] = [
        ({"accuracy": [0.5]}, r"evaluate returned .*accuracy.*numbers by name"),
        ({"step": 0.5}, "evaluate returned 'step', expected any other name"),
    ]
    for measures, message in cases:
        trainer._evaluate = lambda measures=measures: measures
        with pytest.raises(ArgumentError, match=message):
            trainer.run()
        assert trainer.step == 0


def test_a_warmup_that_too_few_steps_limited_grows_with_them(tmp_path: Path) -> None:
    make_trainer(tmp_path, steps=7, warmup=6).run()
    with pytest.raises(CheckpointError, match=r"--lr is 0.01 there"):
        make_trainer(tmp_path, steps=9, warmup=8, lr=0.02).resume()
    assert make_trainer(tmp_path, steps=9, warmup=8).resume()


def test_other_settings_are_refused(tmp_path: Path) -> None:
    make_trainer(tmp_path, stop_after=5).run()
    free = make_trainer(tmp_path, log_every=3, keep=5, checkpoint_every=7, nan="skip")
    assert free.resume()
    for change, message in (
        ({"warmup": 9}, "--warmup is 4 there, got 9"),
        ({"lr": 0.02}, "--lr is 0.01 there, got 0.02"),
        ({"seed": 1}, "--seed is 0 there, got 1"),
        ({"micro_batches": 2}, "--micro-batches is 1 there, got 2, expected 1 with the same"),
    ):
        with pytest.raises(CheckpointError, match=f"made with other settings: {message}"):
            make_trainer(tmp_path, **change).resume()
    assert make_trainer(tmp_path, Two(), micro_batches=2).resume()  # another number of ranks


def test_leftovers_of_a_kill_are_deleted_when_a_run_is_resumed(tmp_path: Path) -> None:
    make_trainer(tmp_path, keep=9).run()
    assert len(steps_of(tmp_path)) == 5
    again = make_trainer(tmp_path, keep=1)
    assert again.resume()
    again.run()
    assert steps_of(tmp_path)[0] == 24
    assert len(steps_of(tmp_path)) <= 2  # and the best


def test_a_run_whose_folder_is_removed_ends_and_makes_no_other(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path / "run")
    train_step = trainer._train_step

    def remove(batch: Any) -> None:
        train_step(batch)
        if trainer.step == 7:
            shutil.rmtree(tmp_path / "run")

    trainer._train_step = remove  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match=r"cannot write .*step-00000010: .*No such file"):
        trainer.run()
    assert list(tmp_path.iterdir()) == []


def poison(trainer: Trainer, *steps: int) -> None:
    """Make the loss of some steps, counted from 1, NaN."""
    good = trainer._loss

    def loss(*batch: Any) -> Tensor:
        bad = trainer.step + 1 in steps and trainer.model.training
        return good(*batch) * (math.nan if bad else 1.0)

    trainer._loss = loss


def test_nan_stops_the_run_and_names_the_last_good_checkpoint(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    poison(trainer, 13)
    with pytest.raises(TrainingError, match=r"step 13: the loss is nan.*step-00000010"):
        trainer.run()
    assert steps_of(tmp_path) == [10, 5]
    again = make_trainer(tmp_path)
    assert again.resume()
    again.run()
    whole = make_trainer(tmp_path / "whole")
    whole.run()
    assert bits(again) == bits(whole)
    assert metrics(tmp_path) == metrics(tmp_path / "whole")


def test_nan_before_any_checkpoint_says_so(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, log_every=100)
    poison(trainer, 2)
    with pytest.raises(TrainingError, match=r"step 2: .*none was saved yet.*--nan skip"):
        trainer.run()
    assert steps_of(tmp_path) == []


def test_nan_can_be_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer(tmp_path, nan="skip")
    poison(trainer, 3, 4)
    outcome = trainer.run()
    assert outcome.finished
    assert outcome.skipped == 2
    assert "step 4: the loss is nan" in caplog.text
    assert "skipped, 2 so far" in caplog.text
    assert all(np.isfinite(p.numpy()).all() for p in trainer.model.parameters())
    assert trainer.optimizer.state_dict()["step"] == 22
    record = next(r for r in read_metrics(tmp_path / "metrics.jsonl") if r["step"] == 3)
    assert record["loss"] is None
    assert record["gradient_norm"] is None


def test_an_overflow_of_the_loss_scale_does_not_stop_the_run(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, dtype="float16")
    assert trainer.scaler is not None
    trainer.scaler.load_state_dict({"scale": 2.0**100, "streak": 0})
    outcome = trainer.run()
    assert outcome.finished
    assert outcome.skipped > 10


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_writes_a_checkpoint(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "tests.train.tiny_run", str(tmp_path)]
    options = ["--steps", "100000", "--checkpoint-every", "100000", "--no-plot"]
    with started([*command, *options], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        metrics_of_it = tmp_path / "metrics.jsonl"
        while not (metrics_of_it.exists() and metrics_of_it.stat().st_size):
            assert process.poll() is None
        process.send_signal(number)
        rest = process.communicate(timeout=60)[0]
    assert process.returncode == 0
    (step,) = steps_of(tmp_path)
    assert rest == f"stopped after {step}\n"
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["step"] == step


def test_a_signal_is_not_left_waiting_for_the_next_look_at_the_loss(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, log_every=1000, evaluate_every=1000, checkpoint_every=1000)
    step = trainer._train_step

    def interrupted(batch: Any) -> None:
        step(batch)
        if trainer.step == 3:
            signal.raise_signal(signal.SIGINT)

    trainer._train_step = interrupted  # type: ignore[method-assign]
    outcome = trainer.run()
    assert (outcome.step, outcome.finished, steps_of(tmp_path)) == (3, False, [3])
    again = make_trainer(tmp_path, log_every=1000, evaluate_every=1000)
    assert again.resume()
    again.run()
    whole = make_trainer(tmp_path / "whole", log_every=1000, evaluate_every=1000)
    whole.run()
    assert bits(again) == bits(whole)
    assert metrics(tmp_path) == metrics(tmp_path / "whole")


def test_a_full_disk_ends_the_run_and_keeps_what_was_saved(tmp_path: Path) -> None:
    make_trainer(tmp_path, stop_after=5).run()
    trainer = make_trainer(tmp_path)
    trainer.resume()
    with full_disk(8192), pytest.raises(CheckpointError, match=r"cannot write .*step-00000010"):
        trainer.run()
    assert steps_of(tmp_path) == [5]
    again = make_trainer(tmp_path)
    assert again.resume()
    assert again.run().finished


def test_a_checkpoint_of_another_run_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    make_trainer(tmp_path, stop_after=1).run()
    other = make_trainer(tmp_path, None, replace(MODEL, layers=2))
    before = bits(other)
    with pytest.raises(
        CheckpointError, match="the model of this run: layers is 1 there, expected 2"
    ):
        other.resume()
    unnamed = make_trainer(tmp_path, None, replace(MODEL, vocab_size=33), fingerprint={})
    with pytest.raises(CheckpointError, match=r"tokens\.weight is float32\[32, 16\] there"):
        unnamed.resume()
    trainer = make_trainer(tmp_path / "state")
    trainer.run()
    (path, *_) = list_checkpoints(tmp_path / "state" / "checkpoints")
    found = load_checkpoint(path)
    del found.state["generator"]
    with pytest.raises(CheckpointError, match="has no 'generator'"):
        trainer.load(found)
    words = {"tokenizer": {"sha256": "00"}}
    with pytest.raises(CheckpointError, match="the tokenizer of this run: sha256 is None there"):
        make_trainer(tmp_path, fingerprint=words).resume()
    assert bits(other) == before


class Two(Strategy):
    """The first of two ranks, the second of which measures and computes the same."""

    rank, ranks, is_main = 0, 2, True

    def __init__(self, stops: bool = False) -> None:
        self.reduced = 0
        self.stops = stops
        self.begun: tuple[int, set[int]] | None = None

    def begin(
        self, step: int, arrays: Sequence[Any], facts: Mapping[str, Any] | None = None
    ) -> None:
        self.begun = step, {id(array) for array in arrays}

    def reduce_gradients(self) -> None:
        self.reduced += 1

    def sum(self, values: Sequence[float]) -> list[float]:
        return [2 * value for value in values[:-1]] + [values[-1] + self.stops]


def test_ranks_reduce_once_a_step_and_log_their_mean(tmp_path: Path) -> None:
    two = Two()
    make_trainer(tmp_path, two, micro_batches=2).run()
    assert two.reduced == 24
    losses = [r["loss"] for r in read_metrics(tmp_path / "metrics.jsonl") if "loss" in r]
    assert losses[0] == pytest.approx(math.log(32), abs=0.2)


def test_a_rank_that_was_asked_to_stop_stops_all(tmp_path: Path) -> None:
    outcome = make_trainer(tmp_path, Two(stops=True)).run()
    assert (outcome.step, outcome.finished) == (1, False)
    assert steps_of(tmp_path) == [1]


def test_ranks_start_with_equal_states_and_their_own_random_numbers(tmp_path: Path) -> None:
    make_trainer(tmp_path, stop_after=1).run()
    assert random.get_state()["stream"] == 0
    strategy = Two()
    strategy.rank, strategy.is_main = 1, False
    trainer = make_trainer(tmp_path, strategy, stop_after=1)
    trainer.resume()
    trainer.run()
    assert random.get_state()["stream"] == 1
    arrays = [p.data for p in trainer.model.parameters()] + list(trainer.optimizer.state.values())
    assert strategy.begun == (1, {id(array) for array in arrays})


class Second(OneProcess):
    is_main = False


def test_other_ranks_write_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        outcome = make_trainer(tmp_path / "run", Second(), plot=True).run()
    assert outcome.finished
    assert list(tmp_path.iterdir()) == []
    assert caplog.records == []


def test_the_mean_loss_weights_rows(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    seen = []

    def loss(x: Any) -> Tensor:
        seen.append(trainer.model.training)
        return Tensor(np.asarray(x.mean()))

    batches = [(np.array([1.0, 2.0, 6.0]),), (np.array([11.0]),)]
    assert mean_loss(trainer.model, loss, batches) == 5.0
    assert seen == [False, False]
    assert trainer.model.training
    with pytest.raises(ArgumentError, match="batches is empty"):
        mean_loss(trainer.model, loss, [])


def test_the_mean_loss_weights_targets(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    x, y = np.random.default_rng(2).integers(0, 32, (2, 3, 8))
    y[0, 1:], y[1] = -100, -100
    whole = mean_loss(trainer.model, trainer.model, [(x, y)])
    rows = [(x[row : row + 1], y[row : row + 1]) for row in range(3)]
    assert mean_loss(trainer.model, trainer.model, rows) == pytest.approx(whole, rel=1e-6)
    with pytest.raises(ArgumentError, match="has only ignored targets"):
        mean_loss(trainer.model, trainer.model, rows[1:2])


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_step_does_not_depend_on_its_parts(
    tmp_path: Path, dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Targets are ignored unevenly: in whole parts, and in one whole batch."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 20, (2, 20, 8, 8))
    y[:, :3, 2:] = y[::3, 4:6] = y[1::3, :4] = y[7] = -100

    def run(parts: int) -> tuple[list[float | None], dict[str, Any]]:
        random.seed(0)
        model = GPT2(GPT2Config(20, 8, layers=1, heads=2, width=16)).to("cpu", dtype)
        settings = TrainSettings(
            steps=20, warmup=1, batch=8, lr=1e-2, micro_batches=parts, plot=False
        )
        # eps keeps Adam from making steps of gradients that are nothing but rounding
        optimizer = AdamW(model.named_parameters(), eps=1e-6)
        rates, folder = settings.learning_rate, tmp_path / str(parts)
        with caplog.at_level(logging.WARNING):
            Trainer(
                model, optimizer, model, lambda step: zip(x, y, strict=True), rates, settings,
                folder,
            ).run()  # fmt: skip
        records = read_metrics(folder / "metrics.jsonl")
        return [r["loss"] for r in records], {n: p.data for n, p in model.named_parameters()}

    losses, parameters = run(1)
    assert losses.index(None) == 7
    assert "step 8: the batch has no target that counts, and no loss" in caplog.text
    for parts in (2, 4):
        others, after = run(parts)
        assert others.pop(7) is None
        np.testing.assert_allclose(
            np.array(others, float),
            np.array(losses[:7] + losses[8:], float),
            rtol=1e-12 if dtype == "float64" else 1e-5,
        )
        for name, array in after.items():
            assert np.isfinite(array).all()
            if dtype == "float64":
                np.testing.assert_allclose(array, parameters[name], rtol=0, atol=1e-12)


def test_parts_count_as_the_loss_says() -> None:
    """With class weights a mean divides by the sum of the weights of its targets."""
    rng = np.random.default_rng(1)
    x, y, weight = rng.standard_normal((6, 4)), rng.integers(0, 4, 6), np.arange(1.0, 5.0)

    def gradient(parts: int) -> Any:
        logits = Tensor(np.zeros((4, 4)), requires_grad=True)
        OneProcess().compute_gradients(
            lambda x, y: cross_entropy(Tensor(x) @ logits, y, weight=weight),
            list(zip(np.split(x, parts), np.split(y, parts), strict=True)),
            count=lambda x, y: weight[y].sum(),
        )
        return logits.grad

    for parts in (2, 3):
        np.testing.assert_allclose(gradient(parts), gradient(1), rtol=1e-12)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (([[1, 2], [3, 4]], [[5, -100], [-100, -100]]), 1),
        (([[0.5, 1]], [[2.0, 3]]), 1),  # no integers: rows
        (([[1, 2], [3, 4]], [2, 1], [0, 1]), 2),  # tokens, lengths, labels
        (([[1, 2]], [[3, -100]], [[0.5, 0.5]]), 1),  # weights after the targets
    ],
)
def test_targets_are_the_last_integers(batch: Any, expected: int) -> None:
    assert count_targets(*map(np.array, batch)) == expected
    assert count_targets(np.array([3, 4], np.uint16)) == 2


def test_an_error_in_the_data_ends_the_run_and_its_reader(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    closed = []

    def batches(step: int) -> Iterator[Any]:
        try:
            yield from ()
            raise OSError("gone")
        finally:
            closed.append(step)

    trainer._batches = batches
    with pytest.raises(OSError, match="gone"):
        trainer.run()
    assert closed == [0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warmup": 24}, "--warmup: got 24, expected less than --steps, 24"),
        ({"dtype": "int8"}, "--dtype: got 'int8', expected one of float32"),
        ({"keep": 0}, "--keep: got 0, expected 1 or more"),
        ({"nan": "ignore"}, "--nan: got 'ignore', expected one of stop, skip"),
    ],
)
def test_settings_out_of_range_are_named(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        make_trainer(tmp_path, **options)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "inverse-square-root"])
def test_schedules(schedule: str, tmp_path: Path) -> None:
    settings = make_trainer(tmp_path, schedule=schedule, steps=104).settings
    rates = [settings.learning_rate(step) for step in range(104)]
    assert rates[:4] == pytest.approx([0.0025, 0.005, 0.0075, 0.01])
    last = {"cosine": 0.001, "linear": 0.001, "constant": 0.01, "inverse-square-root": 0.00196}
    assert rates[-1] == pytest.approx(last[schedule], rel=0.1)
    assert max(rates) == pytest.approx(SMALL["lr"])


@pytest.mark.parametrize("is_written", [False, True])
def test_a_checkpoint_in_the_background_is_finished_once_it_is_written(
    tmp_path: Path, is_written: bool
) -> None:
    saving: Any = SimpleNamespace(is_written=is_written, finish=lambda: tmp_path)
    trainer = make_trainer(tmp_path)
    trainer.clock, trainer._saving = Clock(), (1, saving)
    trainer._read()
    assert trainer.saved == (tmp_path if is_written else None)
