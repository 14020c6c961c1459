"""What happens before the other imports: whether the files fit together, Ctrl-C meanwhile."""

from tensorgrad.startup import distribution  # noqa: F401  whether the files are this project's
