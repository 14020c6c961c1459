"""The curvature of the checkpoints of a run, on batches of its training data.

Tests: tests/curvature/test_runs.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from tensorgrad.core.errors import ArgumentError, CheckpointError, DamagedError
from tensorgrad.core.tensor import Tensor
from tensorgrad.curvature.estimates import density
from tensorgrad.curvature.lanczos import eigenpairs
from tensorgrad.curvature.models import model_fisher, model_gauss_newton, model_hessian
from tensorgrad.curvature.operators import Operator, Progress
from tensorgrad.curvature.record import MATRICES
from tensorgrad.io.files import finite
from tensorgrad.models.language_model import LanguageModel
from tensorgrad.ops.cross_entropy import cross_entropy
from tensorgrad.train.checkpoint import Checkpoint, list_checkpoints, load_checkpoint
from tensorgrad.train.language import LanguageModeling
from tensorgrad.train.log import read_metrics
from tensorgrad.train.loop import mean_loss
from tensorgrad.train.task import Task

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CurvatureOptions:
    """Options of a measurement of a run's checkpoints.

    Args:
        matrix: hessian; gauss-newton or fisher of a language model.
        checkpoints: all that the run has kept, or the last.
        eigenvalues: how many of the largest, at most 20.
        tolerance: the largest residual of an eigenvalue, as a fraction of it.
        batches: batches of the training data, from the first step on, whose mean loss counts.
        samples: random vectors for the density of the last checkpoint, 2 or more; 0: no density.
        steps: products with each: how fine the density is.
        seed: of random vectors.
    """

    matrix: Literal[tuple(MATRICES)] = "hessian"  # type: ignore[valid-type]
    checkpoints: Literal["all", "last"] = "all"
    eigenvalues: int = 1
    tolerance: float = 0.01
    batches: int = 2
    samples: int = 4
    steps: int = 32
    seed: int = 0


DEFAULTS = CurvatureOptions()


def measure_run(
    task: Task, options: CurvatureOptions, progress: Progress | None = None
) -> dict[str, Any]:
    """Return the curvature of the checkpoints of a run, as curvature.json has it.

    Args:
        task: of the run, prepared on a device; its model gets the parameters of each checkpoint.
        options: what to measure.
        progress: called as progress(words, products, all products or 0).

    Raises:
        CheckpointError: the run has no checkpoint that is intact.
        ArgumentError: the task has no such matrix, or an option is out of its range.
    """
    paths = list_checkpoints(task.folder / "checkpoints")
    if not paths:
        raise CheckpointError(
            f"curvature: {task.folder} has no checkpoints, expected one or more; a run writes them "
            "every --checkpoint-every steps and keeps the last --keep"
        )
    batches = [*islice(task.batches(0), options.batches)]
    operator = _operator(task, options.matrix, batches)
    if options.eigenvalues > operator.size:
        raise ArgumentError(
            f"--eigenvalues: got {options.eigenvalues}, expected at most {operator.size}, the "
            "number of parameters"
        )
    metrics = task.folder / "metrics.jsonl"
    records = read_metrics(metrics) if metrics.exists() else []
    rates = {record["step"]: record["lr"] for record in records if "lr" in record}
    checkpoints: list[dict[str, Any]] = []
    spectrum: dict[str, Any] | None = None
    for checkpoint in _intact(paths):
        task.model.load_state_dict(checkpoint.arrays("model"))
        step = checkpoint.step
        try:
            pairs = eigenpairs(
                operator, options.eigenvalues, tolerance=options.tolerance, seed=options.seed,
                progress=_told(progress, f"eigenvalues at step {step:,}"),
            )  # fmt: skip
            if options.samples and spectrum is None:
                spectrum = _density(operator, step, options, progress)
        except ArgumentError as error:
            raise ArgumentError(f"curvature: {checkpoint.path}: {error}") from error
        if far := int((~pairs.converged).sum()):
            _log.warning(
                "step %s: %d of %d eigenvalues have a residual above the tolerance %g (residuals "
                "are in curvature.json): narrow products are not symmetric enough for them; take "
                "--dtype float32, or a larger --tolerance",
                *(f"{step:,}", far, len(pairs.values), options.tolerance),
            )
        measured = {
            "step": step,
            "loss": mean_loss(task.model, task.loss, batches, count=task.count),
            "learning_rate": rates.get(step, task.resolved.learning_rate(max(0, step - 1))),
            "values": pairs.values.tolist(),
            "residuals": pairs.residuals.tolist(),
            "converged": pairs.converged.tolist(),
            "products": pairs.products,
        }
        checkpoints.insert(0, finite(measured))
        if options.checkpoints == "last":
            break
    if not checkpoints:
        raise CheckpointError(f"curvature: no checkpoint of {task.folder} is intact, expected one")
    return {
        "format": 1,
        "parameters": operator.size,
        "options": asdict(options),
        "checkpoints": checkpoints,
        "density": spectrum,
    }


def _intact(paths: list[Path]) -> Iterator[Checkpoint]:
    """Yield the checkpoints that are intact, with a warning for each other."""
    for path in paths:
        try:
            yield load_checkpoint(path)
        except DamagedError as error:
            _log.warning("%s; skipping it", error)


def _density(
    operator: Operator, step: int, options: CurvatureOptions, progress: Progress | None
) -> dict[str, Any]:
    """Return the spectral density at a checkpoint, and the trace that follows from it."""
    told = _told(progress, f"density at step {step:,}")
    spectrum = density(operator, options.samples, options.steps, seed=options.seed, progress=told)
    mean = spectrum.moment(1)
    return {
        "step": step,
        "trace": mean.value * spectrum.size,
        "trace_error": mean.error * spectrum.size,
        "nodes": spectrum.nodes.tolist(),
        "weights": spectrum.weights.tolist(),
        "products": spectrum.products,
    }


def _told(progress: Progress | None, words: str) -> Progress | None:
    if progress is None:
        return None
    return lambda _, done, total: progress(words, done, total)


def _operator(task: Task, matrix: str, batches: list[tuple[Any, ...]]) -> Operator:
    """Return a matrix of the mean loss of batches by the parameters of a task's model."""
    model = task.model
    if matrix == "hessian":
        return model_hessian(model, _with_model(task, task.loss), batches)
    if not isinstance(task, LanguageModeling):
        raise ArgumentError(
            f"--matrix: got {matrix} for a run of {task.settings.task}, expected hessian: of the "
            "other two a run must be of a language-model"
        )

    def logits(model: LanguageModel, tokens: Any, targets: Any) -> Tensor:
        with task.precision():
            return model(tokens)

    if matrix == "gauss-newton":
        return model_gauss_newton(
            model, logits, lambda z, _, targets: cross_entropy(z, targets), batches
        )
    return model_fisher(
        model, lambda m, x, y: cross_entropy(logits(m, x, y), y, reduction="none"), batches
    )


def _with_model(task: Task, loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the loss of a task as a function of the model too."""

    def of_model(model: Any, *batch: Any) -> Tensor:
        own, task.model = task.model, model
        try:
            return loss(*batch)
        finally:
            task.model = own

    return of_model
