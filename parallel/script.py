"""Scripts that all ranks run: one reads the command line, and an error on one ends all of them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from tensorgrad.core.errors import TensorgradError
from tensorgrad.io.command import drop_unwritten_output, status_and_line
from tensorgrad.parallel.comm.collectives import Comm
from tensorgrad.parallel.comm.mpi_nccl import world
from tensorgrad.train.config import ProgramSettings

_log = logging.getLogger(__name__)
_Settings = TypeVar("_Settings", bound=ProgramSettings)
_Arguments = ParamSpec("_Arguments")
Read = Callable[[], tuple[Any, Path, bool]]  # settings, the folder of the run, whether to resume it


def command_on_ranks(
    program: Callable[Concatenate[Comm, _Arguments], int],
) -> Callable[_Arguments, int]:
    """Wrap a program of all ranks, which gets their communicator, to return an exit status.

    An error on one rank ends all of them. One that a user can fix is one line.
    """

    @wraps(program)
    def run(*arguments: _Arguments.args, **options: _Arguments.kwargs) -> int:
        comm = world()
        level = logging.INFO if comm.rank == 0 else logging.ERROR
        logging.basicConfig(level=level, format="%(message)s")
        try:
            return program(comm, *arguments, **options)
        except BaseException as error:
            found = status_and_line(error)
            if found is None:
                raise
            status, line = found
            comm.abort(status, line or type(error).__name__)
            return status
        finally:
            drop_unwritten_output()

    return run


def read_on_ranks(
    comm: Comm, settings: type[_Settings], read: Read
) -> tuple[_Settings, Path, bool]:
    """Return on all ranks what rank 0 reads, which also chooses the folder.

    Args:
        comm: the ranks.
        settings: the class of the settings.
        read: called on rank 0; returns what `read_command_line` does.
    Raises:
        SystemExit: after --help and after an error, of which rank 0 has said what it is.
    """
    told: Any = None
    if comm.rank == 0:
        try:
            chosen, folder, resuming = read()
            told = [asdict(chosen), str(folder), resuming]
        except SystemExit as end:
            told = end.code
        except TensorgradError as error:
            _log.error("%s", error)
            told = 1
    told = comm.broadcast_object(told)
    if isinstance(told, list):
        return settings(**told[0]), Path(told[1]), told[2]
    sys.exit(told)
