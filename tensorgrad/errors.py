"""Exceptions of tensorgrad; the module is tensorgrad.core.errors."""

import sys

from tensorgrad.core import errors
from tensorgrad.core.errors import *  # noqa: F403
from tensorgrad.core.errors import __all__ as __all__

sys.modules[__name__] = errors  # the same module, whichever name it is imported by
