"""The layers of the library, lowest first; `python -m tests.layers` draws docs/layers.svg.

Every module belongs to one: to the layer that lists it or the nearest package above it.
"""

from __future__ import annotations

from tests.source_tree import ROOT, examples, library
from tests.svg import BLUE, WIDTH, Drawing

LAYERS: dict[str, tuple[str, ...]] = {
    "start-up": ("startup",),
    "core: arrays, tensors, gradients": ("core",),
    "files, and names for core/": (
        *("errors", "dtypes", "backend", "io", "compat.omitted", "compat.dlpack"),
    ),
    "kernels: how an op runs on a GPU": ("kernels",),
    "tensors and differentiation": (
        *("autograd", "amp", "random", "testing", "graph", "ops.philox"),
        *("compat.array_api", "compat.einops_backend", "compat.interop"),
    ),
    "ops: what an op is": ("ops", "linalg", "fft", "compat"),
    "layers and optimizers": ("nn", "optim"),
    "data and models": ("data", "models"),
    "training on one or many ranks": ("train", "parallel"),
    "instruments": ("profile", "report", "bench", "curvature"),
    "the package": ("",),
    "programs": ("cli", "__main__", "examples"),
}
PICTURE = ROOT / "docs" / "layers.svg"


def layer_of(module: str) -> int:
    """Return the place of a module's layer.

    Raises:
        LookupError: it belongs to none.
    """
    part = (
        module if module.startswith("examples") else module.removeprefix("tensorgrad").lstrip(".")
    )
    for place, parts in enumerate(LAYERS.values()):
        if any(part == one or (one and part.startswith(f"{one}.")) for one in parts):
            return place
    raise LookupError(f"{module} belongs to no layer: add it to LAYERS in tests/layers.py")


def parts_of(place: int) -> list[tuple[str, int]]:
    """Return the modules and packages of a layer, and how many files each has."""
    counts: dict[str, int] = {}
    for source in (*library(), *examples()):
        if layer_of(source.module) == place:
            part = source.module.removeprefix("tensorgrad.").partition(".")[0]
            counts[part] = counts.get(part, 0) + 1
    return list(counts.items())


def picture() -> str:
    """Return the picture as SVG: a band for each layer, a box for each module or package."""
    bands, y = [], 4
    for place in reversed(range(len(LAYERS))):
        boxes, x, row = [], 10.0, y + 22
        for part, count in parts_of(place):
            label = f"{part} ({count} files)" if count > 1 else part
            width = 10 + 6.4 * len(label)
            if x + width > WIDTH - 10:
                x, row = 10.0, row + 24
            boxes.append((x, row, width, label))
            x += width + 6
        bands.append((y, row + 24 - y, list(LAYERS)[place], boxes))
        y = row + 30
    drawing = Drawing("The layers of the library, each above those that it imports", y + 34)
    for top, height, name, boxes in bands:
        drawing.box(4, top, WIDTH - 8, height, fill=BLUE)
        drawing.text(10, top + 14, name, bold=True)
        for x, row, width, label in boxes:
            drawing.box(x, row, width, 19, label)
    drawing.text(10, y + 12, "Imports go down.")
    drawing.text(10, y + 26, "ops/methods.py makes ops the methods of Tensor.")
    return drawing.svg()


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
