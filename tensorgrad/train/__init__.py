"""The training loop: settings, progress, evaluation, checkpoints and logs."""

from tensorgrad.train.average import average_checkpoints
from tensorgrad.train.callbacks import Callback
from tensorgrad.train.checkpoint import Checkpoint, load_best, load_checkpoint, load_latest
from tensorgrad.train.config import option
from tensorgrad.train.loop import Trainer, mean_loss, measure_loss
from tensorgrad.train.run import Outcome
from tensorgrad.train.script import ScriptRun, ScriptSettings
from tensorgrad.train.settings import TrainSettings
from tensorgrad.train.strategy import OneProcess, Strategy
from tensorgrad.train.task import Task

__all__ = [
    "Callback",
    "Checkpoint",
    "OneProcess",
    "Outcome",
    "ScriptRun",
    "ScriptSettings",
    "Strategy",
    "Task",
    "TrainSettings",
    "Trainer",
    "average_checkpoints",
    "load_best",
    "load_checkpoint",
    "load_latest",
    "mean_loss",
    "measure_loss",
    "option",
]
