"""Files: named arrays, tensors and settings; tables, and how files of strangers are read."""

from tensorgrad.io.saving import load, save
from tensorgrad.io.weights import ArrayFile, load_arrays, load_metadata, save_arrays

__all__ = ["ArrayFile", "load", "load_arrays", "load_metadata", "save", "save_arrays"]
