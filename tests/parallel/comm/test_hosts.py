"""Loss of one of two hosts with two ranks each: all ranks end and name the lost host."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.parallel.comm import on_hosts
from tests.parallel.comm.hosts import NAMES, Hosts, missing

pytestmark = [pytest.mark.mpi, pytest.mark.slow]

_PROMISE = 30  # seconds in which all ranks end

Fault = Callable[[Hosts], None]
# What happens, and where the ranks wait meanwhile: in the library, or in MPI.
FAULTS: dict[str, tuple[Fault, str]] = {
    "link down": (Hosts.link_down, "library"),
    "packets dropped": (Hosts.drop_packets, "mpi"),
    "power of the first host off": (lambda hosts: hosts.power_off(0), "library"),
    "power of the second host off": (lambda hosts: hosts.power_off(1), "mpi"),
    "processes of the second host killed": (lambda hosts: hosts.kill(1), "library"),
}


@dataclass
class Outcome:
    """How the ranks ended: how long the last took, and what each of them wrote."""

    seconds: float
    said: list[str]


def lose_a_host(folder: Path, name: str) -> Outcome:
    folder.mkdir()
    fault, mode = FAULTS[name]
    with Hosts(folder) as hosts:
        hosts.launch(Path(on_hosts.__file__), [folder, mode])
        until = time.monotonic() + 120
        while len(found := sorted(folder.glob("rank-*.pid"))) < 4:
            assert time.monotonic() < until, (folder / "mpirun.txt").read_text()
            time.sleep(0.1)
        pids = [int(path.read_text()) for path in found]
        assert all(lives(pid) for pid in pids)
        start = time.monotonic()
        fault(hosts)
        while any(lives(pid) for pid in pids) and time.monotonic() < start + 2 * _PROMISE:
            time.sleep(0.1)
        seconds = time.monotonic() - start
    return Outcome(seconds, [(folder / f"rank-{rank}.err").read_text() for rank in range(4)])


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Lose all hosts at once: most of the time all wait."""
    if (reason := missing()) is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("hosts")
    with ThreadPoolExecutor(len(FAULTS)) as pool:
        found = pool.map(
            lambda name: lose_a_host(folder / name.replace(" ", "-"), name), list(FAULTS)
        )
        return dict(zip(FAULTS, found, strict=True))


@pytest.mark.parametrize("name", list(FAULTS))
def test_all_ranks_end_when_a_host_is_lost(outcomes: dict[str, Outcome], name: str) -> None:
    assert outcomes[name].seconds < _PROMISE


@pytest.mark.parametrize("name", [name for name in FAULTS if "first" not in name])
def test_the_host_of_rank_0_names_the_lost_one(outcomes: dict[str, Outcome], name: str) -> None:
    how = "killed, or crashed" if "killed" in name else "its host is down or cut off"
    assert re.match(
        rf"rank [23] of 4 \(process \d+ on {NAMES[1]}\) is lost: {how}.*: all ranks end\n$",
        outcomes[name].said[0],
    )
    assert outcomes[name].said[1] == ""


@pytest.mark.parametrize("name", ["link down", "packets dropped", "power of the first host off"])
def test_the_other_host_names_that_of_rank_0(outcomes: dict[str, Outcome], name: str) -> None:
    said = "".join(outcomes[name].said[2:])
    assert re.search(rf"rank [23] on {NAMES[1]}: rank 0 or its host {NAMES[0]} is lost", said)
    assert "Traceback" not in said
