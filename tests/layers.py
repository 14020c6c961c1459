"""The layers of the library, lowest first; `python -m tests.layers` draws docs/layers.svg.

Every module belongs to one: to the layer that lists it or the nearest package above it.
"""

from __future__ import annotations

from html import escape

from tests.source_tree import ROOT, examples, library

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
    "instruments": ("profile", "report", "bench"),
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
    width, lines, y = 860, [], 10
    for place in reversed(range(len(LAYERS))):
        boxes, x, row = [], 16, y + 30
        for part, count in parts_of(place):
            label = f"{part} ({count} files)" if count > 1 else part
            wide = 12 + 7 * len(label)
            if x + wide > width - 16:
                x, row = 16, row + 30
            boxes.append(
                f'<rect x="{x}" y="{row}" width="{wide}" height="22" rx="3" fill="#fff" '
                f'stroke="#567"/><text x="{x + 6}" y="{row + 15}">{escape(label)}</text>'
            )
            x += wide + 8
        height = row + 32 - y
        lines += [
            f'<rect x="4" y="{y}" width="{width - 8}" height="{height}" rx="6" fill="#eef3f8"/>',
            f'<text x="16" y="{y + 18}" font-weight="bold">{escape(list(LAYERS)[place])}</text>',
            *boxes,
        ]
        y += height + 8
    note = "Imports go down. ops/methods.py makes ops the methods of Tensor."
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y + 24}" '
        f'font-family="monospace" font-size="11.5">\n'
        + "\n".join(lines)
        + f'\n<text x="16" y="{y + 14}">{note}</text>\n</svg>\n'
    )


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
