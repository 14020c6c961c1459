"""Arrays and devices; the module is tensorgrad.core.backend."""

import sys

from tensorgrad.core import backend
from tensorgrad.core.backend import *  # noqa: F403
from tensorgrad.core.backend import __all__ as __all__

sys.modules[__name__] = backend  # the same module, whichever name it is imported by
