"""Drawings as SVG: boxes, arrows and text on a light panel, so that any page around may be dark.

A drawing is as wide as a phone's screen, and shown larger where there is space. A monospaced font
is assumed; text that its box or the drawing cannot hold is an error.
"""

from __future__ import annotations

from html import escape

WIDTH, SCALE = 360, 1.5  # units; pixels of a unit where there is space
INK, LINE, PANEL, WHITE = "#1b2733", "#5b6b7b", "#f4f6f8", "#ffffff"
BLUE, GREEN, ORANGE, GREY = "#cfe0f5", "#cfe8cf", "#fbdcb8", "#dde1e5"
SIZE = 10.5  # font size
_LETTER = 0.61  # width of a letter of size 1
_DASHES = ' stroke-dasharray="3 3"'


class Drawing:
    """A drawing in the making.

    Args:
        title: what it shows, for readers who do not see it.
        height: in units, of which `WIDTH` make the width.
    """

    def __init__(self, title: str, height: int) -> None:
        self.title, self.height = title, height
        self._lines: list[str] = []

    def text(
        self, x: float, y: float, words: str, *, size: float = SIZE, bold: bool = False,
        anchor: str = "start",
    ) -> None:  # fmt: skip
        """Write a line of text.

        Args:
            x, y: of the left end of the baseline, or of its middle or right end, see `anchor`.
            words: the text.
            size: of the font.
            bold: whether it is a heading.
            anchor: "start", "middle" or "end".

        Raises:
            ValueError: it does not fit into the drawing.
        """
        length = _LETTER * size * len(words)
        left = x - {"start": 0, "middle": length / 2, "end": length}[anchor]
        if left < 2 or left + length > WIDTH - 2 or not size <= y <= self.height - 2:
            raise ValueError(f"{self.title}: {words!r} at {x}, {y} is outside of the drawing")
        style = f' font-size="{size:g}"' * (size != SIZE) + ' font-weight="bold"' * bold
        style += f' text-anchor="{anchor}"' * (anchor != "start")
        self._lines.append(f'<text x="{x:g}" y="{y:g}"{style}>{escape(words)}</text>')

    def box(
        self, x: float, y: float, width: float, height: float, *words: str, fill: str = WHITE,
        size: float = SIZE, dashed: bool = False,
    ) -> None:  # fmt: skip
        """Draw a rectangle with lines of text in its middle.

        Raises:
            ValueError: the text does not fit, or the box is outside of the drawing.
        """
        if min(x, y) < 2 or x + width > WIDTH - 2 or y + height > self.height - 2:
            raise ValueError(f"{self.title}: the box {words} at {x}, {y} is outside of the drawing")
        step = size + 2.5
        if len(words) * step > height + 2 or any(
            _LETTER * size * len(line) > width - 1 for line in words
        ):
            raise ValueError(f"{self.title}: {words} does not fit {width} x {height}")
        self._lines.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" '
            f'stroke="{LINE}"{_DASHES * dashed}/>'
        )
        top = y + (height - len(words) * step) / 2 + size - 0.5
        for number, line in enumerate(words):
            self.text(x + width / 2, top + number * step, line, size=size, anchor="middle")

    def line(self, *points: tuple[float, float], arrow: bool = True, dashed: bool = False) -> None:
        """Draw a line through points, with a head at its end where `arrow` says so."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        head = ' marker-end="url(#head)"' if arrow else ""
        self._lines.append(
            f'<polyline points="{path}" fill="none" stroke="{INK}"{_DASHES * dashed}{head}/>'
        )

    def svg(self) -> str:
        """Return the file."""
        size = f'width="{WIDTH * SCALE:g}" height="{self.height * SCALE:g}"'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" {size} '
            f'font-family="monospace" font-size="{SIZE}" fill="{INK}" role="img">\n'
            f"<title>{escape(self.title)}</title>\n"
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{INK}"/></marker>'
            "</defs>\n"
            f'<rect width="{WIDTH}" height="{self.height}" rx="6" fill="{PANEL}"/>\n'
            + "\n".join(self._lines)
            + "\n</svg>\n"
        )
