"""No fault at any call on files loses anything: see disk_faults.py for what is tried."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.failing_calls import compile_library
from tests.source_tree import ROOT

# Writers and readers, and how many calls on files each makes at least.
RUN = {"run": 100}
OTHERS = {"rank-0": 60, "rank-1": 15, "metrics": 10, "cache": 60, "exports": 40}
READERS = {"resume": 50, "rank-0-resume": 20, "rank-1-resume": 20, "cache-read": 20, "weights": 20}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = compile_library(tmp_path_factory.mktemp("library"))
    if found is None:
        pytest.skip("needs Linux and a C compiler")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    ("how", "scenarios"),
    [
        ("once", RUN),
        ("once", {**OTHERS, **READERS}),
        ("from-then-on", {**RUN, **OTHERS}),
        ("kill", RUN),
        ("kill", OTHERS),
    ],
    ids=["once-run", "once-others", "from-then-on", "kill-run", "kill-others"],
)
def test_a_fault_at_any_call_loses_nothing(
    library: Path, tmp_path: Path, how: str, every: int, scenarios: dict[str, int]
) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tests.disk_faults", how, str(every), str(tmp_path), *scenarios],
        cwd=ROOT,
        env={
            **os.environ,
            "LD_PRELOAD": str(library),
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        },
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    found: dict[str, Any] = json.loads(result.stdout)
    assert {name: each["lost"] for name, each in found.items() if each["lost"]} == {}
    for name, least in scenarios.items():
        assert found[name]["points"] >= least // every, name
