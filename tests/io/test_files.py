from __future__ import annotations

import errno
import fcntl
import math
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tensorgrad.errors import ArgumentError, DataError, DtypeError
from tensorgrad.io.files import (
    check_writable,
    delete,
    finite,
    hidden_name,
    is_locked,
    is_utf8,
    locked,
    make_folder,
    replacing,
    shown,
    sync_folder,
    temporary_name,
    to_json,
    write_json,
)
from tensorgrad.io.readers import JSON_DEPTH, parse_json, read_json
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
    assert is_locked(tmp_path / "link") is False
    with pytest.raises(OSError, match="link"), locked(tmp_path / "link", wait=False):
        pass
    path.chmod(0o600)
    assert is_locked(path) is False
    assert text == f"process {os.getpid()} on {platform.node()}"
    path.write_text("a longer text than the name of a process " * 9)
    with locked(path, wait=True) as held:
        assert held is True
        assert path.read_text() == text
    os.link(path, tmp_path / "second")
    with pytest.raises(OSError, match="it has a second name, a hard link"), locked(path, wait=True):
        pass


@pytest.mark.skipif(sys.platform == "win32", reason="locks are not supported there")
def test_file_systems_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lock"
    opened = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    for number, supported in ((errno.ENOLCK, False), (errno.EIO, True)):

        def fail(*_: object, number: int = number) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr("fcntl.flock", fail)
        if supported:
            with pytest.raises(OSError, match=f"error.*{path}"), locked(path, wait=False):
                pass
        else:
            with locked(path, wait=False) as held:
                assert held is False
            assert path.read_text() == ""
        assert is_locked(path) is False
    if sys.platform == "linux":
        assert len(os.listdir("/proc/self/fd")) == opened


@pytest.mark.skipif(sys.platform == "win32", reason="locks are not supported there")
def test_a_lock_file_that_was_removed_meanwhile_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, calls = tmp_path / "lock", []
    flock = fcntl.flock

    def late(descriptor: int, how: int) -> None:
        calls.append(how)
        flock(descriptor, how)
        if len(calls) == 1:
            path.unlink()
        elif len(calls) == 2:
            path.rename(tmp_path / "old")
            path.touch()

    monkeypatch.setattr("fcntl.flock", late)
    with locked(path, wait=True) as held:
        assert held
        assert path.read_text().startswith("process ")
    assert calls == [fcntl.LOCK_EX] * 3


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


def test_numbers_and_depths_at_the_bounds_of_json() -> None:
    fits = [2**64 - 1, -(2**63), np.uint64(2**64 - 1), 1.5, np.float16(0.5), np.bool_(True), None]
    assert to_json(
        fits
    ) == "[18446744073709551615, -9223372036854775808, 18446744073709551615, " + (
        "1.5, 0.5, true, null]"
    )
    for value, message in (
        (2**64, "x: the value is an integer of 65 bits, expected -2.63 to 2.64 - 1"),
        (-(2**63) - 1, "x: the value is an integer of 64 bits"),
        (10**5000, "x: the value is an integer of 16610 bits"),
        ({"a": math.nan}, "x: a is nan, expected a finite number of at most 64 bits"),
        ([math.inf], r"x: \[0\] is inf, expected a finite number"),
        (np.longdouble(1) / 3, "expected a finite number of at most 64 bits"),
        ({"a": {3: 1}}, "x: a has the key 3, expected text that fits UTF-8"),
        ({"\ud800": 1}, r"x: the value has the key '\\ud800', expected text"),
        ({"a": "\ud800"}, r"x: a is '\\ud800', expected text that fits UTF-8"),
    ):
        with pytest.raises(ArgumentError, match=message):
            to_json(value, op="x")
    deep: object = 1
    for _ in range(JSON_DEPTH - 1):
        deep = [deep]
    assert to_json(deep).count("[") == JSON_DEPTH - 1
    with pytest.raises(ArgumentError, match=r"x: \[0\]\[0\].* is nested more than 64 deep, expect"):
        to_json([deep], op="x")
    assert to_json({"a": (1, 2)}, 2) == '{\n  "a": [\n    1,\n    2\n  ]\n}'
    with pytest.raises(ArgumentError, match="to_json: the value is nan"):
        to_json(math.nan)


def test_a_json_file_has_a_limit(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", "abcde", limit=8)
    assert (tmp_path / "a.json").read_text() == '"abcde"\n'
    with pytest.raises(
        ArgumentError, match=r"a\.json: the content has 9 bytes, expected at most 8"
    ):
        write_json(tmp_path / "a.json", "abcdef", limit=8)


def test_values_are_shown_in_part_and_made_finite() -> None:
    assert shown([1, 2, 3], 5) == "[1, 2"
    assert shown(10**5000, 80) == "a int of very many digits"
    given = {"a": math.nan, "b": np.float32(np.inf), "c": 1.5, "d": "x", "e": 3}
    assert finite(given) == {"a": None, "b": None, "c": 1.5, "d": "x", "e": 3}
    assert is_utf8("ä")
    assert not is_utf8("\udcff")


def test_folders_are_made_and_checked(tmp_path: Path) -> None:
    make_folder(tmp_path / "a" / "b" / "c")
    make_folder(tmp_path / "a" / "b" / "c")
    assert (tmp_path / "a" / "b" / "c").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        make_folder(tmp_path / "file" / "x")
    check_writable(tmp_path)
    assert names(tmp_path) == ["a", "file"]
    with pytest.raises(OSError, match="none") as caught:
        check_writable(tmp_path / "none")
    assert caught.value.filename == str(tmp_path / "none")
    with full_disk(1000), pytest.raises(OSError, match="too large") as caught:
        check_writable(tmp_path)
    assert caught.value.filename == str(tmp_path)


def test_folders_are_synced_where_that_is_supported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    error: list[int] = []

    def fsync(descriptor: int) -> None:
        synced.append(descriptor)
        if error:
            raise OSError(error[0], os.strerror(error[0]))

    monkeypatch.setattr("os.fsync", fsync)
    sync_folder(tmp_path)
    assert len(synced) == 1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(synced[0])
    error.append(errno.EINVAL)
    sync_folder(tmp_path)
    error[0] = errno.EIO
    with pytest.raises(OSError, match=str(tmp_path)):
        sync_folder(tmp_path)
    with pytest.raises(FileNotFoundError):
        sync_folder(tmp_path / "none")

    def refuse(*_: object) -> int:
        raise PermissionError

    monkeypatch.setattr("os.open", refuse)
    sync_folder(tmp_path)  # a folder that cannot be listed


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
