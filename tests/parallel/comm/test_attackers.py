"""Attacks on the watchdog's socket do not change the bits of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel.comm import attacked
from tests.ranks import run_ranks


@pytest.mark.mpi
def test_a_run_that_is_attacked_has_the_bits_of_one_that_is_not() -> None:
    alone, disturbed = (
        run_ranks(Path(attacked.__file__), 2, [how]) for how in ("alone", "attacked")
    )
    assert len(alone.stdout.splitlines()) > attacked.STEPS
    assert disturbed.stdout == alone.stdout
    assert (alone.stderr, disturbed.stderr) == ("", "")
