"""Fixtures of every test: devices, and the reasons for which tests are skipped."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import logging
import os
import shutil
import signal
import tempfile
from collections import Counter
from pathlib import Path

import hypothesis
import pytest

from tensorgrad.core import backend
from tests import ranks

# A busy machine makes any example slow once; that says nothing about the code.
hypothesis.settings.register_profile("tensorgrad", deadline=None)
hypothesis.settings.register_profile(  # the profile of `make fuzz`; tests/fuzz/cases.py
    "fuzz", deadline=None, max_examples=100_000, derandomize=False, print_blob=True
)
hypothesis.settings.load_profile("tensorgrad")


def pytest_runtest_setup() -> None:
    """Undo what shells and other tests leave: ignored signals, handlers, the level of logging."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Ctrl-C raises
    logging.root.setLevel(logging.WARNING)  # a command sets it where no test captures its messages


_MEMORY = Path("/dev/shm")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of `make nightly`."""
    parser.addoption(
        "--nightly", action="store_true", help="also run what takes long and proves little more"
    )


def pytest_configure() -> None:
    """Keep temporary files in memory where it has room: runs wait for disks thousands of times."""
    if "TMPDIR" in os.environ or not (_MEMORY.is_dir() and os.access(_MEMORY, os.W_OK)):
        return
    if shutil.disk_usage(_MEMORY).free >= 4 * 2**30:
        os.environ["TMPDIR"] = str(_MEMORY)  # programs that tests start have it too
        tempfile.tempdir = None


def _no_gpu() -> str | None:
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed (pip install -e '.[cuda13]')"
    if backend.gpu_count() == 0:
        return "no GPU was found"
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Omit or skip what this machine cannot run; begin with the files that take longest.

    Thousands of tests need a GPU, and to report each of them as skipped takes many seconds.
    """
    omitted = {"gpu"} if _no_gpu() is not None else set()
    if not config.getoption("nightly"):
        omitted.add("nightly")
    marked = [any(mark.name in omitted for mark in item.iter_markers()) for item in items]
    config.hook.pytest_deselected(items=[*itertools.compress(items, marked)])
    items[:] = [item for item, out in zip(items, marked, strict=True) if not out]
    if (reason := ranks.missing()) is not None:
        for item in items:
            if item.get_closest_marker("mpi") is not None:
                item.add_marker(pytest.mark.skip(reason=reason))
    long = {item.path for item in items if item.get_closest_marker("slow") is not None}
    items.sort(key=lambda item: item.path not in long)


def pytest_collection() -> None:
    """Spare the garbage collector the ten thousand tests: each full collection visits them all."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Let it work again, on what comes after the tests."""
    gc.freeze()
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say why tests were omitted or skipped, once for each reason and not for each test."""
    if (reason := _no_gpu()) is not None:
        terminalreporter.write_line(f"omitted the tests of GPUs, {reason}")
    reasons = Counter(
        str(report.longrepr[2]).removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", [])
        if isinstance(report.longrepr, tuple)
    )
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"skipped {count:4d}: {reason}")


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Name each device in turn; the GPU is omitted where there is none."""
    name: str = request.param
    return name
