"""Let the n-th call on files below a folder fail, for every n: failing_calls.c, preloaded.

The system's own calls fail, so that those of other libraries (safetensors, tokenizers) do too.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("failing_calls.c")
LIBRARY = "failing_calls.so"
ONCE, FROM_THEN_ON, KILL = range(3)


def compile_library(folder: Path) -> Path | None:
    """Compile the library into a folder and return its file; None where there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or os.uname().sysname != "Linux":
        return None
    out = folder / LIBRARY
    command = [compiler, "-shared", "-fPIC", "-O1", "-w", "-o", str(out), str(SOURCE), "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    return out


@dataclass
class Fault:
    """The call to fail, and what came of it.

    Attributes:
        number: which call of the thread that is armed, from 1.
        how: ONCE, FROM_THEN_ON or KILL.
        reached: whether there were as many calls.
        call: the first that failed.
    """

    number: int
    how: int
    reached: bool = False
    call: str = ""

    @contextmanager
    def armed(self, folder: Path) -> Iterator[None]:
        """Let the call fail if this thread makes it in the block."""
        library = ctypes.CDLL(os.environ["LD_PRELOAD"])
        library.failing_calls_disarm.restype = ctypes.c_long
        name = ctypes.create_string_buffer(128)
        library.failing_calls_arm(os.fsencode(folder), ctypes.c_long(self.number), self.how)
        try:
            yield
        finally:
            counted = library.failing_calls_disarm(name, ctypes.c_size_t(128))
            self.reached, self.call = counted >= self.number, name.value.decode()
