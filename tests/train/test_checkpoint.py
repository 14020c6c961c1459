from __future__ import annotations

import builtins
import errno
import io
import json
import logging
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from tensorgrad.dtypes import bfloat16
from tensorgrad.errors import ArgumentError, CheckpointError, DamagedError, DtypeError
from tensorgrad.io.files import make_folder, to_json
from tensorgrad.io.weights import load_arrays, load_metadata, save_arrays
from tensorgrad.train import average_checkpoints, checkpoint
from tensorgrad.train.checkpoint import (
    Checkpoint,
    PendingCheckpoint,
    check_arrays,
    check_same,
    check_state,
    list_checkpoints,
    load_best,
    load_checkpoint,
    load_latest,
    prune_checkpoints,
    run_checkpoint,
)
from tests.checkpoints import contents_of, save_checkpoint, save_former
from tests.disk import flip, full_disk

ARRAYS = {
    "model": {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(3, bfloat16)},
    "optimizer": {"m": np.zeros(9, np.float32)},
}


FILE = "rank-00000.safetensors"


def save(folder: Path, step: int, loss: float | None = None, keep: int = 2) -> Path:
    metrics = {} if loss is None else {"validation_loss": loss}
    state: dict[str, Any] = {"metrics": metrics, "data": {"batch": step}}
    return save_checkpoint(folder, step, ARRAYS, state, keep)


def names(folder: Path) -> list[str]:
    return [path.name for path in list_checkpoints(folder)]


def test_a_checkpoint_round_trips(tmp_path: Path) -> None:
    found = load_checkpoint(save(tmp_path / "new", 7))
    assert found.step == 7
    assert found.state["data"] == {"batch": 7}
    assert found.state.keys() == {"format", "step", "metrics", "data", "files"}
    assert (found.mapping("data"), found.settings("none")) == ({"batch": 7}, {})
    with pytest.raises(
        CheckpointError, match="step-00000007 has no 'none', expected an entry of a run"
    ):
        found.entry("none")
    for get, expected in ((found.mapping, "a mapping"), (found.settings, "settings")):
        with pytest.raises(CheckpointError, match=f"step-00000007: step is 7, expected {expected}"):
            get("step")
    for group, arrays in ARRAYS.items():
        loaded = found.arrays(group)
        assert loaded.keys() == arrays.keys()
        for name, array in arrays.items():
            assert loaded[name].dtype == array.dtype
            assert loaded[name].tobytes() == array.tobytes()


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    for step, loss in enumerate([5.0, 3.0, 4.0, 3.0, 3.5], start=1):
        save(tmp_path, step, loss)
    assert names(tmp_path) == ["step-00000005", "step-00000004", "step-00000002"]
    assert load_best(tmp_path).step == 2
    found = load_latest(tmp_path)
    assert found is not None
    assert found.step == 5
    assert not list(tmp_path.glob(".*"))


def test_without_a_validation_loss_the_newest_is_the_best(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    assert names(tmp_path) == ["step-00000003", "step-00000002"]
    assert load_best(tmp_path).step == 3


def test_folders_may_be_named_by_text(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    found = load_latest(str(tmp_path))
    assert found == load_checkpoint(str(path)) == load_best(str(tmp_path))
    assert average_checkpoints([str(path)]).keys() == ARRAYS["model"].keys()


def test_a_checkpoint_may_be_of_before_the_first_step(tmp_path: Path) -> None:
    assert load_checkpoint(save(tmp_path, 0)).step == 0


def test_an_empty_folder_has_no_checkpoint(tmp_path: Path) -> None:
    assert load_latest(tmp_path / "missing") is None
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        load_best(tmp_path)
    for kind in ("best", "last"):
        with pytest.raises(CheckpointError, match="checkpoints has no checkpoint, expected one"):
            run_checkpoint(tmp_path, kind)
    for step, loss in ((1, 2.0), (2, 3.0)):
        save(tmp_path / "checkpoints", step, loss)
    assert [run_checkpoint(tmp_path, kind).step for kind in ("best", "last")] == [1, 2]


def test_ranks_divide_the_files_among_them(tmp_path: Path) -> None:
    path = save_former(tmp_path, 1, ARRAYS, {})
    (path / "optimizer.safetensors").unlink()  # the second file
    assert load_checkpoint(path, 0, 2).step == 1
    with pytest.raises(DamagedError, match=r"optimizer\.safetensors is missing"):
        load_checkpoint(path, 1, 2)
    (path / "optimizer.safetensors").mkdir()
    with pytest.raises(DamagedError, match=r"optimizer\.safetensors is not a file"):
        load_checkpoint(path)
    (path / "optimizer.safetensors").rmdir()
    (path / "optimizer.safetensors").symlink_to("model.safetensors")
    with pytest.raises(DamagedError, match="symbolic link"):
        load_checkpoint(path)


def test_a_checkpoint_that_is_abandoned_leaves_nothing(tmp_path: Path) -> None:
    rests: list[int] = []
    for is_written in (False, True):
        pending = PendingCheckpoint(tmp_path, 1, contents_of(ARRAYS), {})
        assert not pending.is_written
        if is_written:
            pending.write(lambda: rests.append(1))
            assert pending.is_written
            assert len(rests) >= 2 * len(ARRAYS)  # writing and reading back
        assert len(list(tmp_path.iterdir())) == 1
        for _ in range(2):  # the second time there is nothing to delete
            pending.abandon()
            assert list(tmp_path.iterdir()) == []


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 3)


@pytest.mark.parametrize(
    ("harm", "file", "message"),
    [
        (truncate, FILE, f"{FILE} has .* bytes, expected .* damaged"),
        (flip, FILE, "CRC-32"),
        (Path.unlink, FILE, f"{FILE} is missing"),
        (truncate, "state.json", "state.json is damaged"),
        (Path.unlink, "state.json", "has no state.json"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, harm: Any, file: str, message: str
) -> None:
    save(tmp_path, 1)
    damaged = save(tmp_path, 2)
    harm(damaged / file)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(damaged)
    with caplog.at_level(logging.WARNING):
        found = load_latest(tmp_path)
    assert found is not None
    assert found.step == 1
    assert "step-00000002" in caplog.text
    assert "going back to" in caplog.text
    save(tmp_path, 2)  # the run comes to the same step again
    assert load_checkpoint(damaged).step == 2


def test_damaged_checkpoints_ahead_do_not_cost_a_new_one_its_place(tmp_path: Path) -> None:
    for step in (2, 3, 4):
        save(tmp_path, step)
    for step in (3, 4):
        flip(tmp_path / f"step-{step:08d}" / FILE)
    save(tmp_path, 1, keep=1)
    assert names(tmp_path)[-1] == "step-00000001"
    assert load_checkpoint(tmp_path / "step-00000001").step == 1


def test_no_damaged_byte_of_the_state_goes_unseen(tmp_path: Path) -> None:
    path = save(tmp_path, 2) / "state.json"
    whole, state = path.read_bytes(), load_checkpoint(path.parent).state
    seen = 0
    for place, byte in enumerate(whole):
        for other in (byte ^ 1, byte ^ 4):
            path.write_bytes(whole[:place] + bytes([other]) + whole[place + 1 :])
            try:
                found = load_checkpoint(path.parent).state
            except CheckpointError:
                seen += 1
            else:
                assert state.items() <= found.items()  # it was space, or the name of the sum
    assert seen > len(whole)


@pytest.mark.parametrize(
    "change",
    [
        {"step": "2"},
        {"step": -1},
        {"files": [1]},
        {"files": []},
        {"files": {"model.safetensors": {"bytes": 3}}},
        {"files": {"model.safetensors": {"bytes": 3, "crc32": None}}},
        {"files": {"../model.safetensors": {"bytes": 3, "crc32": 1}}},
        {"files": {"/dev/zero": {"bytes": 0, "crc32": 0}}},
        {"step": True},
        {"step": 10**30},
    ],
)
def test_a_state_of_another_kind_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    path = save(tmp_path, 2) / "state.json"
    state = json.loads(path.read_text()) | change
    del state["crc32"]
    path.write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match=r"state\.json is damaged"):
        load_checkpoint(path.parent)


def test_a_checkpoint_of_before_the_state_had_a_sum_is_read(tmp_path: Path) -> None:
    path = save(tmp_path, 2) / "state.json"
    state = json.loads(path.read_text())
    del state["crc32"]
    path.write_text(json.dumps(state, indent=1))
    assert load_checkpoint(path.parent).step == 2


UNREADABLE = [errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENOMEM, errno.EACCES, errno.EINTR]


def fail_to_read(monkeypatch: pytest.MonkeyPatch, file: Path, number: int) -> None:
    """Let every opening of a file fail with an error of the system."""
    opened = io.open

    def fail(path: Any, *arguments: Any, **options: Any) -> Any:
        if Path(path) == file:
            raise OSError(number, os.strerror(number), str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(io, "open", fail)  # pathlib's open
    monkeypatch.setattr(builtins, "open", fail)


@pytest.mark.parametrize("number", UNREADABLE, ids=errno.errorcode.__getitem__)
@pytest.mark.parametrize("file", ["state.json", FILE])
def test_what_the_system_cannot_read_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, number: int
) -> None:
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    with monkeypatch.context() as patch:
        fail_to_read(patch, newest / file, number)
        for load in (load_latest, load_best) if file == "state.json" else (load_latest,):
            with pytest.raises(CheckpointError, match=rf"{file} cannot be read") as caught:
                load(tmp_path)
            assert os.strerror(number) in str(caught.value)
            assert not isinstance(caught.value, DamagedError)
    found = load_latest(tmp_path)
    assert found is not None
    assert found.step == 2


def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)

    def fail(path: Any) -> Any:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))

    monkeypatch.setattr(os, "scandir", fail)
    with pytest.raises(OSError, match="Stale"):
        load_latest(tmp_path)


@pytest.mark.parametrize("number", UNREADABLE, ids=errno.errorcode.__getitem__)
def test_one_failed_read_deletes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    best = save(tmp_path, 1, 1.0)
    for step in (2, 3):
        save(tmp_path, step, 2.0)
    with monkeypatch.context() as patch:
        fail_to_read(patch, best / "state.json", number)
        save(tmp_path, 4, 3.0)
    assert "it is not deleted" in caplog.text
    assert load_best(tmp_path).path == best
    save(tmp_path, 5, 3.0)  # files kept for want of better knowledge go with the next
    assert names(tmp_path) == ["step-00000005", "step-00000004", "step-00000001"]


def test_a_damaged_state_may_be_that_of_the_best(tmp_path: Path) -> None:
    best = save(tmp_path, 1, 1.0)
    flip_loss = (best / "state.json").read_text().replace('"validation_loss": 1.0', '"v": 9.0')
    (best / "state.json").write_text(flip_loss)
    for step in (2, 3, 4):
        save(tmp_path, step, 2.0)
    assert best.is_dir()


def test_what_a_kill_after_the_last_rename_has_left_is_pruned(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step, keep=9)
    left = tmp_path / ".step-00000000-0123abcd.tmp"
    left.mkdir()
    (left / "state.json").write_text("{}")
    prune_checkpoints(tmp_path, 4, 2)
    assert names(tmp_path) == ["step-00000004", "step-00000003"]
    assert not left.exists()


@pytest.mark.parametrize("name", [".step-00000000-0123abcd.tmp", "step-00000002"])
def test_a_fifo_in_the_place_of_a_folder_is_deleted_without_waiting(
    tmp_path: Path, name: str
) -> None:
    save(tmp_path, 1)
    os.mkfifo(tmp_path / name)
    save(tmp_path, 2)
    assert names(tmp_path) == ["step-00000002", "step-00000001"]
    assert not [path for path in tmp_path.iterdir() if path.is_fifo()]


def test_a_link_that_is_left_is_deleted_alone(tmp_path: Path) -> None:
    folder = tmp_path / "of_others"
    folder.mkdir()
    (folder / "kept").touch()
    (tmp_path / ".step-00000000-0123abcd.tmp").symlink_to(folder)
    save(tmp_path, 1)
    assert (folder / "kept").exists()
    assert not (tmp_path / ".step-00000000-0123abcd.tmp").is_symlink()


def test_what_cannot_be_deleted_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        save(tmp_path, step)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_doomed", lambda path: path / "nowhere" / "else")
        assert save(tmp_path, 3).is_dir()
    assert "older checkpoints could not be deleted" in caplog.text
    save(tmp_path, 4)
    assert names(tmp_path) == ["step-00000004", "step-00000003"]


def test_the_names_of_new_folders_are_brought_to_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, sync = set(), os.fsync

    def note(descriptor: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    if not Path("/proc/self/fd").is_dir():
        pytest.skip("the system does not say which file is open")
    monkeypatch.setattr(os, "fsync", note)
    make_folder(tmp_path / "runs" / "a")
    save(tmp_path / "runs" / "a" / "checkpoints", 1)
    for folder in (".", "runs", "runs/a", "runs/a/checkpoints"):
        assert str((tmp_path / folder).resolve()) in synced


def test_a_run_whose_folder_was_removed_begins_no_other(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    with pytest.raises(CheckpointError, match=r"No such file or directory: .*run'; none is there"):
        save(folder, 1)
    assert not (tmp_path / "run").exists()


def test_no_run_is_silently_restarted_when_all_are_damaged(tmp_path: Path) -> None:
    truncate(save(tmp_path, 1) / "state.json")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is intact"):
        load_latest(tmp_path)


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(state | {"format": 99}))
    with pytest.raises(CheckpointError, match="format 99, expected 1"):
        load_checkpoint(path)


def test_what_differs_is_named(tmp_path: Path) -> None:
    found = Checkpoint(tmp_path, {"model": {"layers": 2, "shape": [1, 2]}})
    check_same(found, "model", {"layers": 2, "shape": (1, 2)})
    with pytest.raises(
        CheckpointError, match="the model of this run: layers is 2 there, expected 3"
    ):
        check_same(found, "model", {"layers": 3, "shape": (1, 2)})
    with pytest.raises(CheckpointError, match="vocabulary is None there, expected 5"):
        check_same(found, "tokenizer", {"vocabulary": 5})


def test_arrays_that_differ_are_named(tmp_path: Path) -> None:
    found = Checkpoint(tmp_path, {})
    one, two = {"w": np.ones((2, 3))}, {"w": np.ones((2, 4)), "b": np.ones(1)}
    check_arrays(found, one, one)
    with pytest.raises(CheckpointError, match=r"b is missing; w is float64\[2, 3\] there"):
        check_arrays(found, one, two)
    with pytest.raises(CheckpointError, match="b is not expected"):
        check_arrays(found, two, one)
    for count, end in ((3, "c is missing"), (4, "c is missing and 1 more")):
        arrays = {name: np.ones(1) for name in "abcd"[:count]}
        with pytest.raises(CheckpointError, match=f"a different model: a is missing; .*; {end}$"):
            check_arrays(found, {}, arrays)


def test_a_full_disk_leaves_earlier_checkpoints_whole(tmp_path: Path) -> None:
    save(tmp_path, 1)
    large = {"model": {"a": np.zeros(1 << 20)}}
    message = r"cannot write .*step-00000001 and earlier"
    with full_disk(1 << 20), pytest.raises(CheckpointError, match=message):
        save_checkpoint(tmp_path, 2, large, {}, keep=1)
    assert names(tmp_path) == ["step-00000001"]
    assert not list(tmp_path.glob(".*"))
    assert load_checkpoint(tmp_path / "step-00000001").step == 1


def test_a_full_disk_at_any_file_leaves_earlier_checkpoints_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    for place in ("save_arrays", "replacing", "_crc32"):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, place, full)
            with pytest.raises(CheckpointError, match="No space left"):
                save(tmp_path, 2)
        assert names(tmp_path) == ["step-00000001"]
        assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("place", ["replace_arrays", "to_json"])
def test_older_checkpoints_are_deleted_only_for_one_that_was_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    for step in (1, 2):
        save(tmp_path, step)

    def write_wrongly(path: Path, *arguments: Any, **options: Any) -> dict[str, int]:
        sums = save_arrays(path, *arguments, **options)
        flip(path)
        return sums

    with monkeypatch.context() as patch:
        if place == "to_json":
            patch.setattr(checkpoint, "to_json", lambda *a, **b: to_json(*a, **b)[:-2] + "]}")
        else:
            patch.setattr(checkpoint, "save_arrays", write_wrongly)
        with pytest.raises(
            CheckpointError, match=r"cannot write .*step-00000003: load: .*"
        ) as caught:
            save(tmp_path, 3, keep=1)
        assert "step-00000002 and earlier ones are unchanged" in str(caught.value)
    assert names(tmp_path) == ["step-00000002", "step-00000001"]
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"data": {"key": math.nan}}, "save: data.key is nan, expected a finite number"),
        ({"data": {1: 2, "1": 3}}, "save: data has the key 1, expected text"),
        (
            {"data": {"text": "x" * (1 << 23)}},
            "the state has 8,388,6.. bytes, expected at most 4,194,304",
        ),
        ({"data": ["\udce9"]}, r"data\[0\] is '\\udce9', expected text that fits UTF-8"),
    ],
)
def test_a_state_that_could_not_be_read_again_is_refused(
    tmp_path: Path, state: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        save_checkpoint(tmp_path / "checkpoints", 1, ARRAYS, state)
    assert list(tmp_path.iterdir()) == []


def test_the_largest_state() -> None:
    most = 4_194_304 - len(to_json({"text": ""}, 1))
    check_state({"text": "x" * most})
    with pytest.raises(ArgumentError, match="the state has 4,194,305 bytes, expected at most"):
        check_state({"text": "x" * (most + 1)})


def test_a_process_killed_while_it_saves_loses_nothing(tmp_path: Path) -> None:
    program = (
        "import os, sys, numpy as np; from pathlib import Path\n"
        "from tensorgrad.train import checkpoint\n"
        "from tests.checkpoints import save_checkpoint\n"
        "folder = Path(sys.argv[1])\n"
        "save_checkpoint(folder, 1, {'model': {'a': np.ones(3)}}, {})\n"
        "checkpoint.replacing = lambda path: os.kill(os.getpid(), 9)\n"
        "save_checkpoint(folder, 2, {'model': {'a': np.ones(3)}}, {})\n"
    )
    result = subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=60)
    assert result.returncode == -9
    assert len(list(tmp_path.glob(".step-00000002-*.tmp"))) == 1
    assert load_latest(tmp_path) == load_checkpoint(tmp_path / "step-00000001")
    save(tmp_path, 3)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("arrays", "metadata", "error", "message"),
    [
        ({"__metadata__": np.ones(2)}, {}, ArgumentError, "arrays has '__metadata__'"),
        ({3: np.ones(2)}, {}, ArgumentError, "got 3 as a name or metadata"),
        ({"a": np.ones(2)}, {"b": 3}, ArgumentError, "got 3 as a name or metadata"),
        ({"\ud800": np.ones(2)}, {}, ArgumentError, "expected text that fits UTF-8"),
        ({"a": np.ones(2, ml_dtypes.float8_e5m2)}, {}, DtypeError, "a has dtype float8_e5m2"),
        ({"a": np.ones(2, np.complex128)}, {}, CheckpointError, "complex128"),
    ],
)
def test_what_could_not_be_read_again_replaces_nothing(
    tmp_path: Path, arrays: Any, metadata: Any, error: type[Exception], message: str
) -> None:
    path = tmp_path / "weights.safetensors"
    save_arrays(path, {"a": np.arange(3)})
    with pytest.raises(error, match=message):
        save_arrays(path, arrays, metadata)
    assert load_arrays(path)["a"].tolist() == [0, 1, 2]
    assert not list(tmp_path.glob(".*"))


def test_a_dtype_that_numpy_lacks_is_named(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    header = b'{"a":{"dtype":"F8_E4M3","shape":[8],"data_offsets":[0,8]}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(CheckpointError, match=r"a has an unsupported dtype: .*float8_e4m3fn"):
        load_arrays(path)


def test_weights_are_plain_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    arrays = {
        "strided": np.arange(12, dtype=np.float32).reshape(3, 4).T,
        "empty": np.zeros((0, 3), np.float16),
        "scalar": np.asarray(3, np.int64),
    }
    save_arrays(path, arrays, {"made": "here"})
    assert load_metadata(path) == {"made": "here"}
    for loaded in (load_file(path), load_arrays(path)):
        assert loaded.keys() == arrays.keys()
        for name, array in arrays.items():
            np.testing.assert_array_equal(loaded[name], array, strict=True)
    save_arrays(path, {})  # SGD without momentum has nothing to remember
    assert load_arrays(path) == {}
    with pytest.raises(CheckpointError, match=r"missing\.safetensors does not exist"):
        load_arrays(tmp_path / "missing.safetensors")
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(CheckpointError, match="damaged or not a safetensors file"):
        load_arrays(path)
    with pytest.raises(CheckpointError, match="cannot write"):
        save_arrays(tmp_path / "no" / "folder.safetensors", arrays)


def test_no_flipped_bit_of_weights_goes_unseen(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    arrays = {"a": np.arange(5, dtype=">f4"), "b": np.ones((2, 3), bfloat16), "c": np.asarray(7)}
    save_arrays(path, arrays, {"step": "7"})
    whole, expected = path.read_bytes(), load_arrays(path)
    np.testing.assert_array_equal(expected["a"], arrays["a"])
    for place, byte in enumerate(whole):
        for bit in (1, 4):
            path.write_bytes(whole[:place] + bytes([byte ^ bit]) + whole[place + 1 :])
            try:
                found = load_arrays(path)
            except CheckpointError:
                continue
            # It was space, or the name of the sum.
            assert {name: array.tobytes() for name, array in found.items()} == {
                name: array.tobytes() for name, array in expected.items()
            }
