from __future__ import annotations

import json
import logging
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tensorgrad import backend, gpu
from tensorgrad.readers import read_json
from tensorgrad.train.environment import environment, save_environment
from tests.disk import full_disk


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a git checkout with one commit, which is the working directory."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    (folder / "model.py").write_text("layers = 1\n")
    git("init", "-q")
    git("add", "model.py")
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    git(*who, "commit", "-qm", "one")
    return folder


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout


def saved(folder: Path) -> dict[str, Any]:
    save_environment(folder, "cpu", 1)
    found: dict[str, Any] = json.loads((folder / "environment.json").read_text())
    return found


def test_it_says_where_the_run_was_started(tmp_path: Path, checkout: Path) -> None:
    found = saved(tmp_path)
    assert shlex.split(found["command"])[0] == sys.orig_argv[0]
    assert found["python"] == platform.python_version()
    assert found["packages"]["numpy"] == np.__version__
    assert (found["device"], found["ranks"]) == ("cpu", 1)
    assert found["gpu"] is found["driver"] is found["cuda"] is None
    assert found["git"] == {"commit": git("rev-parse", "HEAD").strip(), "dirty": False}
    assert not (tmp_path / "uncommitted.diff").exists()
    assert list(found) == [
        *("command", "python", "platform", "packages", "device", "gpu", "driver", "cuda", "ranks"),
        "git",
    ]


def test_changes_are_in_a_diff_which_is_of_the_newest_start(tmp_path: Path, checkout: Path) -> None:
    (checkout / "new.txt").write_text("not in the commit")
    assert saved(tmp_path)["git"]["dirty"] is False
    (checkout / "model.py").write_text("layers = 2\n")
    assert saved(tmp_path)["git"]["dirty"] is True
    assert "-layers = 1\n+layers = 2\n" in (tmp_path / "uncommitted.diff").read_text()
    git("checkout", "-q", "model.py")
    saved(tmp_path)
    assert not (tmp_path / "uncommitted.diff").exists()


def test_a_long_diff_is_cut_to_a_megabyte(tmp_path: Path, checkout: Path) -> None:
    (checkout / "model.py").write_text("layers = 3\n" * 200_000)
    saved(tmp_path)
    diff = (tmp_path / "uncommitted.diff").read_bytes()
    assert 999_000 < len(diff) <= 1_000_000
    assert diff.endswith(b"+layers = 3\n")


def test_without_a_checkout_or_git_there_is_no_commit(
    tmp_path: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "")
        assert saved(tmp_path)["git"] is None
    git("update-ref", "-d", "HEAD")  # no commit yet
    assert saved(tmp_path)["git"] is None
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert saved(tmp_path)["git"] is None


def test_a_full_disk_is_a_warning(
    tmp_path: Path, checkout: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with full_disk(10), caplog.at_level(logging.WARNING):
        save_environment(tmp_path, "cpu", 1)
    assert "the environment of the run is not saved" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["checkout"]


def test_a_gpu_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = SimpleNamespace(
        getDeviceProperties=lambda index: {"name": b"NVIDIA H200"}, runtimeGetVersion=lambda: 13020
    )
    cupy: Any = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    monkeypatch.setattr(backend, "cupy", cupy)
    monkeypatch.setattr(backend, "gpu_index", lambda device: 0)
    monkeypatch.setattr(gpu, "driver_version", lambda: "580.1")
    found = environment("cuda:0", 8)
    assert (found["gpu"], found["driver"], found["cuda"]) == ("NVIDIA H200", "580.1", "13.2")
    assert found["ranks"] == 8


def test_a_command_that_is_not_utf8_is_saved_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", "--resume", "caf\udce9"])
    save_environment(tmp_path, "cpu", 1)
    assert read_json(tmp_path / "environment.json")["command"] == "python --resume 'caf\\udce9'"
