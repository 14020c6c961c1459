from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tensorgrad.errors import ArgumentError
from tensorgrad.models.translation import TranslationConfig, TranslationModel
from tensorgrad.optim import AdamW
from tensorgrad.parallel import Comm, Pipeline
from tests.parallel import pipeline_ranks
from tests.ranks import run_ranks

PROGRAM = "tests.parallel.pipeline_ranks"


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_schedule_trains_as_one_process(ranks: int, tmp_path: Path) -> None:
    result = run_ranks(PROGRAM, ranks, [tmp_path, "cpu"], timeout=240)
    assert f"{len(pipeline_ranks.checks(ranks, 'cpu'))} checks on {ranks} ranks" in result.stdout


@pytest.mark.mpi
@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_schedule_trains_as_one_process_on_gpus(ranks: int, tmp_path: Path) -> None:
    result = run_ranks(PROGRAM, ranks, [tmp_path, "cuda"], timeout=240)
    assert f"{len(pipeline_ranks.checks(ranks, 'cuda'))} checks on {ranks} ranks" in result.stdout


@pytest.mark.parametrize("schedule", pipeline_ranks.SCHEDULES)
def test_one_stage_is_one_process(schedule: tuple[str, int], tmp_path: Path) -> None:
    config = pipeline_ranks.gpt2(3, dropout=0.1)
    options: dict[str, Any] = {"steps": 3, "checkpoint_every": 3}
    pipeline_ranks.make_trainer(tmp_path / "alone", config, **options).run()
    ranks = Pipeline(Comm(), *schedule)
    pipeline_ranks.make_trainer(tmp_path / "run", config, ranks, **options).run()
    pipeline_ranks.compare(Comm(), tmp_path / "run", tmp_path / "alone", exact=schedule[1] == 1)


def test_a_model_without_causal_attention_is_refused() -> None:
    """Stages would train it without the mask, so each token would see its target."""
    sizes: dict[str, Any] = {"context": 16, "layers": 1, "heads": 2, "kv_heads": 2, "width": 8}
    model = TranslationModel(TranslationConfig(40, prefix=True, **sizes))
    with pytest.raises(ArgumentError, match="attention that is not causal, as translation"):
        Pipeline(Comm()).prepare(model, lambda parameters: AdamW(parameters))
