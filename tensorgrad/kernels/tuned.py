"""Choices that only measuring can make, kept in tuned.json.

    {"sm_90": {"matmul": {"bfloat16 nt lll": "wgmma"}}}

means that on GPUs of this architecture, in this case of the choice "matmul", the kernel "wgmma" was
the fastest. A case that the file does not list takes the default of the caller. The file is written
by `python -m tensorgrad.kernels.tune --write` and read once a process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tensorgrad.core import backend
from tensorgrad.core.errors import KernelError
from tensorgrad.io.files import write_json
from tensorgrad.io.readers import read_json
from tensorgrad.kernels.device import capability

PATH = Path(__file__).with_name("tuned.json")
Rows = dict[str, dict[str, dict[str, str]]]  # architecture, choice, case: what was fastest


class TuningCase(NamedTuple):
    """A question that `python -m tensorgrad.kernels.tune` puts to the GPU."""

    choice: str
    name: str
    default: str
    candidates: Mapping[str, Callable[[], object]]  # the default among them


def tuned(choice: str, case: str, default: str) -> str:
    """Return what was the fastest in a case on the current GPU, or the default."""
    return _read(PATH).get(architecture(), {}).get(choice, {}).get(case, default)


def architecture() -> str:
    """Return the name of the current GPU's architecture, such as "sm_90"."""
    return f"sm_{capability(backend.cupy.cuda.runtime.getDevice())}"


def read(path: Path) -> Rows:
    """Return the rows of a file.

    Raises:
        KernelError: it cannot be read, or holds something else.
    """
    try:
        rows = read_json(path)
    except (OSError, ValueError) as error:
        raise KernelError(f"tuned: {path} got {error}, expected choices as JSON") from error
    if not _nested(rows, 3):
        raise KernelError(
            f"tuned: {path} has other contents, expected {{GPU: {{choice: {{case: name}}}}}}"
        )
    found: Rows = rows
    return found


def write(path: Path, rows: Rows) -> None:
    """Write rows, one case a line, so that two versions of the file compare well.

    Raises:
        KernelError: the file cannot be written.
    """
    ordered = {
        gpu: {choice: dict(sorted(cases.items())) for choice, cases in sorted(choices.items())}
        for gpu, choices in sorted(rows.items())
    }
    try:
        write_json(path, ordered, 1)
    except OSError as error:
        raise KernelError(f"tuned: {path} got {error}, expected a file to write") from error


def _nested(value: object, depth: int) -> bool:
    """Whether this is a dictionary of strings, or of such dictionaries."""
    if depth == 0:
        return isinstance(value, str)
    return isinstance(value, dict) and all(_nested(one, depth - 1) for one in value.values())


@cache
def _read(path: Path) -> Rows:
    return read(path)
