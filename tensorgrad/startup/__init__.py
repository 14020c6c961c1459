"""The first imports: whether the files fit together, and a quiet end after Ctrl-C meanwhile."""

from tensorgrad.startup import distribution  # noqa: F401  whether the files are this project's
