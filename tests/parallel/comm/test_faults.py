"""A fault of one rank ends all ranks within seconds, with one message that names rank and error."""

from __future__ import annotations

import re
import selectors
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from tensorgrad.parallel.comm import watchdog_client
from tests.parallel.comm import faults, hosts, lost_hosts
from tests.ranks import mpirun, run_ranks

pytestmark = [pytest.mark.mpi, pytest.mark.slow]


def run(fault: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    """Run ranks to their end; without the watchdog that would take 10 minutes, or hang."""
    return run_ranks(Path(faults.__file__), ranks, [fault], check=False, timeout=240)


class Begun(NamedTuple):
    """Programs that begin at once, as ranks wait for seconds until they are ended."""

    pairs: dict[str, Future[subprocess.CompletedProcess[str]]]
    waiting: dict[str, Future[subprocess.CompletedProcess[str]]]
    hosts: dict[str, Future[lost_hosts.Outcome]]


@pytest.fixture(scope="module", autouse=True)
def begun(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Begun]:
    """Begin what the chosen tests ask for; few pairs at a time, which need the cores."""
    chosen = [
        item
        for item in request.session.items
        if item.path == request.path and isinstance(item, pytest.Function)
    ]
    names = {name for item in chosen for name in item.fixturenames}
    found = Begun({}, {}, {})
    with ThreadPoolExecutor(2 + len(lost_hosts.FAULTS)) as pool, ThreadPoolExecutor(3) as few:
        for item in chosen:
            if item.originalname == "test_all_ranks_end_with_one_traceback":
                fault = str(item.callspec.params["fault"])
                found.pairs[fault] = few.submit(run, fault)
        if "waiting" in names:
            for fault in ("hangs", "groups_cross"):
                found.waiting[fault] = pool.submit(run, fault, 4)
        if "outcomes" in names and hosts.missing() is None:
            folder = tmp_path_factory.mktemp("hosts")
            for name in lost_hosts.FAULTS:
                place = folder / name.replace(" ", "-")
                found.hosts[name] = pool.submit(lost_hosts.lose_a_host, place, name)
        yield found


@pytest.fixture
def waiting(begun: Begun) -> dict[str, Future[subprocess.CompletedProcess[str]]]:
    return begun.waiting


@pytest.fixture
def outcomes(begun: Begun) -> dict[str, Future[lost_hosts.Outcome]]:
    if (reason := hosts.missing()) is not None:
        pytest.skip(reason)
    return begun.hosts


@pytest.mark.parametrize(
    ("fault", "title", "message", "status"),
    [
        ("one_raises", "rank 1 of 2: uncaught ValueError, all ranks end", "ValueError: boom", 1),
        (
            "one_raises_early",
            "rank 1 of 2: uncaught ValueError, all ranks end",
            "ValueError: boom",
            1,
        ),
        (
            "all_raise_early",
            "rank 0 of 2: uncaught ValueError, all ranks end",
            "ValueError: boom",
            1,
        ),
        (
            "no_threads",
            "rank 1 of 2: uncaught CommError",
            "expected a higher limit of processes",
            1,
        ),
        ("all_raise", "rank 0 of 2: uncaught ValueError, all ranks end", "ValueError: boom 0", 1),
        ("thread_raises", "rank 1 of 2: uncaught ValueError", "ValueError: boom", 1),
        ("interrupted", "rank 1 of 2: uncaught KeyboardInterrupt", "KeyboardInterrupt", 130),
        (
            "ends_early",
            "rank 0 of 2: uncaught CommError",
            "float64 (3,) on the CPU on rank 0, the end of the program on rank 1",
            1,
        ),
        (
            "exits_early",
            "rank 0 of 2: uncaught CommError",
            "float64 (3,) on the CPU on rank 0, the end of the program on rank 1",
            1,
        ),
        (
            "another_version",
            "rank 0 of 2: uncaught CommError",
            "start: python is '3.12.1' on rank 0, '3.11.4' on rank 1; expected the same on all",
            1,
        ),
        ("disagree", "rank 0 of 2: uncaught CommError", "float64 (4,) on the CPU on rank 1", 1),
    ],
)
def test_all_ranks_end_with_one_traceback(
    begun: Begun, fault: str, title: str, message: str, status: int
) -> None:
    result = begun.pairs[fault].result()
    assert result.returncode == status, result.stderr
    assert result.stderr.count("Traceback (most recent call last)") == 1, result.stderr
    assert title in result.stderr
    assert message in result.stderr
    assert result.stdout == ("last words of rank 1\n" if fault == "one_raises" else "")


@pytest.mark.parametrize(
    ("fault", "status", "output"),
    [
        ("thread_exits", 0, "the end\n"),
        ("one_raises", 1, "last words of rank 1\n"),
        ("one_raises_early", 1, ""),
    ],
)
def test_ranks_whose_standard_error_is_closed_end_as_others(
    fault: str, status: int, output: str
) -> None:
    launcher = mpirun()
    assert launcher is not None
    shell = ["sh", "-c", 'exec "$0" "$@" <&- 2>&-', sys.executable, faults.__file__, fault]
    result = subprocess.run(
        [*launcher, "-n", "2", *shell], capture_output=True, text=True, timeout=60
    )
    assert (result.returncode, result.stdout, result.stderr) == (status, output, "")


def test_a_rank_that_never_comes_to_the_start_ends_all() -> None:
    """Some launchers end them first, before the time-out."""
    result = run("one_never_comes", 3)
    assert result.returncode != 0
    assert "the end" not in result.stdout
    if "Timeout (0:00:02)!" in result.stderr:
        assert "in _wait_for_all_ranks" in result.stderr


def test_a_rank_can_end_all_with_a_status() -> None:
    assert run("aborts").returncode == 7


def test_a_thread_may_end_itself() -> None:
    result = run("thread_exits")
    assert (result.returncode, result.stdout, result.stderr) == (0, "the end\n", "")


@pytest.mark.parametrize(("fault", "lost"), [("killed", 1), ("main_rank_killed", 0)])
def test_a_rank_that_was_killed_is_named_once(fault: str, lost: int) -> None:
    result = run(fault, 3)
    assert result.returncode != 0
    assert len(re.findall(rf"rank {lost} of 3 \(process \d+ on .*\) is lost", result.stderr)) == 1
    assert result.stderr.count("is lost") == 1, result.stderr
    assert "Traceback" not in result.stderr


def test_the_watchdog_hears_of_an_end_before_the_launcher() -> None:
    """A process that ends closes the highest of its files first."""
    result = run("numbers", 3)
    assert result.returncode == 0, result.stderr
    found = re.findall(r"file (\d+), the launcher's (\d+|none)", result.stdout)
    assert len(found) == 3
    for number, launcher in found:
        if launcher != "none":  # MPICH's tells its number
            assert int(number) > int(launcher)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems close files in other orders")
def test_a_process_that_is_killed_closes_the_file_with_the_highest_number_first() -> None:
    for first in (0, 1):  # which of two sockets gets it
        pairs = [socket.socketpair() for _ in range(2)]
        theirs = [each[1].fileno() for each in pairs]
        high = watchdog_client._HIGH
        move = f"import fcntl, time; fcntl.fcntl({theirs[first]}, fcntl.F_DUPFD, {high})"
        close = f"import os; os.close({theirs[first]}); print(flush=True); time.sleep(100)"
        code = [sys.executable, "-c", f"{move}; {close}"]
        with (
            subprocess.Popen(code, pass_fds=theirs, stdout=subprocess.PIPE) as process,
            selectors.EpollSelector() as selector,
        ):
            assert process.stdout is not None
            process.stdout.readline()
            for number, (mine, its) in enumerate(pairs):
                its.close()
                selector.register(mine, selectors.EVENT_READ, number)
            process.kill()
            process.wait()
            ended = [key.data for key, _ in selector.select()]  # in the order of their events
        assert ended == [first, 1 - first]
        for mine, _ in pairs:
            mine.close()


def test_a_rank_that_hangs_ends_all_and_every_last_call_is_shown(
    waiting: dict[str, Future[subprocess.CompletedProcess[str]]],
) -> None:
    result = waiting["hangs"].result()
    assert result.returncode != 0
    call = r"broadcast\(root=0\) of int8 \(4,\) on the CPU"
    assert re.search(rf"rank [03] of 4 has waited \d+ s in {call}: all ranks end", result.stderr)
    assert re.search(
        rf"  rank 0: has waited \d+ s in call 3, {call}; at .*faults.py:", result.stderr
    )
    assert re.search(
        r"  rank 1: has worked \d+ s since call 2, all_reduce\(sum\) of .*; at .*in hangs",
        result.stderr,
    )
    assert re.search(r"  rank 2: does not answer \(process \d+ on ", result.stderr)
    assert re.search(rf"  rank 3: has waited \d+ s in call 3, {call}", result.stderr)


def test_ranks_that_wait_for_each_other_are_an_error(
    waiting: dict[str, Future[subprocess.CompletedProcess[str]]],
) -> None:
    """Among them a message that is not received, and a group that waits for one that has ended."""
    result = waiting["groups_cross"].result()
    assert result.returncode != 0
    assert "the ranks wait for each other: all ranks end\n" in result.stderr
    for rank, call in (
        (0, "all_reduce(sum) of float64 (2,) on the CPU among ranks 0-1"),
        (1, "recv from rank 2 of float64 (5,) on the CPU"),
        (2, "wait for send to rank 3 of float64 (5,) on the CPU"),
        (3, "the end of the program"),
    ):
        assert re.search(
            rf"  rank {rank}: has waited \d+ s in call \d, {re.escape(call)}; at", result.stderr
        )


@pytest.mark.parametrize("name", list(lost_hosts.FAULTS))
def test_all_ranks_end_when_a_host_is_lost(
    outcomes: dict[str, Future[lost_hosts.Outcome]], name: str
) -> None:
    assert outcomes[name].result().seconds < lost_hosts.PROMISE


@pytest.mark.parametrize("name", [name for name in lost_hosts.FAULTS if "first" not in name])
def test_the_host_of_rank_0_names_the_lost_one(
    outcomes: dict[str, Future[lost_hosts.Outcome]], name: str
) -> None:
    how = "killed, or crashed" if "killed" in name else "its host is down or cut off"
    assert re.match(
        rf"rank [23] of 4 \(process \d+ on {hosts.NAMES[1]}\) is lost: {how}.*: all ranks end\n$",
        outcomes[name].result().said[0],
    )
    assert outcomes[name].result().said[1] == ""


@pytest.mark.parametrize("name", ["link down", "packets dropped", "power of the first host off"])
def test_the_other_host_names_that_of_rank_0(
    outcomes: dict[str, Future[lost_hosts.Outcome]], name: str
) -> None:
    said = "".join(outcomes[name].result().said[2:])
    assert re.search(
        rf"rank [23] on {hosts.NAMES[1]}: rank 0 or its host {hosts.NAMES[0]} is lost", said
    )
    assert "Traceback" not in said
