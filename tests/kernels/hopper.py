"""The mark of tests whose kernels run on Hopper alone."""

from __future__ import annotations

import pytest

from tensorgrad.core import backend
from tensorgrad.kernels.device import capability

IS_HOPPER = backend.gpu_count() > 0 and capability(0) == 90  # nothing else runs sm_90a

hopper = pytest.mark.skipif(not IS_HOPPER, reason="no GPU of compute capability 9.0 was found")
