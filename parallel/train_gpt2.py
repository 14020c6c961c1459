"""Training a GPT-2 on several ranks: the options, and the program that each rank runs.

Rank 0 reads the command line and prints; an error that a user can fix ends all ranks with one line.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from tensorgrad import backend
from tensorgrad.command import drop_unwritten_output, printable, status_and_line
from tensorgrad.errors import ArgumentError, TensorgradError
from tensorgrad.parallel.comm.collectives import Comm
from tensorgrad.parallel.comm.mpi_nccl import world
from tensorgrad.parallel.data import REDUCTIONS
from tensorgrad.parallel.mesh import Mesh, make_mesh
from tensorgrad.parallel.planning.advice import memory_advice
from tensorgrad.parallel.planning.estimate import TrainingJob
from tensorgrad.parallel.schedule import SCHEDULES
from tensorgrad.parallel.strategy import mesh_ranks
from tensorgrad.train.command_line import read_command_line
from tensorgrad.train.config import option
from tensorgrad.train.device import choose_device
from tensorgrad.train.gpt2 import GPT2Settings, train
from tensorgrad.train.options import in_options
from tensorgrad.train.ranks import Ranks

ZERO = {"zero1": 1, "zero2": 2, "zero3": 3}
MODES = ("none", *REDUCTIONS, *ZERO)


@dataclass(frozen=True)
class ParallelSettings(GPT2Settings):
    """The options of a program that trains a GPT-2 on several ranks.

    How the ranks share the work is not saved with a run: each start says it again.
    """

    parallel: str = option(
        "overlap",
        "how data parallel ranks work together: gradients are all-reduced by a call per parameter "
        "(naive), one call (flat), or a call per bucket during backward (overlap); ZeRO shards "
        "optimizer state (zero1), gradients too (zero2), parameters too (zero3); none: one process",
        choices=MODES,
        saved=False,
    )
    bucket_mb: float | None = option(
        None, "size of a gradient bucket in MB", shown="chosen by the number of gradients",
        saved=False,
    )  # fmt: skip
    dp: int | None = option(
        None, "data parallel ranks", shown="as many as pp and tp allow", low=1, saved=False
    )
    pp: int = option(1, "pipeline stages", low=1, saved=False)
    tp: int = option(1, "tensor parallel ranks, which share each layer", low=1, saved=False)
    pipeline_schedule: str = option(
        "1f1b", "order of micro-batches in a pipeline", choices=tuple(SCHEDULES), saved=False
    )
    chunks: int | None = option(
        None, "model chunks per stage", shown="1, or 2 if interleaved", low=1, saved=False
    )
    sequence_parallel: bool = option(
        False, "shard activations between layers over the tp ranks; no sample", saved=False
    )
    timeout: float = option(
        10, "minutes to wait for another rank before all ranks exit", low=0.01, saved=False
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bucket_mb is not None and self.bucket_mb <= 0:
            raise ArgumentError(f"--bucket-mb: got {self.bucket_mb}, expected more than 0")
        if self.bucket_mb is not None and self.parallel not in ("overlap", "zero1"):
            raise ArgumentError(
                f"--bucket-mb: got {self.bucket_mb} with --parallel {self.parallel}, expected "
                "none: it has no buckets"
            )

    @property
    def samples(self) -> bool:
        """Whether to write a sample: with sequence parallelism one token alone has no logits."""
        return super().samples and not self.sequence_parallel

    def ranks(self, comm: Comm) -> Ranks:
        """Return the strategy with which the ranks train together.

        Raises:
            ArgumentError: the options do not fit each other or the number of ranks.
        """
        if self.parallel == "none" and comm.size > 1:
            raise ArgumentError(f"--parallel: got none with {comm.size} ranks, expected one")
        if self.grad_dtype != "float32" and comm.size > 1:
            raise ArgumentError(
                f"--grad-dtype: got {self.grad_dtype} with {comm.size} ranks, expected float32, in "
                "which they add gradients"
            )
        mesh = self.mesh(comm.size, comm.rank)
        self._check_batch(mesh)
        zero = ZERO.get(self.parallel, 0)
        ranks = mesh_ranks(
            comm,
            mesh,
            zero=zero,
            reduction=self.parallel if self.parallel in REDUCTIONS else "overlap",
            bucket_mb=self.bucket_mb,
            schedule=self.pipeline_schedule,
            chunks=self.model_chunks,
            sequence=self.sequence_parallel,
        )
        self._check_model(mesh)
        return ranks

    @property
    def model_chunks(self) -> int:
        """Model chunks per stage of the pipeline."""
        return self.chunks or (2 if self.pipeline_schedule == "interleaved" else 1)

    def _check_model(self, mesh: Mesh) -> None:
        """Raise ArgumentError where the ranks cannot share the layers or the heads."""
        if self.init_from:  # its sizes are not known yet
            return
        model, parts = self.model(self.largest_vocab), mesh.pp * self.model_chunks
        if mesh.pp > 1 and model.layers < parts:
            raise ArgumentError(
                f"--layers: the model has {model.layers} layers, expected {parts} or more: "
                f"{mesh.pp} stages with {self.model_chunks} parts each"
            )
        if model.heads < mesh.tp:
            raise ArgumentError(
                f"--heads: the model has {model.heads}, expected one or more for each of the "
                f"{mesh.tp} tensor parallel ranks"
            )

    def mesh(self, ranks: int, rank: int = 0) -> Mesh:
        """Return the mesh of all ranks.

        Raises:
            ArgumentError: the sizes do not multiply to the number of ranks.
        """
        sizes = {"--dp": self.dp, "--pp": self.pp, "--tp": self.tp}
        product = math.prod(size for size in sizes.values() if size)
        if product and (ranks % product if self.dp is None else ranks != product):
            options = " ".join(f"{name} {size}" for name, size in sizes.items() if (size or 1) > 1)
            count = f"{product} ranks" if self.dp else f"a multiple of {product} ranks"
            raise ArgumentError(f"{options or '--dp 1'}: got {ranks} ranks, expected {count}")
        return make_mesh(ranks, rank, dp=self.dp, pp=self.pp or ranks, tp=self.tp)

    def check_one_process(self, program: str) -> None:
        """Check that nothing asks for several ranks, for a program that runs as one process.

        Args:
            program: the command line without its options, to say how to start ranks.
        Raises:
            ArgumentError: an option is for several ranks.
        """
        sizes = {"--tp": self.tp, "--pp": self.pp, "--dp": self.dp or 1}
        options = [f"{name} {size}" for name, size in sizes.items() if size > 1]
        if self.parallel in ZERO:
            options.append(f"--parallel {self.parallel}")
        if options:
            ranks = max(2, math.prod(sizes.values()))
            raise ArgumentError(
                f"{options[0]}: got one process, expected several ranks: "
                f"mpirun -n {ranks} {program} {' '.join(options)}"
            )

    def strategy(self, ranks: int) -> str:
        """Return in words how the ranks share the work, such as "data parallel (overlap)"."""
        mesh = self.mesh(ranks)
        parts = {
            f"data parallel ({self.parallel})": mesh.dp,
            f"pipeline ({self.pipeline_schedule})": mesh.pp,
            "tensor parallel": mesh.tp,
        }
        names = [name for name, size in parts.items() if size > 1]
        if len(names) == 1:
            return names[0]
        return " x ".join(f"{size} {name}" for name, size in parts.items() if size > 1)

    def _check_batch(self, mesh: Mesh) -> None:
        """Raise ArgumentError unless a batch divides into micro-batches of equal size."""
        if self.batch % mesh.dp:
            raise ArgumentError(
                f"--batch: got {self.batch}, expected a multiple of the {mesh.dp} data parallel "
                "ranks"
            )
        rows = self.batch // mesh.dp
        if rows % self.micro_batches:
            raise ArgumentError(
                f"--micro-batches: got {self.micro_batches}, expected a divisor of the {rows} "
                "sequences of a data parallel rank"
            )


@contextmanager
def memory_explained(settings: ParallelSettings, ranks: int = 1) -> Iterator[None]:
    """Add to a MemoryError what a step needs by the planner's estimate, and a setting that fits."""
    try:
        yield
    except MemoryError as error:
        config = settings.model(settings.largest_vocab)
        mesh = settings.mesh(ranks)
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
            settings.optimizer,
        )
        memory = backend.total_memory(backend.use_device(settings.device))
        error.add_note(memory_advice(job, memory))
        raise


_Settings = TypeVar("_Settings", bound=ParallelSettings)
Read = Callable[[], tuple[_Settings, Path, bool]]


def run_on_ranks(
    kind: type[_Settings], description: str | None, show: Callable[[str], object]
) -> int:
    """Train with the options of the command line; return the exit status.

    Args:
        kind: the settings, whose `ranks` is the strategy.
        description: of the program; its first line is for --help.
        show: called on the main rank with a sample of the trained model's text.
    """

    def end(settings: ParallelSettings, folder: Path, sample: str | None) -> None:
        if sample is not None:
            show(printable(sample))

    return train_on_ranks(kind, lambda: read_command_line(kind, description), end)


def train_on_ranks(
    kind: type[_Settings],
    read: Read[_Settings],
    end: Callable[[_Settings, Path, str | None], object],
) -> int:
    """Train together with the other ranks, each on its device; return the exit status.

    Args:
        kind: the settings, whose `ranks` is the strategy.
        read: returns the settings, the folder of the run and whether it is one to resume; called on
            rank 0 only.
        end: called on the main rank after the last step, with the settings, the folder and a sample
            of the model's text, if there is one.
    """
    comm = world()
    level = logging.INFO if comm.rank == 0 else logging.ERROR
    logging.basicConfig(level=level, format="%(message)s")
    settings, folder, resuming = _read_once(comm, kind, read)
    try:
        with in_options(settings):
            if comm.size == 1:
                settings.check_one_process(f"python {sys.argv[0]}")
            ranks = settings.ranks(comm)
    except ArgumentError as error:  # the same on all ranks: each exits by itself
        if comm.rank == 0:
            logging.error("%s", error)
        return 1
    if comm.rank == 0 and comm.size > 1:
        logging.info("%d ranks, %s", comm.size, settings.strategy(comm.size))
    try:
        with in_options(settings), memory_explained(settings, comm.size):
            settings, _ = choose_device(settings)
            device = comm.select_device(settings.device)
            outcome, sample = train(settings, folder, resuming, device, ranks, comm.size)
        if outcome.finished and ranks.is_main:
            end(settings, folder, sample)
        return outcome.status
    except BaseException as error:
        found = status_and_line(error)
        if found is None:
            raise
        status, line = found
        comm.abort(status, line or type(error).__name__)
        return status
    finally:
        drop_unwritten_output()


def _read_once(
    comm: Comm, kind: type[_Settings], read_settings: Read[_Settings]
) -> tuple[_Settings, Path, bool]:
    """Return what rank 0 reads; it also chooses the folder of the run."""
    read: dict[str, Any] = {}
    if comm.rank == 0:
        try:
            settings, folder, resuming = read_settings()
            read = {"settings": asdict(settings), "folder": str(folder), "resuming": resuming}
        except SystemExit as end:  # after --help: all ranks exit with this status
            read = {"status": end.code}
        except TensorgradError as error:
            logging.error("%s", error)
            read = {"status": 1}
    read = comm.broadcast_object(read)
    if "status" in read:
        sys.exit(read["status"])
    settings = kind(**read["settings"])
    world(timeout=60 * settings.timeout)
    return settings, Path(read["folder"]), read["resuming"]
