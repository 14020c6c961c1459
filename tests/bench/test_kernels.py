"""What `examples.bench.kernels` says of the load of a kernel."""

from __future__ import annotations

from typing import Any

import pytest

from examples.bench import kernels, timing
from tensorgrad.gpu import GpuMonitor


class Monitor(GpuMonitor):
    """A GPU of 1,600 MHz."""

    def __init__(self, **reading: float) -> None:
        super().__init__(None)
        self._reading = reading

    def take(self) -> dict[str, float]:
        return {"clock_mhz": 1600, **self._reading}


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of each load, in which a call takes 2 ms."""
    found: list[float] = []

    def under_load(call: Any, seconds: float) -> float:
        found.append(seconds)
        return 2.0

    monkeypatch.setattr(timing, "under_load", under_load)
    return found


def test_energy_is_power_times_time(loads: list[float]) -> None:
    line = timing.loaded(print, Monitor(watts=600), 0.4)
    assert line == {"clock_mhz": 1600, "watts": 600, "mJ": 1200}
    assert loads == [0.1, 0.4]  # the first does not count


def test_unknown_power_is_skipped(loads: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    load = timing.loaded(print, Monitor(), 0.4)
    assert load == {"clock_mhz": 1600}
    line = {"name": "norm", "size": "8 x 8", "ms": 1, "rate": 2, "peers": {}}
    for each in (load, {**load, "watts": 600, "mJ": 1234}, {}):
        kernels.show(line | each)
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.endswith("  1600 MHz")
    assert second.endswith("  1600 MHz, 600 W, 1.23e+03 mJ")
    assert third.endswith(" 2")
