"""Files: named arrays, tensors and settings; tables, and readers of untrusted files."""

from typing import TYPE_CHECKING, Any

from tensorgrad.compat.omitted import missing as _missing
from tensorgrad.io.saving import load, save

__all__ = ["ArrayFile", "load", "load_arrays", "load_metadata", "save", "save_arrays"]

if TYPE_CHECKING:
    from tensorgrad.io.weights import ArrayFile, load_arrays, load_metadata, save_arrays
else:  # at the first use, as the module imports safetensors

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise _missing(__name__, name)
        from tensorgrad.io import weights

        return getattr(weights, name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
