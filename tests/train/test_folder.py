from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tensorgrad.errors import ArgumentError, CheckpointError
from tensorgrad.io.files import check_writable, locked
from tensorgrad.train import folder as folders
from tensorgrad.train.folder import hold, run_folder
from tests.disk import full_disk
from tests.source_tree import ROOT
from tests.train.tiny_run import make_trainer

HOLDER = """
import sys, time
from pathlib import Path
from tensorgrad.train.folder import hold
with hold(Path(sys.argv[1])):
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_is_told_who_trains_there(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, steps=6)
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        message = f"another process trains in {tmp_path}: process {other.pid} on .* has the lock"
        for take in (hold, run_folder):
            with pytest.raises(CheckpointError, match=message), take(tmp_path):
                raise AssertionError("not reached")
        with pytest.raises(CheckpointError, match=message):
            trainer.run()
        other.kill()  # its lock ends with it
    assert trainer.run().finished


def test_a_new_run_takes_a_folder_without_files(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folders.check_new_folder(folder)
    folder.mkdir()
    (folder / ".hidden").touch()
    folders.check_new_folder(folder)
    for name, message in (
        ("notes", "expected a new folder"),
        ("config.json", "holds a run, expected a new folder$"),
        ("metrics.jsonl", "holds a run, expected a new folder$"),
    ):
        (folder / name).touch()
        with pytest.raises(ArgumentError, match=message):
            folders.check_new_folder(folder)
    with pytest.raises(ArgumentError, match=r"to .*: --resume"):
        folders.check_new_folder(folder, resumable=True)


def test_folders_are_numbered(tmp_path: Path) -> None:
    for number in (1, 2):
        folder = folders.free_folder(f"{tmp_path}/run")
        assert folder == tmp_path / f"run-{number}"
        folder.mkdir()


def test_what_is_in_the_way_of_a_new_run_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def said(**options: Any) -> str:
        with pytest.raises(ArgumentError) as caught:
            folders.check_new_folder(folder, **options)
        return str(caught.value)

    folder.touch()
    assert said(option="--to").startswith(f"--to: {folder} is a file, expected a new folder or")
    folder.unlink()
    folders.check_new_folder(folder / "below")
    assert not folder.exists()
    folder.mkdir()
    for name in ("c", "a", "b"):
        (folder / name).touch()
    files = f"--out: {folder} holds files (a, b, c"
    assert said().startswith(f"{files}), expected a new folder or an empty one")
    (folder / "d").touch()
    assert said().startswith(f"{files}, ...), expected")
    folders.check_new_folder(folder, is_own=lambda path: path.name in "abcd")
    (folder / "config.json").touch()
    (folder / "model.safetensors").touch()  # config.json is that of an exported model
    assert "holds files (a, b, c, ...)" in said()
    (folder / "metrics.jsonl").touch()
    run = f"--out: {folder} holds a run, expected a new folder"
    assert said() == run
    start = f"{run}; to start it at step 0, as it has no checkpoint: --resume {folder}"
    assert said(resumable=True) == start
    (folder / "checkpoints" / "step-00000001").mkdir(parents=True)
    assert said(resumable=True) == f"{run}; to resume it: --resume {folder}"


def test_a_process_holds_a_folder_once(tmp_path: Path) -> None:
    with hold(tmp_path):
        with hold(tmp_path / "." / ""):
            pass
        assert folders._held
    assert not folders._held


def test_a_lock_follows_no_symbolic_link(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("of another user")
    (tmp_path / "lock").symlink_to(other)
    for wait in (True, False):
        with pytest.raises(OSError, match="symbolic links"), locked(tmp_path / "lock", wait=wait):
            raise AssertionError("not reached")
    assert other.read_text() == "of another user"


def test_a_lock_whose_file_was_removed_is_of_nothing(tmp_path: Path) -> None:
    with hold(tmp_path):
        (tmp_path / ".lock").unlink()
        with locked(tmp_path / ".lock", wait=False) as found:  # another file, and another lock
            assert found


def test_a_folder_that_holds_nothing_is_removed_again(tmp_path: Path) -> None:
    def fail() -> None:
        with run_folder(tmp_path / "runs" / "a"):
            raise ValueError("no data")

    with pytest.raises(ValueError, match="no data"):
        fail()
    assert not (tmp_path / "runs" / "a").exists()
    with run_folder(tmp_path / "runs" / "a"):
        (tmp_path / "runs" / "a" / "config.json").touch()
    assert (tmp_path / "runs" / "a" / "config.json").exists()
    settings = make_trainer(tmp_path).settings
    with run_folder(tmp_path / "b", settings=settings):
        assert {path.name for path in (tmp_path / "b").iterdir()} == {".lock", "config.json"}
    assert not (tmp_path / "b").exists()  # a new run that has written nothing else


def test_other_ranks_leave_the_folder_to_the_first(tmp_path: Path) -> None:
    with run_folder(tmp_path / "a", is_main=False):
        assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("place", ["file", "file/below", "link"])
def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "else")
    with (
        pytest.raises(ArgumentError, match=r"cannot write to .*, expected a folder that can be"),
        run_folder(tmp_path / place),
    ):
        raise AssertionError("not reached")


def test_a_full_disk_is_found_before_any_work(tmp_path: Path) -> None:
    with (
        full_disk(100),
        pytest.raises(ArgumentError, match=r"cannot write to .*run: File too large"),
        run_folder(tmp_path / "run"),
    ):
        raise AssertionError("not reached")


def test_a_read_only_folder_is_found_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever runs the tests may be root, who can write everywhere."""

    def refuse(folder: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(folder))

    monkeypatch.setattr(folders, "check_writable", refuse)
    with pytest.raises(ArgumentError, match="Read-only file system"), run_folder(tmp_path):
        raise AssertionError("not reached")


@pytest.mark.skipif(os.geteuid() == 0, reason="root can write everywhere")
def test_a_folder_without_the_right_to_write_is_an_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError):
        check_writable(tmp_path)


def test_trying_to_write_leaves_nothing(tmp_path: Path) -> None:
    check_writable(tmp_path)
    assert list(tmp_path.iterdir()) == []
