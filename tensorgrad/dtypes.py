"""Element types; the module is tensorgrad.core.dtypes."""

import sys

from tensorgrad.core import dtypes
from tensorgrad.core.dtypes import *  # noqa: F403
from tensorgrad.core.dtypes import __all__ as __all__

sys.modules[__name__] = dtypes  # the same module, whichever name it is imported by
