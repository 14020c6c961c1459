"""The pages in a real browser: they draw, and neither complain nor ask for anything."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tensorgrad.report import compare, to_page, write_report
from tests.report.browser import MISSING, PROGRAM, Browser, browser
from tests.report.made_run import make_run, write_lines

pytestmark = pytest.mark.skipif(PROGRAM is None, reason=MISSING)


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("chromium")) as found:
        yield found


def drawn(page: Browser) -> list[int]:
    """Return the number of points of every curve on the page."""
    script = "[...document.querySelectorAll('.box path.curve')].map((p) => p.getTotalLength() > 9 ? p.getAttribute('d').split(/[ML]/).length - 1 : 0)"  # noqa: E501
    found: list[int] = page.run(script)
    return found


def texts(page: Browser, selector: str) -> list[str]:
    found: list[str] = page.run(
        f"[...document.querySelectorAll({selector!r})].map((e) => e.textContent)"
    )
    return found


def box(page: Browser) -> tuple[float, float, float, float]:
    """Return left, top, width and height of the first chart in the window."""
    left, top, width, height = page.run(
        "(() => { const r = document.querySelector('.box').getBoundingClientRect();"
        " return [r.left, r.top, r.width, r.height]; })()"
    )
    return left, top, width, height


def ticks(page: Browser) -> list[str]:
    """Return the labels of the x axis of the first chart."""
    return texts(page, "figure:first-child .grid text:not([text-anchor=end])")


def test_a_report_is_drawn_zoomed_and_read(chromium: Browser, tmp_path: Path) -> None:
    page = write_report(make_run(tmp_path / "run", steps=400, every=50))
    chromium.complaints.clear()
    chromium.requests.clear()
    chromium.open(page)
    points = drawn(chromium)
    assert len(points) == 18
    assert points[:3] == [400, 400, 9]
    assert min(points) > 2

    left, top, width, height = box(chromium)
    middle = top + height / 2
    chromium.drag((left + 0.5 * width, middle), (left + 0.75 * width, middle))
    zoomed = drawn(chromium)
    assert 90 < zoomed[0] < 130
    assert ticks(chromium)[0] == "200"
    (label, shown) = texts(chromium, "figure:first-child output")[1:3]
    assert float(label) > 3
    assert shown
    assert not chromium.run("document.getElementById('reset').disabled")

    chromium.run("document.getElementById('reset').click()")
    assert drawn(chromium) == points
    chromium.run("document.querySelector('[data-axis=seconds]').click()")
    assert ticks(chromium)[:2] == ["0 min", "1 min"]
    assert drawn(chromium) == points
    chromium.run("document.querySelector('.bar button').click()")  # logarithmic
    assert drawn(chromium)[:3] == points[:3]
    chromium.run("document.querySelector('.legend button').click()")  # hides the raw loss
    assert drawn(chromium) == points[1:]
    assert chromium.complaints == []
    assert chromium.requests == [page.resolve().as_uri()]


def test_keys_move_the_cursor_and_zoom(chromium: Browser, tmp_path: Path) -> None:
    chromium.open(write_report(make_run(tmp_path / "run", steps=400)))
    chromium.run("document.querySelector('.box svg').focus()")

    def press(key: str) -> None:
        chromium.send("Input.dispatchKeyEvent", type="keyDown", key=key)

    press("ArrowRight")
    assert texts(chromium, ".place")[0] == "step 204"
    press("+")
    assert 190 < drawn(chromium)[0] < 210
    press("Escape")
    assert drawn(chromium)[0] == 400


@pytest.mark.parametrize("width", [360, 1600])
def test_a_page_fits_into_the_window(chromium: Browser, tmp_path: Path, width: int) -> None:
    chromium.open(write_report(make_run(tmp_path / "run")), width)
    assert chromium.run("document.documentElement.scrollWidth") <= width
    assert len(drawn(chromium)) == 18


def test_a_comparison_is_drawn(chromium: Browser, tmp_path: Path) -> None:
    folders = [make_run(tmp_path / "a", steps=400), make_run(tmp_path / "b", steps=200)]
    (tmp_path / "old").mkdir()
    lines = [{"step": step, "loss": 5.0 / step} for step in range(1, 4)]  # no times
    write_lines(tmp_path / "old" / "metrics.jsonl", lines)
    page = tmp_path / "comparison.html"
    page.write_text(to_page(compare([*folders, tmp_path / "old"])), encoding="utf-8")
    chromium.complaints.clear()
    chromium.open(page)
    assert drawn(chromium)[:5] == [400, 21, 200, 11, 3]
    chromium.run("document.querySelector('[data-axis=tokens]').click()")
    assert drawn(chromium)[:4] == [400, 21, 200, 11]
    assert ticks(chromium)[1] == "20M"
    assert chromium.complaints == []


@pytest.mark.parametrize(
    "lines",
    [
        [{"step": 0, "validation_loss": 2.5}],
        [{"step": 1, "loss": -1.5}, {"step": 2, "loss": None}, {"step": 3, "loss": -1.5}],
        [{"step": step, "loss": 0.0} for step in range(3)],
        [{"step": 2**52, "loss": 1e300}, {"step": 2**52 + 1, "loss": 1e-300}],
        [{"step": 3, "loss": None}],
        [],
    ],
)
def test_odd_curves_are_drawn(
    chromium: Browser, tmp_path: Path, lines: list[dict[str, float]]
) -> None:
    write_lines(tmp_path / "metrics.jsonl", lines)
    chromium.complaints.clear()
    chromium.open(write_report(tmp_path))
    chromium.run("document.querySelectorAll('.bar button').forEach((button) => button.click())")
    assert chromium.complaints == []
    numbers = "[...document.querySelectorAll('.box *')].flatMap((e) => [...e.attributes])"
    assert not chromium.run(f"{numbers}.some((a) => /NaN|Infinity|undefined/.test(a.value))")


def test_the_browser_would_notice(chromium: Browser, tmp_path: Path) -> None:
    page = write_report(make_run(tmp_path / "run"))
    text = page.read_text(encoding="utf-8")
    chromium.complaints.clear()
    page.write_text(text.replace("</main>", "</main><script>1</script>"), encoding="utf-8")
    chromium.open(page)
    assert "Content Security Policy" in "".join(chromium.complaints)
    chromium.requests.clear()
    page.write_text(
        text.replace("img-src data:", "img-src *").replace("</h1>", '</h1><img src="a.png">')
    )
    chromium.open(page)
    assert len(chromium.requests) == 2
