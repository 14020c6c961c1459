from __future__ import annotations

import sys
import time
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tensorgrad import parallel
from tensorgrad.core import backend
from tensorgrad.errors import CommError, DeviceError
from tensorgrad.parallel import Comm
from tensorgrad.parallel.comm import launch, messages, mpi_nccl
from tensorgrad.parallel.comm.peer_memory import _pieces
from tests.parallel.comm import collectives
from tests.ranks import run_ranks

PROGRAM = Path(collectives.__file__)
LAUNCHERS = ("PMI_SIZE", "PMIX_RANK", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("check", collectives.CHECKS, ids=lambda check: check.__name__)
def test_one_process_needs_no_mpi(
    check: Callable[[Comm, str], None], device: str, monkeypatch: pytest.MonkeyPatch, alone: None
) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    one = mpi_nccl._start.__wrapped__()[0]
    assert (one.rank, one.size, one.local_rank, one.local_size) == (0, 1, 0, 1)
    check(one, device)


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_on_the_cpu(ranks: int) -> None:
    out = run_ranks(PROGRAM, ranks, ["cpu"]).stdout
    assert out == f"{len(collectives.CHECKS)} checks on {ranks} ranks, cpu\n"


@pytest.mark.mpi
@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_on_gpus(ranks: int) -> None:
    result = run_ranks(PROGRAM, ranks, ["cuda"])
    assert result.stdout == f"{len(collectives.CHECKS)} checks on {ranks} ranks, cuda:0\n"
    gpus = backend.gpu_count()
    shared = f"{ranks} ranks share {gpus} GPUs: NCCL needs one GPU for each rank"
    assert (shared in result.stderr) == (gpus < ranks)


@pytest.mark.mpi
@pytest.mark.gpu
@pytest.mark.skipif(backend.gpu_count() < 2, reason="needs two GPUs")
def test_gpus_run_on_alone_and_collectives_can_be_captured() -> None:
    assert run_ranks(PROGRAM.with_name("captured.py"), 2, timeout=60).stdout == "captured\n"


def test_the_world_is_made_once() -> None:
    assert parallel.world() is parallel.world()


@pytest.mark.parametrize(
    ("variables", "ranks"),
    [
        ({}, 1),
        ({"PMI_SIZE": "4", "PMI_RANK": "1"}, 4),
        ({"OMPI_COMM_WORLD_SIZE": "3", "PMIX_RANK": "0"}, 3),
        ({"PMIX_RANK": "5", "SLURM_STEP_NUM_TASKS": "16"}, 16),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, 1),  # a batch script before its srun
    ],
)
def test_launchers_are_known_by_their_variables(
    variables: dict[str, str], ranks: int, monkeypatch: pytest.MonkeyPatch, alone: None
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert launch.launched_ranks() == ranks


def test_ranks_without_mpi4py_are_an_error(monkeypatch: pytest.MonkeyPatch, alone: None) -> None:
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(
        CommError, match=r"2 ranks were started, but mpi4py .*pip install -e .\.\[mpi\]"
    ):
        mpi_nccl._start.__wrapped__()[0]


def test_mpi4py_without_a_library_is_an_error(monkeypatch: pytest.MonkeyPatch, alone: None) -> None:
    class NoLibrary(types.ModuleType):
        def __getattr__(self, name: str) -> object:
            raise RuntimeError("cannot load MPI library")

    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setitem(sys.modules, "mpi4py", NoLibrary("mpi4py"))
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    with pytest.raises(CommError, match=r"mpi4py cannot be imported \(cannot load MPI library\)"):
        mpi_nccl._start.__wrapped__()[0]


def test_an_mpirun_of_another_mpi_is_an_error(monkeypatch: pytest.MonkeyPatch, alone: None) -> None:
    """Each rank would run alone, and all would train the same and overwrite each other."""
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    mpi = types.SimpleNamespace(
        COMM_WORLD=types.SimpleNamespace(Get_size=lambda: 1),
        Get_library_version=lambda: "MPICH Version: 5.0.2\0\nMore",
    )
    monkeypatch.setitem(sys.modules, "mpi4py", types.SimpleNamespace(MPI=mpi))
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
    with pytest.raises(CommError, match=r"started 2 ranks, .*MPICH Version: 5.0.2\) sees 1;"):
        mpi_nccl._start.__wrapped__()[0]


@pytest.fixture
def blas(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Stand for a BLAS with 8 threads on 8 cores, without a limit."""
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(8), raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "")  # so that it is put back afterwards
    monkeypatch.delenv("OMP_NUM_THREADS")
    blas = types.SimpleNamespace(num_threads=8)
    blas.set_num_threads = lambda count: setattr(blas, "num_threads", count)
    threads = backend._BlasThreads()
    threads.libraries = [blas]
    monkeypatch.setattr(backend, "_blas", threads)
    return blas


@pytest.mark.parametrize(("ranks", "share"), [(1, 8), (2, 4), (3, 2), (8, 1), (16, 1)])
def test_cpu_ranks_divide_the_cores(ranks: int, share: int, blas: types.SimpleNamespace) -> None:
    one = Comm()
    one.local_size = ranks
    one.select_device("cpu")
    assert (backend.threads(), blas.num_threads) == (share, share)


def test_threads_that_the_user_chose_stay(
    blas: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    one = Comm()
    one.local_size = 2
    one.select_device("cpu")
    assert (backend.threads(), blas.num_threads) == (6, 8)


def test_a_blas_that_cannot_be_told_is_a_warning(
    blas: types.SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    backend._blas.libraries = []
    one = Comm()
    one.local_size = 2
    one.select_device("cpu")
    assert backend.threads() == 4
    assert "start them with OMP_NUM_THREADS=4" in caplog.text


def test_pieces_of_shared_memory_are_aligned() -> None:
    def lengths(size: int, ranks: int, dtype: str = "float32") -> list[int]:
        array = np.arange(size).astype(dtype)
        pieces = list(_pieces(array, ranks))
        assert np.concatenate(pieces).tolist() == array.tolist()
        return list(map(len, pieces))

    assert lengths(100, 3) == [36, 36, 28]
    assert lengths(96, 2) == [48, 48]
    assert lengths(100, 3, "float16") == [40, 40, 20]
    assert lengths(9, 4) == [4, 4, 1, 0]


def test_devices_by_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Comm()
    assert one.select_device("cpu") == "cpu"
    if backend.gpu_count() == 0:
        assert one.select_device("auto") == "cpu"
        with pytest.raises(DeviceError, match=r"no GPU was found|CuPy is not installed"):
            one.select_device("cuda")
    used = []

    class Device:
        def __init__(self, index: int) -> None:
            self.index = index

        def use(self) -> None:
            used.append(self.index)

    cupy = types.SimpleNamespace(cuda=types.SimpleNamespace(Device=Device))
    monkeypatch.setattr(backend, "gpu_count", lambda: 4)
    monkeypatch.setattr(backend, "cupy", cupy)
    for local_rank in range(6):
        one.local_rank = local_rank
        assert one.select_device("auto") == f"cuda:{local_rank % 4}"
    assert one.select_device("cuda:2") == "cuda:2"
    assert used == [0, 1, 2, 3, 0, 1, 2]
    with pytest.raises(DeviceError, match="cuda:0 to cuda:3"):
        one.select_device("cuda:4")


def test_a_waiting_rank_yields_its_core_then_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, seen = messages.ProgressEngine(), []

    def pause(seconds: float) -> None:
        seen.append("sleeps")
        assert (engine.last.meets, engine.last.waits_since is None) == (True, False)
        if seen.count("sleeps") == 3:
            raise TimeoutError

    monkeypatch.setattr(messages, "_YIELDS", 5)
    monkeypatch.setattr(messages, "_yield_core", lambda: seen.append("yields"))
    monkeypatch.setattr(time, "sleep", pause)
    with pytest.raises(TimeoutError):
        engine.wait_for(lambda: False, meets=True)
    assert seen == ["yields"] * 4 + ["sleeps"] * 3
    assert engine.last.waits_since is None
    engine.wait_for(lambda: True, meets=True)
    assert len(seen) == 7


def test_one_process_aborts_with_its_status(capfd: pytest.CaptureFixture[str]) -> None:
    for status, why in ((3, "no data"), (4, "")):
        with pytest.raises(SystemExit) as caught:
            Comm().abort(status, why)
        assert caught.value.code == status
        assert capfd.readouterr().err == (f"rank 0 of 1: {why}\n" if why else "")
