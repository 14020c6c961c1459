"""The benchmark of Hessian-vector products measures products beside gradients, and scaling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorgrad import parallel
from tensorgrad.bench import derivatives
from tensorgrad.bench.options import Sizes
from tensorgrad.bench.steps import model_case
from tensorgrad.cli import main
from tensorgrad.io.readers import read_json
from tests.bench.test_step import TINY


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_rows_have_products_and_gradients() -> None:
    options = ["--preset", "char", "--batch", "2", *TINY, "--no-peer"]
    assert main(["bench", "derivatives", *options]) == 0
    (row,) = read_json("runs/bench/derivatives.json")["rows"]
    assert row["status"] == "ok"
    assert row["times_gradient"] == pytest.approx(row["hvp_ms"] / row["gradient_ms"], rel=1e-3)
    assert row["times_gradient"] > 1
    assert row["peer_hvp_ms"] is None


def case() -> dict[str, Any]:
    sizes = Sizes(layers=1, heads=2, width=16, context=16, vocab=64)
    return {**model_case("char", 2, "float32", sizes), "seconds": 0.005, "windows": 1}


def test_the_product_is_one_of_the_loss() -> None:
    product, _ = derivatives.steps(case(), "cpu")
    found: Any = product()
    assert all(np.isfinite(t.numpy()).all() for t in found.values())
    assert max(float(np.abs(t.numpy()).max()) for t in found.values()) > 0


def test_ranks_have_a_scaling() -> None:
    row = derivatives.measure_on_ranks(case(), "cpu", parallel.world())
    assert row["scaling"] == pytest.approx(row["alone_ms"] / row["hvp_ms"])
