from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from tests.ranks import run_each, run_ranks

pytestmark = pytest.mark.mpi


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_ranks_run_the_script_with_its_arguments_and_one_thread(tmp_path: Path) -> None:
    script = write(
        tmp_path / "hello.py",
        "import os, sys\n"
        "from mpi4py import MPI\n"
        "import tensorgrad\n"
        "world = MPI.COMM_WORLD\n"
        "print(f'{world.rank}/{world.size} {sys.argv[1]} {os.environ[\"OMP_NUM_THREADS\"]}')\n",
    )
    out = run_ranks(script, 2, ["hello"]).stdout
    assert sorted(out.splitlines()) == ["0/2 hello 1", "1/2 hello 1"]


def test_a_failing_rank_fails_the_test_with_its_output(tmp_path: Path) -> None:
    script = write(tmp_path / "fails.py", "raise SystemExit('a rank says no')\n")
    with pytest.raises(AssertionError, match="a rank says no"):
        run_ranks(script, 2)
    assert run_ranks(script, 2, check=False).returncode != 0


def test_several_runs_keep_what_each_says_apart(tmp_path: Path) -> None:
    script = write(
        tmp_path / "says.py",
        "import os, sys\n"
        "print(f'{os.getpid()} {sys.argv[1]}', file=sys.stderr)\n"
        "sys.exit(sys.argv[2] if sys.argv[2] == 'no' else int(sys.argv[2]))\n",
    )
    first, second, third = run_each(script, 2, [["a", 0], ["b", 3], ["c", "no"]], tmp_path)
    assert [result.returncode for result in (first, second, third)] == [0, 3, 1]
    said = [result.stderr.split() for result in (first, second, third)]
    assert said[0][1::2] == ["a", "a"]
    assert said[1] == [said[0][0], "b", said[0][2], "b"]  # by the same processes
    assert said[2].count("no") == 2


def test_ranks_that_hang_are_all_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = write(
        tmp_path / "hangs.py",
        "import os, pathlib, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('still here', flush=True)\n"
        f"pathlib.Path({str(tmp_path)!r}, f'{{os.getpid()}}.pid').touch()\n"
        "time.sleep(1000)\n",
    )

    class FromWhenTheyHang(subprocess.Popen[str]):
        """A launcher whose time begins when both ranks are there, however busy the machine is."""

        def communicate(
            self, input: str | None = None, timeout: float | None = None
        ) -> tuple[str, str]:
            end = time.monotonic() + 240
            while len(list(tmp_path.glob("*.pid"))) < 2 and time.monotonic() < end:
                time.sleep(0.01)
            return super().communicate(input, timeout)

    monkeypatch.setattr(subprocess, "Popen", FromWhenTheyHang)
    with pytest.raises(AssertionError, match=r"did not end in 0.5 s\n(still here\n){2}"):
        run_ranks(script, 2, timeout=0.5)
    monkeypatch.undo()
    pids = [int(path.stem) for path in tmp_path.glob("*.pid")]
    assert len(pids) == 2
    end = time.monotonic() + 240
    while any(lives(pid) for pid in pids):  # a busy machine takes a while to end what is killed
        assert time.monotonic() < end
        time.sleep(0.01)


def lives(pid: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return state.stdout.strip()[:1] not in ("", "Z")  # not all containers bury their dead
