"""The folder of an untrusted run, with links that lead out of it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tensorgrad.errors import CheckpointError, DataError, TensorgradError
from tensorgrad.report import read_run, write_report
from tensorgrad.train.checkpoint import list_checkpoints, load_checkpoint, load_latest
from tensorgrad.train.folder import hold
from tensorgrad.train.log import StepLog, read_metrics, read_samples
from tests.report.made_run import make_run
from tests.train.tiny_run import make_trainer

SECRET = '{"step": 1, "loss": 0.5, "secret": 1, "prompt": "secret", "text": "secret"}\n' * 3


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two steps, with a checkpoint at each."""
    folder = tmp_path_factory.mktemp("links") / "run"
    make_trainer(folder, steps=2, warmup=0, checkpoint_every=1).run()
    return folder


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file of the user."""
    path = tmp_path / "secret.txt"
    path.write_text(SECRET)
    return path


def resume(folder: Path) -> None:
    trainer = make_trainer(folder, steps=3, warmup=0, checkpoint_every=1)
    trainer.resume()
    trainer.run()


@pytest.mark.parametrize("link", [os.symlink, os.link])
@pytest.mark.parametrize("name", ["metrics.jsonl", "times.jsonl", "samples.jsonl", ".lock"])
def test_resume_refuses_a_linked_file(
    tmp_path: Path, trained: Path, secret: Path, name: str, link: Callable[[Path, Path], None]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    (folder / name).unlink(missing_ok=True)
    link(secret, folder / name)
    with pytest.raises((DataError, OSError), match=name.removeprefix(".")):
        resume(folder)
    assert secret.read_text() == SECRET


@pytest.mark.parametrize("name", ["metrics.jsonl", "times.jsonl", "samples.jsonl"])
def test_a_dangling_link_makes_no_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to(tmp_path / "new")
    with pytest.raises(DataError, match=f"{name} is a symbolic link"):
        StepLog(tmp_path / name, 0)
    assert not (tmp_path / "new").exists()


def test_files_that_a_run_writes_whole_replace_links(
    tmp_path: Path, trained: Path, secret: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    for name in ("environment.json", "uncommitted.diff", "loss.png", "report.html"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(secret)
    resume(folder)
    write_report(folder)
    assert secret.read_text() == SECRET
    assert not (folder / "environment.json").is_symlink()
    assert not (folder / "report.html").is_symlink()


def test_a_report_shows_nothing_through_links(tmp_path: Path, secret: Path) -> None:
    folder = make_run(tmp_path / "run")
    for name in ("uncommitted.diff", "metrics.jsonl", "times.jsonl", "samples.jsonl"):
        (folder / name).unlink()
        (folder / name).symlink_to(secret)
    for name in ("facts.json", "environment.json"):
        (tmp_path / name).write_text('{"git": {"commit": "secret"}, "layers": "secret"}')
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(tmp_path / name)
    run = read_run(folder)
    assert "secret" not in write_report(folder).read_text().replace("secret.txt", "")
    assert sum("symbolic link" in note for note in run.notes) == 6
    for read in (read_metrics, read_samples):
        with pytest.raises(DataError, match="is a symbolic link"):
            read(folder / "samples.jsonl")
    shutil.copy(folder / "config.json", tmp_path / "config.json")
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(tmp_path / "config.json")
    assert not read_run(folder).config


def test_linked_checkpoints_are_refused(tmp_path: Path, trained: Path) -> None:
    mine, folder = tmp_path / "mine", tmp_path / "run"
    shutil.copytree(trained, folder)
    (folder / "checkpoints").rename(mine)
    (mine / ".step-00000009-abcd.tmp").mkdir()  # a leftover would be deleted
    (folder / "checkpoints").symlink_to(mine)
    before = sorted(mine.rglob("*"))
    for use in (
        resume,
        lambda run: make_trainer(run, steps=3, warmup=0, keep=1).run(),
        lambda run: load_latest(run / "checkpoints"),
    ):
        with pytest.raises(TensorgradError, match="checkpoints is a symbolic link"):
            use(folder)
    assert sorted(mine.rglob("*")) == before


@pytest.mark.parametrize("name", ["", "state.json", "rank-00000.safetensors"])
def test_links_in_a_checkpoint_are_refused(tmp_path: Path, trained: Path, name: str) -> None:
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    newest = list_checkpoints(folder / "checkpoints")[0]
    (newest / name).rename(tmp_path / "moved")
    (newest / name).symlink_to(tmp_path / "moved")
    with pytest.raises((CheckpointError, DataError), match="is a symbolic link"):
        load_checkpoint(newest) if name else list_checkpoints(folder / "checkpoints")


def test_a_hard_linked_lock_is_not_written(tmp_path: Path, secret: Path) -> None:
    os.link(secret, tmp_path / ".lock")
    with pytest.raises(OSError, match=r"hard link.*\.lock"), hold(tmp_path):
        raise AssertionError("not reached")
    assert secret.read_text() == SECRET
