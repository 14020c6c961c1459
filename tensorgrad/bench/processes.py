"""A measurement in a new process, which shares no threads, caches or memory with this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

_PROGRAM = """
import importlib, json, sys
module, name, arguments = sys.argv[1:]
found = getattr(importlib.import_module(module), name)(**json.loads(arguments))
print(json.dumps(found))
"""


def in_new_process(
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
) -> Any:
    """Return what a public function of a module returns in a new process.

    Args:
        function: takes and returns what JSON has.
        arguments: by name.
        environment: variables beside those of this process.
    Raises:
        RuntimeError: the process failed; the message is the end of its errors.
    """
    command = [sys.executable, "-c", _PROGRAM, function.__module__, function.__name__]
    done = subprocess.run(
        [*command, json.dumps(dict(arguments))],
        env={**os.environ, **(environment or {})}, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise RuntimeError(f"{function.__name__} in a new process: {lines[-1]}")
    return json.loads(done.stdout.splitlines()[-1])
