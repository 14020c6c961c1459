"""Faults of ranks, named by the command line; run by test_faults.py.

Faults in `EARLY` come before the first call of `parallel.world`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import numpy as np

from tensorgrad import parallel
from tensorgrad.errors import CommError
from tensorgrad.parallel import Comm
from tensorgrad.parallel.comm import launch, mpi_nccl


def one_raises_early() -> None:
    if launch.launched_rank() == 1:
        raise ValueError("boom")


def all_raise_early() -> None:
    raise ValueError("boom")


def no_threads() -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    if launch.launched_rank() == 1:
        setattr(threading.Thread, "start", refuse)  # noqa: B010  mypy refuses an assignment
    parallel.world()


def one_never_comes() -> None:
    if launch.launched_rank() == 1:
        sys.exit(0)
    parallel.world(timeout=2)


def one_raises(world: Comm) -> None:
    if world.rank == 1:
        print("last words of rank 1")
        raise ValueError("boom")
    world.all_reduce(np.ones(1000))


def all_raise(world: Comm) -> None:
    raise ValueError(f"boom {world.rank}")


def thread_raises(world: Comm) -> None:
    def fail() -> None:
        raise ValueError("boom")

    if world.rank == 1:
        threading.Thread(target=fail).start()
        time.sleep(60)
    world.barrier()


def thread_exits(world: Comm) -> None:
    thread = threading.Thread(target=sys.exit, args=(3,))
    thread.start()
    thread.join()
    world.barrier()


def interrupted(world: Comm) -> None:
    if world.rank == 1:
        raise KeyboardInterrupt
    world.barrier()


def ends_early(world: Comm) -> None:
    for _ in range(3 - world.rank):
        world.all_reduce(np.ones(3))


def exits_early(world: Comm) -> None:
    if world.rank == 1:
        sys.exit(3)
    try:
        world.broadcast(np.ones(3))
    except CommError:
        time.sleep(1)  # rank 1 must not end meanwhile
        raise


def another_version(world: Comm) -> None:
    facts = {"python": "3.11.4" if world.rank else "3.12.1", "numpy": "2.0.0"}
    world.agree("start", facts)


def aborts(world: Comm) -> None:
    if world.rank == 1:
        world.abort(7)
    world.barrier()


def disagree(world: Comm) -> None:
    world.all_reduce(np.ones(3 + world.rank))


def killed(world: Comm) -> None:
    x = np.ones(1000)
    for _ in range(20):
        world.all_reduce(x)
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:  # no collective: nothing but the watch can end it
        time.sleep(0.01)


def numbers(world: Comm) -> None:
    _, watching = mpi_nccl._start()
    assert watching is not None
    number, launcher = watching._connection.fileno(), os.environ.get("PMI_FD", "none")
    print(f"file {number}, the launcher's {launcher}", flush=True)


def main_rank_killed(world: Comm) -> None:
    x = np.zeros(300_000)
    if world.rank == 0:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:  # in the middle of a collective, most of the time
        world.all_reduce(x)


def hangs(world: Comm) -> None:
    world.all_reduce(np.ones(3))
    parallel.world(timeout=5)
    if world.rank == 1:
        time.sleep(1000)
    if world.rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    world.broadcast(np.ones(4, "int8"))


def groups_cross(world: Comm) -> None:
    """Each rank waits for one that waits for another."""
    pair = world.split([world.rank // 2 * 2, world.rank // 2 * 2 + 1])
    if world.rank == 0:
        pair.all_reduce(np.ones(2))
    if world.rank == 1:
        world.recv(np.ones(5), 2)
    if world.rank == 2:
        world.send(np.ones(5), 3, wait=False)


EARLY = {
    each.__name__: each for each in (one_raises_early, all_raise_early, no_threads, one_never_comes)
}

if __name__ == "__main__":
    if sys.argv[1] in EARLY:
        EARLY[sys.argv[1]]()
        parallel.world()
    else:
        globals()[sys.argv[1]](parallel.world())
    if parallel.world().rank == 0:
        print("the end")
