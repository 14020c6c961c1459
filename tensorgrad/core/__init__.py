"""The spine of the library, read first: arrays, tensors, and how gradients travel.

In reading order: errors, dtypes, backend, arrays, modes, instrument, gradient, nodes, backward,
tensor, record, operands, signature. Nothing here knows an op or a kernel; docs/chapters/core.md
explains it.
"""

from tensorgrad.startup import distribution  # noqa: F401  whether the files are this project's
