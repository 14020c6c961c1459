from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType

import pytest

from tensorgrad.startup.interrupt import uninterrupted
from tests.ranks import run_ranks
from tests.source_tree import ROOT


class Stopped(Exception):
    """An exception that a handler of a program may raise."""


def stop(number: int, frame: FrameType | None) -> None:
    raise Stopped


def during(numbers: list[signal.Signals], done: list[str]) -> None:
    with uninterrupted():
        for number in numbers:
            signal.raise_signal(number)
            done.append(number.name)


def test_ctrl_c_waits_for_the_end_of_the_block() -> None:
    before, done = signal.getsignal(signal.SIGINT), list[str]()
    with pytest.raises(KeyboardInterrupt):
        during([signal.SIGINT, signal.SIGINT], done)
    assert done == ["SIGINT", "SIGINT"]
    assert signal.getsignal(signal.SIGINT) is before


def test_handlers_of_a_program_wait_and_are_all_restored() -> None:
    """Also where the first of them raises."""
    numbers = [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1]
    before = {number: signal.signal(number, stop) for number in numbers}
    done: list[str] = []
    try:
        with pytest.raises(Stopped):
            during(numbers, done)
        assert len(done) == 3
        assert all(signal.getsignal(number) is stop for number in numbers)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_blocks_nest() -> None:
    done: list[str] = []

    def nested() -> None:
        with uninterrupted():
            during([signal.SIGINT], done)
            done.append("outer")

    with pytest.raises(KeyboardInterrupt):
        nested()
    assert done == ["SIGINT", "outer"]


def test_a_signal_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        during([signal.SIGINT], [])
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_need_no_block() -> None:
    seen = []

    def run() -> None:
        with uninterrupted():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]


PROGRAMS = [
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "examples").glob("*.py")),
    "-m tensorgrad.kernels.compile",
    "-m tensorgrad.kernels.tune",
    "-m tensorgrad.parallel.merge",
    "-m tensorgrad.parallel.planning.plan",
]


def interrupting(folder: Path, module: str) -> dict[str, str]:
    """Return an environment in which the import of a module is stopped by Ctrl-C."""
    (folder / f"{module}.py").write_text("import signal; signal.raise_signal(signal.SIGINT)")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}


def test_there_are_programs() -> None:
    assert len(PROGRAMS) > 10


@pytest.mark.parametrize("program", PROGRAMS)
def test_ctrl_c_in_the_imports_ends_a_program_quietly(program: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, *program.split()],
        cwd=ROOT,
        env=interrupting(tmp_path, "ml_dtypes"),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_ctrl_c_in_an_import_does_not_end_an_interactive_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupting(tmp_path, "interrupted_module")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KeyboardInterrupt) as caught:
        exec("import interrupted_module")
    error = caught.value
    with pytest.raises(SystemExit) as end:
        sys.excepthook(type(error), error, error.__traceback__)
    assert end.value.code == 130
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    sys.excepthook(type(error), error, error.__traceback__)
    assert "KeyboardInterrupt" in capsys.readouterr().err


def test_ctrl_c_in_a_program_of_a_user_has_its_traceback(tmp_path: Path) -> None:
    """It may say where the program was."""
    code = "import tensorgrad, signal\nsignal.raise_signal(signal.SIGINT)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert done.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in done.stderr


@pytest.mark.mpi
def test_ctrl_c_in_the_imports_ends_ranks_quietly(tmp_path: Path) -> None:
    environment = interrupting(tmp_path, "tokenizers")
    done = run_ranks("examples/train_gpt2_dp.py", 2, env=environment, check=False)
    assert done.returncode == 130
    assert done.stderr in ("", "rank 0 of 2: uncaught KeyboardInterrupt, all ranks end\n")
