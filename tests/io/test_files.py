from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tensorgrad.errors import ArgumentError, DataError, DtypeError
from tensorgrad.io.files import (
    delete,
    hidden_name,
    is_locked,
    locked,
    replacing,
    temporary_name,
    to_json,
    write_json,
)
from tensorgrad.io.readers import parse_json, read_json
from tensorgrad.io.weights import save_arrays
from tests.disk import full_disk
from tests.source_tree import ROOT


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_created_and_replaced(tmp_path: Path) -> None:
    for text in (b"first", b"second"):
        with replacing(tmp_path / "a") as file:
            file.write(text)
        assert (tmp_path / "a").read_bytes() == text
    assert names(tmp_path) == ["a"]


def test_json_replaces_a_file_or_leaves_it(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"loss": np.float32(0.5)}, 1)
    assert path.read_text() == '{\n "loss": 0.5\n}\n'
    with pytest.raises(TypeError, match="JSON does not support a set"):
        write_json(path, {"loss": {1}})
    assert path.read_text() == '{\n "loss": 0.5\n}\n'
    write_json(path, [1])
    assert path.read_text() == "[1]\n"
    assert list(tmp_path.iterdir()) == [path]


def test_the_old_file_is_there_until_the_end(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with replacing(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, error: type[BaseException]
) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")

    def write_half() -> None:
        with replacing(path) as file:
            file.write(b"new")
            raise error

    with pytest.raises(error):
        write_half()
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize("size", [2_000, 3_000_000], ids=["at the end", "in between"])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path: Path, size: int) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with full_disk(1_000), pytest.raises(OSError, match="too large"), replacing(path) as file:
        file.write(bytes(size))
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a"]


def test_a_kill_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    script = (
        "import os, sys\nfrom tensorgrad.io.files import replacing\n"
        "with replacing(sys.argv[1]) as file:\n"
        "    file.write(bytes(3_000_000))\n    os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], cwd=ROOT, check=False)
    assert done.returncode == -9
    assert path.read_bytes() == b"old"
    assert [name for name in names(tmp_path) if not name.endswith(".tmp")] == ["a"]


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "none" / "a"):
        raise AssertionError("not reached")


def test_a_new_file_has_the_usual_permissions(tmp_path: Path) -> None:
    (tmp_path / "usual").touch()
    with replacing(tmp_path / "a"):
        pass
    save_arrays(tmp_path / "b", {"x": np.zeros(1)})
    usual = (tmp_path / "usual").stat().st_mode
    assert [(tmp_path / name).stat().st_mode for name in "ab"] == [usual, usual]


@pytest.mark.skipif(sys.platform == "win32", reason="locks are not supported there")
def test_a_lock_is_seen_without_taking_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not is_locked(path)
    assert names(tmp_path) == []
    with locked(path, wait=False):
        assert is_locked(path)
        assert is_locked(path)
        with pytest.raises(BlockingIOError, match="has the lock"), locked(path, wait=False):
            pass
    text = path.read_text()
    assert not is_locked(path)
    assert path.read_text() == text
    path.chmod(0)
    assert not is_locked(path)
    (tmp_path / "link").symlink_to(path)
    assert not is_locked(tmp_path / "link")


@pytest.mark.parametrize("name", ["a" * 255, "\u00e9" * 127, "a" * 250 + ".json"])
def test_the_longest_names_are_written(tmp_path: Path, name: str) -> None:
    write_json(tmp_path / name, {"a": 1})
    write_json(tmp_path / name, {"a": 2})
    save_arrays(tmp_path / f"{name[:100]}.safetensors", {})
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [name, f"{name[:100]}.safetensors"]
    )
    for path in (temporary_name(tmp_path / name), hidden_name(tmp_path / name, ".lock")):
        assert len(os.fsencode(path.name)) <= 255
    assert hidden_name(tmp_path / "a", ".lock").name == ".a.lock"


def test_a_name_that_is_too_long_or_has_a_nul_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="a" * 256):
        write_json(tmp_path / ("a" * 256), {})
    with pytest.raises(DataError, match=r"'.*a\\x00b' is not the name of a file"):
        read_json(tmp_path / "a\0b")
    with pytest.raises(OSError, match="a" * 300):
        read_json(tmp_path / ("a" * 300))


def test_text_is_escaped_or_readable() -> None:
    value = {"text": "für \u2028 \x00 \U0001f600", "numbers": [1, 0.5]}
    assert to_json(value).isascii()
    text = to_json(value, escapes=False)
    assert "für" in text
    assert parse_json(text, "it") == parse_json(to_json(value), "it") == value
    with pytest.raises(ArgumentError, match="expected text that fits UTF-8"):
        to_json({"text": "\ud800"}, escapes=False)


def test_files_folders_and_links_are_deleted_but_not_what_links_lead_to(tmp_path: Path) -> None:
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    (tmp_path / "folder" / "inner" / "file").write_text("a")
    (tmp_path / "link").symlink_to("folder")
    delete(tmp_path / "link")
    assert names(tmp_path) == ["folder"]
    delete(tmp_path / "folder" / "inner" / "file")
    assert names(tmp_path / "folder" / "inner") == []
    delete(tmp_path / "folder")
    delete(tmp_path / "missing")
    assert names(tmp_path) == []


def test_a_value_that_json_cannot_hold_is_named_by_its_place() -> None:
    for value, place in (
        ({"a": {"b": {1}}}, ": a.b is {1}"),
        ({"a": [{1}]}, r": a\[0\] is {1}"),
        ({1}, ": the value is {1}"),
    ):
        with pytest.raises(DtypeError, match=place):
            to_json(value)


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "device").symlink_to("/dev/null")
    (tmp_path / "stream").symlink_to("/proc/self/fd/1")
    before = sorted(os.listdir(tmp_path))
    for name, message in (
        ("fifo", "it is a device, a FIFO, a socket or a stream, expected a file"),
        ("device", "expected a file"),
        ("stream", "expected a file"),
        ("a\0b", "null"),
    ):
        with pytest.raises(OSError, match=message), replacing(tmp_path / name):
            pass
    for path in ("", "/", "."):
        with pytest.raises(OSError, match="directory"), replacing(path):
            pass
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError) as caught, replacing(tmp_path / "folder"):
        pass
    assert (caught.value.filename, caught.value.filename2) == (str(tmp_path / "folder"), None)
    (tmp_path / "folder").rmdir()
    assert sorted(os.listdir(tmp_path)) == before
