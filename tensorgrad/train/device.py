"""The device of a run, and the dtype where a GPU lacks the one that was asked for."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TypeVar

from tensorgrad import backend
from tensorgrad.train.settings import TrainSettings

_log = logging.getLogger(__name__)


_Settings = TypeVar("_Settings", bound=TrainSettings)


def choose_device(settings: _Settings) -> tuple[_Settings, str]:
    """Return the settings and the device to train on; a GPU becomes the current one.

    On a GPU without bfloat16 the settings get float16 or float32 instead, with a warning.

    Raises:
        DeviceError: the device does not exist.
    """
    device = backend.use_device(settings.device)
    index = backend.gpu_index(device)
    if index is not None and settings.dtype.startswith("bfloat16"):
        capability = backend.cupy.cuda.Device(index).compute_capability
        if int(capability) < 80:
            dtype = "float16" if settings.dtype == "bfloat16" else "float32"
            _log.warning(
                "%s has no bfloat16 (compute capability %s); using %s", device, capability, dtype
            )
            settings = replace(settings, dtype=dtype)
    return settings, device
