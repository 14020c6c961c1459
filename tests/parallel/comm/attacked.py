"""A small training on ranks, with or without attackers at its socket; run by test_attackers.py.

mpirun -n 2 python tests/parallel/comm/attacked.py attacked|alone
"""

from __future__ import annotations

import resource
import socket
import sys
import threading
from contextlib import suppress

from tensorgrad import parallel
from tensorgrad.parallel.comm import launch, watchdog, watchdog_client
from tensorgrad.parallel.data import DataParallel
from tests.parallel import strategies
from tests.parallel.comm.attackers import ATTACKS, Attacker

STEPS = 20


def attack_when_the_watchdog_listens() -> threading.Thread:
    """Let the last rank be late at the watchdog: before, while and after it joins attackers come.

    Returns:
        what attacks on during the run; it can be joined.
    """
    connect = watchdog_client._connect
    addresses: list[tuple[str, int]] = []
    joined = threading.Event()

    def attack_again() -> None:
        joined.wait()
        for attack in ATTACKS:
            attacker = Attacker(addresses[0], b"x" * watchdog.HELLO.size)
            with suppress(ConnectionRefusedError):  # nobody listens any more
                attack(attacker)
            attacker.leave()

    def attack_and_connect(rank: int, address: tuple[str, int], secret: bytes) -> socket.socket:
        addresses.append(address)
        attackers = [
            Attacker(address, watchdog.pack_hello(secret, 0, 1, "attacker")) for _ in ATTACKS
        ]
        for attack, attacker in zip(ATTACKS, attackers, strict=True):
            attack(attacker)
        kept.extend(attackers)
        connection = connect(rank, address, secret)
        joined.set()
        return connection

    kept: list[Attacker] = []
    vars(watchdog_client)["_connect"] = attack_and_connect
    thread = threading.Thread(target=attack_again, daemon=True)
    thread.start()
    return thread


def main(how: str) -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    attacks = how == "attacked" and launch.launched_rank() == launch.launched_ranks() - 1
    thread = attack_when_the_watchdog_listens() if attacks else None
    world = parallel.world()
    run = strategies.train(DataParallel(world), steps=STEPS)
    if thread is not None:
        thread.join()
    world.barrier()
    if world.rank == 0:
        for loss, norm in zip(run.losses, run.norms, strict=True):
            print(loss.hex(), norm.hex())
        for name, parameter in run.model.named_parameters():
            print(name, parameter.numpy().tobytes().hex())


if __name__ == "__main__":
    main(sys.argv[1])
