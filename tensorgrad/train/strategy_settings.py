"""The options that say how several ranks share the work of a run.

They are not saved with a run: each start says them again. The strategy that they name is made in
tensorgrad/parallel/program.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from tensorgrad.core.errors import ArgumentError
from tensorgrad.train.config import documented, option

REDUCTIONS = ("naive", "flat", "overlap")
ZERO = {"zero1": 1, "zero2": 2, "zero3": 3}  # the stage of each
MODES = ("none", *REDUCTIONS, *ZERO)
PIPELINE_SCHEDULES = ("model-parallel", "gpipe", "1f1b", "interleaved")


@documented
@dataclass(frozen=True)
class StrategySettings:
    """How several ranks train together.

    Raises:
        ArgumentError: a setting contradicts another one.
    """

    parallel: str = option(
        "overlap",
        "how data parallel ranks work together: gradients are all-reduced by a call per parameter "
        "(naive), one call (flat), or a call per bucket during backward (overlap); ZeRO shards "
        "optimizer state (zero1), gradients too (zero2), parameters too (zero3); none: one process",
        choices=MODES,
        saved=False,
    )
    bucket_mb: float | None = option(
        None, "size of a gradient bucket in MB", shown="chosen by the number of gradients",
        saved=False,
    )  # fmt: skip
    dp: int | None = option(
        None, "data parallel ranks", shown="as many as pp and tp allow", low=1, saved=False
    )
    pp: int = option(1, "pipeline stages", low=1, saved=False)
    tp: int = option(1, "tensor parallel ranks, which share each layer", low=1, saved=False)
    pipeline_schedule: str = option(
        "1f1b", "order of micro-batches in a pipeline", choices=PIPELINE_SCHEDULES, saved=False
    )
    chunks: int | None = option(
        None, "model chunks per stage", shown="1, or 2 if interleaved", low=1, saved=False
    )
    sequence_parallel: bool = option(
        False, "shard activations between layers over the tp ranks; no sample", saved=False
    )
    timeout: float = option(
        10, "minutes to wait for another rank before all ranks exit", low=0.01, saved=False
    )

    def check_strategy(self) -> None:
        """Raise ArgumentError where buckets have no size, or the mode has no buckets."""
        if self.bucket_mb is not None and self.bucket_mb <= 0:
            raise ArgumentError(f"--bucket-mb: got {self.bucket_mb}, expected more than 0")
        if self.bucket_mb is not None and self.parallel not in ("overlap", "zero1"):
            raise ArgumentError(
                f"--bucket-mb: got {self.bucket_mb} with --parallel {self.parallel}, expected "
                "none: it has no buckets"
            )

    @property
    def model_chunks(self) -> int:
        """Model chunks per stage of the pipeline."""
        return self.chunks or (2 if self.pipeline_schedule == "interleaved" else 1)
