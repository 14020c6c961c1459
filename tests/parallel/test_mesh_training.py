from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.parallel import mesh_training
from tests.ranks import run_ranks


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_mesh_takes_the_steps_of_one_process(ranks: int) -> None:
    out = run_ranks(Path(mesh_training.__file__), ranks).stdout
    assert re.fullmatch(rf"[1-9]\d* runs on {ranks} ranks\n", out)
