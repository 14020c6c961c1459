from __future__ import annotations

from pathlib import Path

import pytest

from tensorgrad.errors import ArgumentError
from tensorgrad.train.command import command, free_folder


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (ArgumentError("--lr: got 0"), 1, "--lr: got 0"),
        (FileNotFoundError("no such file"), 1, "no such file"),
        (UnicodeEncodeError("ascii", "ü", 0, 1, "no such character"), 1, "no such character"),
        (KeyboardInterrupt(), 130, "--resume goes on from the newest checkpoint"),
    ],
)
def test_what_a_user_can_mend_is_one_line(
    error: BaseException, status: int, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    @command
    def fails() -> None:
        raise error

    assert fails() == status
    assert message in caplog.text
    assert len(caplog.records) == 1


def test_a_mistake_in_a_program_keeps_its_traceback() -> None:
    @command
    def program(count: int, *, name: str = "") -> None:
        assert (count, name) == (3, "all")

    assert program(3, name="all") == 0
    with pytest.raises(AssertionError):
        program(4)


def test_folders_are_numbered(tmp_path: Path) -> None:
    for number in (1, 2):
        folder = free_folder(f"{tmp_path}/run")
        assert folder == tmp_path / f"run-{number}"
        folder.mkdir()
