"""The spine of the library, read first: arrays, tensors, and how gradients travel.

In reading order: errors, dtypes, backend, blocks, arrays, modes, instrument, gradient, nodes,
backward, tensor, record. Nothing here knows an op or a kernel; docs/chapters/core.md explains it.
"""

from tensorgrad.core import distribution  # noqa: F401  whether the files are those of this project
