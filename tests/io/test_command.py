"""Programs exit with a clear status and at most one line of error message."""

from __future__ import annotations

import errno
import importlib
import io
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tensorgrad.core import backend
from tensorgrad.errors import ArgumentError
from tensorgrad.io.command import (
    _cut,
    aligned,
    columns_of,
    command,
    drop_unwritten_output,
    open_standard_streams,
    printable,
    status_and_line,
)
from tests.source_tree import ROOT


class PanicException(BaseException):
    """Rust's panic, which tokenizers raises."""


def noted(error: BaseException, note: str) -> BaseException:
    error.add_note(note)
    return error


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (ArgumentError("--lr: got 0"), 1, "--lr: got 0"),
        (FileNotFoundError("no such file"), 1, "no such file"),
        (UnicodeEncodeError("ascii", "ü", 0, 1, "no such character"), 1, "no such character"),
        (UnicodeEncodeError("ascii", "ü", 0, 1, "why"), 1, "PYTHONIOENCODING=utf-8"),
        (noted(KeyboardInterrupt(), "--resume continues"), 130, "--resume continues"),
        (RuntimeError("can't start new thread"), 1, "(ulimit -u)"),
        (PanicException("ThreadPoolBuildError { kind: ... }"), 1, "TOKENIZERS_PARALLELISM=false"),
        (MemoryError("Out of memory allocating 5 bytes."), 1, "allocating 5 bytes; expected more"),
    ],
)
def test_what_a_user_can_fix_is_one_line(
    error: BaseException, status: int, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    @command
    def fails() -> None:
        raise error

    assert fails() == status
    assert message in caplog.text
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("error", "status"), [(KeyboardInterrupt(), 130), (BrokenPipeError(errno.EPIPE, "pipe"), 141)]
)
def test_what_needs_no_words_has_none(
    error: BaseException, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    @command
    def fails() -> None:
        raise error

    assert fails() == status
    assert caplog.records == []


def test_a_program_may_choose_its_status() -> None:
    assert command(lambda: 3)() == 3
    assert command(lambda: None)() == 0


def test_another_ctrl_c_ends_a_program_at_once() -> None:
    def program() -> int:
        return 0

    before = signal.getsignal(signal.SIGINT)
    try:
        command(program)()
        assert signal.getsignal(signal.SIGINT) is before  # a function of another module
        program.__module__ = "__main__"
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        command(program)()
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        signal.signal(signal.SIGINT, before)
        command(program)()
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGINT, before)


def test_output_that_cannot_be_written_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full")
    with open("/dev/full", "w", encoding="utf-8") as stream:
        stream.write("text")
        monkeypatch.setattr(sys, "stdout", stream)
        before = len(os.listdir("/proc/self/fd"))
        drop_unwritten_output()
        assert len(os.listdir("/proc/self/fd")) == before
        assert os.path.samestat(os.fstat(stream.fileno()), os.stat(os.devnull))


def test_columns_of_text_on_a_terminal() -> None:
    texts = ["", "abc", "総和", "e\u0301", "a\u200d", "\uff21", "\U0001f600"]
    assert [columns_of(text) for text in texts] == [0, 3, 4, 1, 1, 2, 2]
    assert _cut("x" * 4000) == "x" * 4000
    assert _cut("a" * 2000 + "b" + "c" * 2000) == f"{'a' * 2000} [...] {'c' * 2000}"


def test_a_mistake_in_a_program_keeps_its_traceback() -> None:
    @command
    def program(count: int, *, name: str = "") -> None:
        assert (count, name) == (3, "all")

    assert program(3, name="all") == 0
    with pytest.raises(AssertionError):
        program(4)


def line_of(error: BaseException) -> str:
    found = status_and_line(error)
    assert found is not None
    return found[1]


def test_an_environment_variable_that_stops_the_import_of_a_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "strange.py").write_text("int('zzz')")
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    with pytest.raises(ValueError, match="zzz") as caught:
        importlib.import_module("strange")
    assert status_and_line(caught.value) is None
    monkeypatch.setenv("STRANGE_SIZE", "zzz")
    status, line = status_and_line(caught.value) or (0, "")
    assert status == 1
    assert line.startswith("STRANGE_SIZE: got 'zzz', expected values that strange accepts (ValueEr")


def test_memory_that_is_used_up_is_said_with_what_was_allocated() -> None:
    try:
        np.empty(2**60, np.int8)
    except MemoryError as error:
        line = line_of(error)
    assert "Unable to allocate 1.00 EiB for an array with shape (1152921504606846976,)" in line
    assert "--batch" in line
    try:
        [0] * 2**62  # Python does not say what it was to allocate
    except MemoryError as error:
        line = line_of(error)
    assert f"at {__file__}" in line


@pytest.mark.gpu
def test_memory_of_the_gpu_that_is_used_up_is_said_likewise() -> None:
    try:
        backend.cupy.empty(2**50, np.int8)
    except Exception as error:
        line = line_of(error)
    assert "Out of memory allocating 1,125,899,906,842,624 bytes" in line
    assert "--batch" in line


def test_streams_that_are_closed_are_opened_on_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    open_standard_streams()
    with sys.stdin, sys.stdout, sys.stderr:
        assert sys.stdin.read() == ""
        assert sys.stdout.write("für") == sys.stderr.write("für")


def test_characters_that_the_output_cannot_take_are_escaped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert printable("für") == "für"
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert printable("für") == r"f\xfcr"


CONTROLS = "a\x1b]0;title\x07\r\n\tb\x9b1m\u202ec\u2066d\x7f e\u0301 \U0001f469\u200d\U0001f680"
ESCAPED = (
    "a\\x1b]0;title\\x07\\r\n\tb\\x9b1m\\u202ec\\u2066d\\x7f e\u0301 \U0001f469\u200d\U0001f680"
)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_terminal_gets_no_control_characters(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr(output, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stdout", output)
    assert printable(CONTROLS) == (ESCAPED if is_terminal else CONTROLS)


def test_a_message_has_a_length_that_is_read(caplog: pytest.LogCaptureFixture) -> None:
    @command
    def fails() -> None:
        raise ArgumentError(f"--data: got {'x' * 100_000}, expected a file")

    assert fails() == 1
    (message,) = caplog.messages
    assert len(message) < 4100
    assert message.startswith("--data: got x")
    assert message.endswith("x, expected a file")


def test_messages_have_no_control_characters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @command
    def fails() -> None:
        raise ArgumentError(CONTROLS)

    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    assert fails() == 1
    assert capsys.readouterr().err == f"{ESCAPED}\n"


def test_tables_are_aligned_with_wide_and_combined_characters() -> None:
    rows = ["| op | ms |", "|---|--:|", "| 総和 | 1 |", "| e\u0301 | 10.25 |", "| a \\| b | |"]
    table = "\n".join(["before", *rows, "after"])
    assert aligned(table).splitlines() == [
        "before",
        "| op     |    ms |",
        "| ------ | ----: |",
        "| 総和   |     1 |",
        "| e\u0301      | 10.25 |",
        "| a \\| b |       |",
        "after",
    ]


PROGRAM = f"{sys.executable} -m tensorgrad plan --preset gpt2-124M"


@pytest.mark.parametrize(
    ("shell", "status", "message"),
    [
        ("{program} <&- 2>&- >&-", 0, ""),
        ("{program} >&{closed_pipe}", 141, ""),
        ("{program} --help >&{closed_pipe}; exit $(($? == 120))", 0, ""),  # 120 is Python's own
        ("{program} >/dev/full", 1, "No space left on device"),
        ("{program} --dp 0 2>/dev/full", 1, ""),
        ("{program} --dp 0 2>&-", 1, ""),
        ("cd {folder}; rmdir {folder}; env -u HOME TERM=dumb LC_ALL=C {program} >&-", 0, ""),
    ],
)
def test_streams_and_places_that_a_shell_may_give(
    shell: str, status: int, message: str, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    reader, pipe = os.pipe()
    os.close(reader)
    done = subprocess.run(
        ["bash", "-c", shell.format(program=PROGRAM, folder=folder, closed_pipe=pipe)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        pass_fds=[pipe],
        capture_output=True,
        text=True,
        timeout=120,
    )
    os.close(pipe)
    assert done.returncode == status, done.stderr
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == bool(message), done.stderr
