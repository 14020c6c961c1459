"""The device of a run, and the dtype where a GPU lacks the one that was asked for."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TypeVar

from tensorgrad.amp import FP8
from tensorgrad.core import backend
from tensorgrad.core.errors import DeviceError
from tensorgrad.train.options import in_options
from tensorgrad.train.settings import TrainSettings

_log = logging.getLogger(__name__)


_WITHOUT_AMPERE = {"bfloat16": "float16", "bfloat16-parameters": "float32", "tf32": "float32"}
_Settings = TypeVar("_Settings", bound=TrainSettings)


def choose_device(settings: _Settings) -> tuple[_Settings, str]:
    """Return the settings and the device to train on; a GPU becomes the current one.

    On a GPU without bfloat16 and TF32 the settings get float16 or float32 instead, with a warning.

    Raises:
        DeviceError: the device does not exist.
    """
    with in_options(settings):
        device = backend.use_device(settings.device)
    index = backend.gpu_index(device)
    if index is not None and settings.dtype in (*_WITHOUT_AMPERE, FP8):
        capability = backend.cupy.cuda.Device(index).compute_capability
        if settings.dtype != FP8 and int(capability) < 80:
            asked, dtype = settings.dtype.partition("-")[0], _WITHOUT_AMPERE[settings.dtype]
            _log.warning(
                "%s has no %s (compute capability %s); using %s", device, asked, capability, dtype
            )
            settings = replace(settings, dtype=dtype)
        if settings.dtype == FP8 and int(capability) != 90:
            raise DeviceError(
                f"--dtype: got fp8 on {device}, of compute capability {capability}, expected a GPU "
                "of 9.0 (Hopper); bfloat16-parameters is for all since 8.0"
            )
    return settings, device
