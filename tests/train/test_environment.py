from __future__ import annotations

import json
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tensorgrad.core import backend
from tensorgrad.io.readers import read_json
from tensorgrad.kernels import gpu
from tensorgrad.train import environment as environments
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
    commit("one")
    return folder


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout


def commit(message: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    git(*who, "commit", "-qm", message)


def saved(folder: Path) -> dict[str, Any]:
    save_environment(folder, "cpu", 1)
    found: dict[str, Any] = json.loads((folder / "environment.json").read_text())
    return found


def test_it_says_where_the_run_was_started(tmp_path: Path, checkout: Path) -> None:
    found = saved(tmp_path)
    assert shlex.split(found["command"])[0] == sys.orig_argv[0]
    assert found["python"] == platform.python_version()
    assert found["packages"]["numpy"] == np.__version__
    assert list(found["packages"]) == sorted(found["packages"], key=str.lower)
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
    for lines, left in ((333_333, 999_999), (333_334, 999_999)):
        assert len(environments._cut(b"ab\n" * lines)) == left
    assert len(environments._cut(b"\n" * 1_000_000)) == 1_000_000


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


def trap(marker: Path) -> str:
    """Return an untrusted command, which leaves a file when it is run."""
    return f"sh -c 'touch {marker}; cat' --"


@pytest.mark.parametrize("name", ["checkout", "submodule"])
def test_no_program_of_the_checkout_runs(
    tmp_path: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    marker = tmp_path / "ran"
    folder = checkout
    if name == "submodule":
        git("clone", "-q", str(checkout), "inner")
        git("add", "inner")
        commit("two")
        folder = checkout / "inner"
    program, dot_git = trap(marker), folder / ".git"
    settings = {
        **{f"filter.evil.{kind}": program for kind in ("clean", "smudge", "process")},
        "filter.evil.required": "true",
        **{f"diff.evil.{kind}": program for kind in ("command", "textconv")},
        "diff.external": program,
        "interactive.diffFilter": program,
        "core.fsmonitor": program,
        "core.pager": program,
        "pager.status": program,
        "alias.status": f"!{program}",
        "alias.diff": f"!{program}",
        "core.hooksPath": str(dot_git / "hooks"),
        "core.sshCommand": program,
        "core.editor": program,
        "remote.origin.url": f"ext::{program}",
        "remote.origin.promisor": "true",
        "remote.origin.uploadpack": program,
        "protocol.ext.allow": "always",
        "status.submoduleSummary": "true",
        "diff.submodule": "log",
        "diff.ignoreSubmodules": "none",
    }
    for key, value in settings.items():
        git("-C", str(folder), "config", key, value)
    for hook in ("post-index-change", "fsmonitor-watchman", "query-watchman"):
        (dot_git / "hooks").mkdir(exist_ok=True)
        (dot_git / "hooks" / hook).write_text(f"#!/bin/sh\ntouch {marker}\n")
        (dot_git / "hooks" / hook).chmod(0o755)
    (folder / ".gitattributes").write_text("* filter=evil diff=evil\n")
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", program)
    monkeypatch.setenv("GIT_PAGER", program)
    (folder / "model.py").write_text("layers = 2\n")
    found = saved(tmp_path)["git"]
    assert not marker.exists()
    if name == "checkout":
        assert found["dirty"] is True
        assert "+layers = 2" in (tmp_path / "uncommitted.diff").read_text()
    subprocess.run(["git", "status"], capture_output=True, check=False)
    assert marker.exists()  # the trap works


def test_missing_objects_are_not_fetched(tmp_path: Path, checkout: Path) -> None:
    marker = tmp_path / "ran"
    blob = git("rev-parse", "HEAD:model.py").strip()
    (checkout / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    settings = {
        "extensions.partialClone": "origin",
        "core.repositoryFormatVersion": "1",
        "remote.origin.promisor": "true",
        "remote.origin.url": f"ext::{trap(marker)}",
        "protocol.ext.allow": "always",
    }
    for key, value in settings.items():
        git("config", key, value)
    (checkout / "model.py").write_text("layers = 2\n")
    saved(tmp_path)
    assert not marker.exists()


def test_the_diff_is_that_of_the_folder_with_git_in_it(
    tmp_path: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.py").write_text("password\n")  # the user's file, outside of the checkout
    git("config", "core.worktree", str(tmp_path))
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path))
    assert saved(tmp_path)["git"]["dirty"] is False
    (checkout / "model.py").write_text("layers = 2\n")
    (checkout / "inner").mkdir()
    monkeypatch.chdir(checkout / "inner")
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    assert saved(tmp_path)["git"]["dirty"] is True
    diff = (tmp_path / "uncommitted.diff").read_text()
    assert "password" not in diff
    assert "+layers = 2" in diff


@pytest.mark.parametrize("name", [b"circle", b"a\0b", b"\xff", b"", b"a" * 5000])
@pytest.mark.parametrize("file", [".git", "commondir"])
def test_a_checkout_of_no_folder_is_left(
    tmp_path: Path, checkout: Path, file: str, name: bytes
) -> None:
    (checkout / "circle").symlink_to("circle")
    if file == ".git":
        shutil.rmtree(checkout / ".git")
        (checkout / ".git").write_bytes(b"gitdir: " + name)
    else:
        (checkout / ".git" / "circle").symlink_to("circle")
        (checkout / ".git" / "commondir").write_bytes(name)
    assert saved(tmp_path)["git"] is None


def test_a_checkout_that_hangs_is_left(
    tmp_path: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environments, "_SECONDS", 0.3)
    os.mkfifo(checkout / ".gitattributes")
    (checkout / "model.py").write_text("layers = 2\n")
    began = time.monotonic()
    assert saved(tmp_path)["git"] is None
    assert time.monotonic() - began < 5
    for path in (checkout / ".git").iterdir():
        path.unlink() if path.is_file() else shutil.rmtree(path)
    (checkout / ".git").rmdir()
    os.mkfifo(checkout / ".git")
    assert saved(tmp_path)["git"] is None


def test_honest_settings_count_and_the_index_is_unchanged(
    tmp_path: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git("config", "core.autocrlf", "true")
    (checkout / "model.py").write_bytes(b"layers = 1\r\n")
    git("add", "model.py")
    os.utime(checkout / "model.py", (1, 1))  # so that git reads it again
    before = (checkout / ".git" / "index").read_bytes()
    assert saved(tmp_path)["git"]["dirty"] is False
    git("config", "core.fileMode", "false")
    (checkout / "model.py").chmod(0o755)
    assert saved(tmp_path)["git"]["dirty"] is False
    assert (checkout / ".git" / "index").read_bytes() == before
    git("worktree", "add", "-q", str(tmp_path / "tree"))
    monkeypatch.chdir(tmp_path / "tree")
    (tmp_path / "tree" / "model.py").write_text("layers = 3\n")
    git("add", "model.py")
    found = saved(tmp_path)["git"]
    assert found == {"commit": git("rev-parse", "HEAD").strip(), "dirty": True}
    diff = (tmp_path / "uncommitted.diff").read_text()
    assert diff == git("diff", "HEAD")


def test_a_working_directory_may_be_gone(
    tmp_path: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkout / "gone").mkdir()
    monkeypatch.chdir(checkout / "gone")
    (checkout / "gone").rmdir()
    assert saved(tmp_path)["git"] is None
