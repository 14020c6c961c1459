"""Loss of one of two hosts with two ranks each, in several ways; see test_faults.py."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.parallel.comm import on_hosts
from tests.parallel.comm.hosts import Hosts

PROMISE = 30  # seconds in which all ranks end

Fault = Callable[[Hosts], None]
# Events, and where the ranks wait meanwhile: in the library, or in MPI.
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
        while any(lives(pid) for pid in pids) and time.monotonic() < start + 2 * PROMISE:
            time.sleep(0.1)
        seconds = time.monotonic() - start
    return Outcome(seconds, [(folder / f"rank-{rank}.err").read_text() for rank in range(4)])


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
