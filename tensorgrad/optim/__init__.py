"""Optimizers over flat buffers, gradient clipping, learning-rate schedules and loss scaling."""

from typing import TYPE_CHECKING, Any

from tensorgrad.compat.omitted import missing as _missing
from tensorgrad.optim import lr_scheduler, schedule
from tensorgrad.optim.adafactor import Adafactor
from tensorgrad.optim.adamw import Adam, AdamW
from tensorgrad.optim.average import WeightAverage
from tensorgrad.optim.clip import clip_grad_norm, grad_norm
from tensorgrad.optim.flat import FlatParameters, decays_matrices, in_blocks
from tensorgrad.optim.fp8_scales import Fp8Scales
from tensorgrad.optim.groups import ParameterGroup
from tensorgrad.optim.lion import Lion
from tensorgrad.optim.muon import Muon
from tensorgrad.optim.optimizer import Optimizer
from tensorgrad.optim.scaler import LossScaler
from tensorgrad.optim.scheduler import Scheduler
from tensorgrad.optim.sgd import SGD

__all__ = [
    "SGD",
    "Adafactor",
    "Adam",
    "AdamW",
    "FlatParameters",
    "Fp8Scales",
    "Lion",
    "LossScaler",
    "Muon",
    "Optimizer",
    "ParameterGroup",
    "Scheduler",
    "WeightAverage",
    "clip_grad_norm",
    "decays_matrices",
    "grad_norm",
    "in_blocks",
    "lr_scheduler",
    "schedule",
]

if not TYPE_CHECKING:  # to a type checker every name would exist

    def __getattr__(name: str) -> Any:
        raise _missing(__name__, name)
