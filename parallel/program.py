"""The program of training runs: `tensorgrad train TASK`, alone or on the ranks of mpirun.

Rank 0 reads the command line and prints; an error that a user can fix ends all ranks with one line.
Tests: tests/cli/test_train.py and, of each task with each strategy, tests/train/test_task.py.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tensorgrad.core import backend
from tensorgrad.core.errors import ArgumentError
from tensorgrad.io.command import printable
from tensorgrad.nn import init
from tensorgrad.parallel.comm.collectives import Comm
from tensorgrad.parallel.comm.launch import launched_ranks
from tensorgrad.parallel.comm.mpi_nccl import world
from tensorgrad.parallel.mesh import Mesh, make_mesh
from tensorgrad.parallel.planning.advice import memory_advice
from tensorgrad.parallel.planning.estimate import TrainingJob
from tensorgrad.parallel.script import Read, command_on_ranks, read_on_ranks
from tensorgrad.parallel.strategy import mesh_strategy
from tensorgrad.parallel.tensor import check_shares
from tensorgrad.train.command_line import read_command_line
from tensorgrad.train.device import choose_device
from tensorgrad.train.options import in_options
from tensorgrad.train.settings import TrainSettings
from tensorgrad.train.strategy import Strategy
from tensorgrad.train.strategy_settings import REDUCTIONS, ZERO
from tensorgrad.train.task import Task, train

End = Callable[[Any, Path, str | None], object]


def run_program(
    task: type[Task],
    description: str | None,
    arguments: Sequence[str] | None = None,
    show: Callable[[str], object] = print,
) -> int:
    """Train a task with the options of the command line; return the exit status.

    Args:
        task: its class.
        description: of the program; its first line is for --help.
        arguments: of the command; default: those of this process.
        show: called on the main rank with a sample of the trained model's text.
    """

    def end(settings: TrainSettings, folder: Path, sample: str | None) -> None:
        if sample is not None:
            show(printable(sample))

    return run_task(task, lambda: read_command_line(task.Settings, description, arguments), end)


def run_task(task: type[Task], read: Read, end: End, program: str = "") -> int:
    """Train a task alone, or on the ranks that mpirun has started; return the exit status.

    Args:
        task: its class.
        read: returns the settings, the folder of the run and whether it is one to resume; of
            several ranks, rank 0 calls it.
        end: called on the main rank after the last step, with the settings, the folder and a sample
            of the model's text, if there is one.
        program: the command line without its options, to say how to start ranks.
    """
    if launched_ranks() > 1:
        return _run_on_ranks(task, read, end)
    settings, folder, resuming = read()
    check_one_process(settings, program or f"python {sys.argv[0]}")
    settings, device = choose_device(settings)
    with memory_explained(settings):
        outcome, sample = train(task, settings, folder, resuming, device)
    if outcome.finished:
        end(settings, folder, sample)
    return outcome.status


def make_strategy(settings: TrainSettings, comm: Comm) -> Strategy:
    """Return the strategy with which the ranks train together.

    Raises:
        ArgumentError: the options do not fit each other or the number of ranks.
    """
    if settings.parallel == "none" and comm.size > 1:
        raise ArgumentError(f"--parallel: got none with {comm.size} ranks, expected one")
    if settings.grad_dtype != "float32" and comm.size > 1:
        raise ArgumentError(
            f"--grad-dtype: got {settings.grad_dtype} with {comm.size} ranks, expected float32, in "
            "which they add gradients"
        )
    mesh = mesh_of(settings, comm.size, comm.rank)
    settings.check_batch(mesh.dp)
    zero = ZERO.get(settings.parallel, 0)
    strategy = mesh_strategy(
        comm,
        mesh,
        zero=zero,
        reduction=settings.parallel if settings.parallel in REDUCTIONS else "overlap",
        bucket_mb=settings.bucket_mb,
        schedule=settings.pipeline_schedule,
        chunks=settings.model_chunks,
        sequence=settings.sequence_parallel,
    )
    check_model(settings, mesh)
    return strategy


def mesh_of(settings: TrainSettings, ranks: int, rank: int = 0) -> Mesh:
    """Return the mesh of all ranks.

    Raises:
        ArgumentError: the sizes do not multiply to the number of ranks.
    """
    sizes = {"--dp": settings.dp, "--pp": settings.pp, "--tp": settings.tp}
    product = math.prod(size for size in sizes.values() if size)
    if product and (ranks % product if settings.dp is None else ranks != product):
        options = " ".join(f"{name} {size}" for name, size in sizes.items() if (size or 1) > 1)
        count = f"{product} ranks" if settings.dp else f"a multiple of {product} ranks"
        raise ArgumentError(f"{options or '--dp 1'}: got {ranks} ranks, expected {count}")
    return make_mesh(ranks, rank, dp=settings.dp, pp=settings.pp, tp=settings.tp)


def check_one_process(settings: TrainSettings, program: str) -> None:
    """Check that nothing asks for several ranks, for a program that runs as one process.

    Args:
        program: the command line without its options, to say how to start ranks.
    Raises:
        ArgumentError: an option is for several ranks.
    """
    sizes = {"--tp": settings.tp, "--pp": settings.pp, "--dp": settings.dp or 1}
    options = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    if settings.parallel in ZERO:
        options.append(f"--parallel {settings.parallel}")
    if options:
        ranks = max(2, math.prod(sizes.values()))
        raise ArgumentError(
            f"{options[0]}: got one process, expected several ranks: "
            f"mpirun -n {ranks} {program} {' '.join(options)}"
        )


def strategy_name(settings: TrainSettings, ranks: int) -> str:
    """Return in words how the ranks share the work, such as "data parallel (overlap)"."""
    mesh = mesh_of(settings, ranks)
    parts = {
        f"data parallel ({settings.parallel})": mesh.dp,
        f"pipeline ({settings.pipeline_schedule})": mesh.pp,
        "tensor parallel": mesh.tp,
    }
    names = [name for name, size in parts.items() if size > 1]
    if len(names) == 1:
        return names[0]
    return " x ".join(f"{size} {name}" for name, size in parts.items() if size > 1)


def check_model(settings: TrainSettings, mesh: Mesh) -> None:
    """Raise ArgumentError where the ranks cannot share the layers or the heads."""
    sizes, parts = settings.known_sizes(), mesh.pp * settings.model_chunks
    layers, heads = (getattr(sizes, name, None) for name in ("layers", "heads"))
    if mesh.pp > 1 and layers is not None and layers < parts:
        raise ArgumentError(
            f"--layers: the model has {layers} layers, expected {parts} or more: "
            f"{mesh.pp} stages with {settings.model_chunks} parts each"
        )
    if heads is not None and heads < mesh.tp:
        raise ArgumentError(
            f"--heads: the model has {heads}, expected one or more for each of the "
            f"{mesh.tp} tensor parallel ranks"
        )
    if mesh.tp > 1 and sizes is not None and settings.model_class is not None:
        with init.without_values():
            model = settings.model_class(sizes)
        try:  # but for the vocabulary, which the text may make smaller
            check_shares(model, mesh.tp, vocabulary=False)
        except ArgumentError as error:
            reason = str(error).removeprefix("tensor_parallel: ")
            raise ArgumentError(f"--tp: got {mesh.tp} where {reason}") from error


@contextmanager
def memory_explained(settings: TrainSettings, ranks: int = 1) -> Iterator[None]:
    """Add to a MemoryError what a step needs by the planner's estimate, and a setting that fits."""
    try:
        yield
    except MemoryError as error:
        config = settings.known_sizes()
        model = settings.model_class
        if config is None or model is None:
            raise
        mesh = mesh_of(settings, ranks)
        job = TrainingJob(
            config,
            mesh,
            settings.batch,
            settings.micro_batches,
            ZERO.get(settings.parallel, 0),
            settings.pipeline_schedule,
            settings.model_chunks,
            settings.sequence_parallel,
            settings.dtype,
            settings.grad_dtype,
            settings.optimizer_name,
            model,
        )
        memory = backend.total_memory(backend.use_device(settings.device))
        error.add_note(memory_advice(job, memory))
        raise


@command_on_ranks
def _run_on_ranks(comm: Comm, task: type[Task], read: Read, end: End) -> int:
    """Train together with the other ranks, each on its device; return the exit status."""
    settings, folder, resuming = read_on_ranks(comm, task.Settings, read)
    world(timeout=60 * settings.timeout)
    try:
        with in_options(settings):
            strategy = make_strategy(settings, comm)
    except ArgumentError as error:  # the same on all ranks: each exits by itself
        if comm.rank == 0:
            logging.error("%s", error)
        return 1
    if comm.rank == 0:
        logging.info("%d ranks, %s", comm.size, strategy_name(settings, comm.size))
    with in_options(settings), memory_explained(settings, comm.size):
        settings, _ = choose_device(settings)
        device = comm.select_device(settings.device)
        outcome, sample = train(task, settings, folder, resuming, device, strategy)
    if outcome.finished and strategy.is_main:
        end(settings, folder, sample)
    return outcome.status
