"""Where a run computes, and in which type."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, ClassVar, Protocol, TypeVar

from tensorgrad import backend

_log = logging.getLogger(__name__)


class HasDevice(Protocol):
    """Settings with a device and a type."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def device(self) -> str:
        """One of "cpu", "cuda", "cuda:N" and "auto": a GPU if there is one."""

    @property
    def dtype(self) -> str:
        """As in TrainSettings."""


_Settings = TypeVar("_Settings", bound=HasDevice)


def choose_device(settings: _Settings) -> tuple[_Settings, str]:
    """Return settings that the device can follow, and the device; a GPU becomes the current one.

    A GPU without bfloat16 gets float16 or float32, and a message.

    Raises:
        DeviceError: there is no such device.
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
