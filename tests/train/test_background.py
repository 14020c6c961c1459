"""Checkpoints that are written while training continues: the same files, and nothing is lost."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tensorgrad.core import backend
from tensorgrad.dtypes import bfloat16
from tensorgrad.errors import CheckpointError, TrainingError
from tensorgrad.io.weights import save_arrays
from tensorgrad.parallel import Comm, Mesh
from tensorgrad.parallel.checkpoint import RankWriters
from tensorgrad.train import background, checkpoint
from tensorgrad.train.background import BackgroundSaving, HostMemory
from tensorgrad.train.checkpoint import PendingCheckpoint, list_checkpoints, load_checkpoint
from tensorgrad.train.shards import Shards
from tests.checkpoints import contents_of
from tests.parallel.test_checkpoint import FULL, held_on
from tests.parallel.threads import on_ranks
from tests.train.test_callbacks import Recorder
from tests.train.test_loop import bits, metrics, poison, steps_of
from tests.train.tiny_run import make_trainer

OPTIONS: dict[str, Any] = {"background_checkpoints": True, "keep": 9}


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Let threads write checkpoints only once the event is set."""
    event = threading.Event()

    def wait(*arguments: Any, **options: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            assert event.wait(60)
        return save_arrays(*arguments, **options)

    monkeypatch.setattr(checkpoint, "save_arrays", wait)
    yield event
    event.set()


def at_step(step: int, act: Callable[[], object], folder: Path, **options: Any) -> Any:
    """Return a trainer that does something in a step, after its update."""
    trainer = make_trainer(folder, **{**OPTIONS, **options})
    train_step = trainer._train_step

    def then_act(batch: Any) -> None:
        train_step(batch)
        if trainer.step == step:
            act()

    trainer._train_step = then_act  # type: ignore[method-assign]
    return trainer


def test_files_and_bits_are_those_of_a_run_that_waits(
    tmp_path: Path, gate: threading.Event
) -> None:
    plain = make_trainer(tmp_path / "plain", keep=9)
    plain.run()
    recorder = Recorder()
    trainer = at_step(8, gate.set, tmp_path / "run")  # three steps after the first checkpoint
    trainer._callbacks = (recorder,)
    outcome = trainer.run()
    assert outcome.checkpoint == tmp_path / "run" / "checkpoints" / "step-00000024"
    assert bits(trainer) == bits(plain)
    assert metrics(tmp_path / "run") == metrics(tmp_path / "plain")
    assert steps_of(tmp_path / "run") == steps_of(tmp_path / "plain") == [24, 20, 15, 10, 5]
    assert recorder.steps("on_checkpoint") == [5, 10, 15, 20, 24]
    for path in list_checkpoints(tmp_path / "plain" / "checkpoints"):
        for file in path.glob("*.safetensors"):
            other = tmp_path / "run" / "checkpoints" / path.name / file.name
            assert other.read_bytes() == file.read_bytes()
        state = dict(load_checkpoint(path).state)
        other_state = dict(load_checkpoint(other.parent).state)
        assert other_state.pop("settings") == state.pop("settings") | {
            "background_checkpoints": True
        }
        assert other_state == state


def test_a_failed_write_is_an_error_at_the_next_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_trainer(tmp_path, stop_after=5).run()
    compare = checkpoint._compare

    def fail(file: Path, *arguments: Any) -> None:
        if file.parent.name.startswith(".step-00000010"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
        compare(file, *arguments)

    monkeypatch.setattr(checkpoint, "_compare", fail)
    trainer = make_trainer(tmp_path, **OPTIONS)
    trainer.resume()
    message = r"cannot write .*step-00000010: .*No space left.*step-00000005 and earlier ones are"
    with pytest.raises(CheckpointError, match=message):
        trainer.run()
    assert trainer.step == 15
    assert steps_of(tmp_path) == [5]
    assert not list((tmp_path / "checkpoints").glob(".*"))
    monkeypatch.undo()
    again = make_trainer(tmp_path, **OPTIONS)
    assert again.resume()
    assert again.run().finished


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_while_a_checkpoint_is_written_keeps_both(
    tmp_path: Path, gate: threading.Event, number: signal.Signals
) -> None:
    def stop() -> None:
        signal.raise_signal(number)
        gate.set()

    outcome = at_step(7, stop, tmp_path).run()
    assert (outcome.step, outcome.stopped_by) == (7, number)
    assert steps_of(tmp_path) == [7, 5]


def test_an_interrupt_that_acts_at_once_deletes_what_was_written(
    tmp_path: Path, gate: threading.Event
) -> None:
    def stop() -> None:
        gate.set()
        raise KeyboardInterrupt

    trainer = at_step(6, stop, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    assert trainer._saving is None
    assert list((tmp_path / "checkpoints").iterdir()) == []


@pytest.mark.parametrize("error", [TrainingError, MemoryError])
def test_an_error_of_training_leaves_the_checkpoint_that_was_written(
    tmp_path: Path, gate: threading.Event, error: type[Exception]
) -> None:
    def fail() -> None:
        gate.set()
        if error is MemoryError:
            raise MemoryError

    trainer = at_step(7, fail, tmp_path)
    if error is TrainingError:
        poison(trainer, 7)
    with pytest.raises(error) as caught:
        trainer.run()
    assert steps_of(tmp_path) == [5]
    assert error is MemoryError or "step-00000005" in str(caught.value)


def test_copies_use_the_memory_of_the_ones_before(device: str) -> None:
    xp = backend.namespace_on(device)
    whole = xp.arange(60).reshape(5, 12)
    arrays = [
        *(
            whole.astype("float32"),
            whole[:, ::5].astype("int8"),
            whole.T[::2],
            whole[:1, 3].reshape(()),
        ),
        *(xp.zeros((0, 3)), xp.ones(7, bfloat16), whole.astype("complex64"), whole[1] > 15),
        whole[:1, 3].reshape(()),
    ]
    memory = HostMemory()
    copies = memory.copies(arrays)
    for array, copy in zip(arrays, copies, strict=True):
        assert (copy.dtype, copy.shape) == (array.dtype, array.shape)
        assert np.array_equal(copy, backend.to_numpy(array))
        assert copy.ctypes.data % copy.itemsize == 0
    whole[...] = 3
    assert copies[2][1, 1] == 14
    again = memory.copies([whole])
    assert np.shares_memory(again[0], copies[0])
    (longer,) = memory.copies([xp.ones(9999)])
    assert longer.sum() == 9999


def test_the_memory_of_copies_is_freed_with_the_run(tmp_path: Path) -> None:
    lengths: list[int] = []
    trainer = at_step(9, lambda: lengths.append(len(trainer._memory._block)), tmp_path)
    trainer.run()
    assert lengths[0] > 0
    assert len(trainer._memory._block) == 0


def test_without_threads_a_checkpoint_is_written_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    saving = PendingCheckpoint(tmp_path, 1, contents_of({"model": {"a": np.ones(3)}}), {})
    written = BackgroundSaving(saving, 1e-9)
    assert written.is_written
    assert load_checkpoint(written.finish()).step == 1


def test_a_writer_works_for_its_fraction_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    class Saving:
        """Rests three times."""

        def write(self, rest: Callable[[], None]) -> None:
            for _ in range(3):
                rest()

    saving: Any = Saving()
    rests: list[float] = []
    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr(threading.Event, "wait", lambda event, seconds: rests.append(seconds))
    clock = SimpleNamespace(thread_time=iter((1.0, 3.0, 6.0, 1.0, 2.0, 3.0)).__next__)
    monkeypatch.setattr(background, "time", clock)
    BackgroundSaving(saving, 0.25)
    assert rests == [3, 6, 9]  # 1, 2 and 3 seconds of work, each a quarter of the time
    BackgroundSaving(saving, 1.0)
    assert rests[3:] in ([], [0, 0, 0])


def test_a_writer_hurries_once_it_is_waited_for(tmp_path: Path) -> None:
    saving = PendingCheckpoint(tmp_path, 1, contents_of({"model": {"a": np.ones(1 << 21)}}), {})
    waiting = BackgroundSaving(saving, 1e-9)
    assert not waiting.is_written
    assert load_checkpoint(waiting.finish()).arrays("model")["a"].sum() == 1 << 21


def test_shards_have_the_bits_that_were_copied(tmp_path: Path) -> None:
    tmp_path.mkdir(exist_ok=True)

    def program(comm: Comm) -> None:
        held = list(held_on(Mesh(2, 1, 1, comm.rank), True, FULL))
        contents = Shards(RankWriters(comm), held).contents()
        plain, copied = (
            PendingCheckpoint(tmp_path / name, 1, found, {"metrics": {}})
            for name, found in (("plain", contents), ("copied", HostMemory().copied(contents)))
        )
        plain.write()
        plain.finish()
        for _, array in held:
            array[...] = 0
        BackgroundSaving(copied).finish()

    on_ranks(2, program)
    for file in (tmp_path / "plain").rglob("*.safetensors"):
        other = tmp_path / "copied" / file.relative_to(tmp_path / "plain")
        assert other.read_bytes() == file.read_bytes()
