from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tensorgrad.errors import DeviceError, DtypeError
from tensorgrad.profile import ceilings


def test_they_are_measured_once_for_each_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "_CPU_COPY", 1 << 16)
    monkeypatch.setattr(ceilings, "_CPU_PRODUCT", 32)
    for measured in (ceilings._bandwidth, ceilings._product_flops):
        measured.cache_clear()
    try:
        first = ceilings.measure_ceilings("cpu", ["float32", "float32", "bfloat16"])
        assert list(first.flops) == ["bfloat16", "float32"]
        assert min(first.bandwidth, *first.flops.values()) > 0
        again = ceilings.measure_ceilings("cpu", ["float32"])
        assert again.bandwidth == first.bandwidth
        assert again.flops == {"float32": first.flops["float32"]}
        assert ceilings.measure_ceilings("cpu", []).flops == {}
    finally:
        for measured in (ceilings._bandwidth, ceilings._product_flops):
            measured.cache_clear()  # they were too small to be true


def test_rates_are_of_the_fastest_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "_CPU_COPY", 4096)
    monkeypatch.setattr(ceilings, "_CPU_PRODUCT", 32)
    results: list[Any] = []

    def best_seconds(xp: Any, call: Callable[[], Any]) -> float:
        results.append(call())
        return 0.5

    monkeypatch.setattr(ceilings, "_best_seconds", best_seconds)
    assert ceilings._bandwidth.__wrapped__("cpu") == 2 * 4096 / 0.5  # read and written
    for dtype in ("float32", "bfloat16"):
        assert ceilings._product_flops.__wrapped__("cpu", dtype) == 2 * 32**3 / 0.5
        assert (results[-1].shape, str(results[-1].dtype)) == ((32, 32), dtype)


def test_the_first_call_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter((0, 5, 10, 12, 20, 23, 30, 39, 40, 44))
    clock = SimpleNamespace(perf_counter=lambda: next(moments))
    monkeypatch.setattr(ceilings, "time", clock)
    calls: list[None] = []
    assert ceilings._best_seconds(np, lambda: calls.append(None)) == 2
    assert len(calls) == 1 + 5


def test_devices_and_dtypes_that_do_not_exist() -> None:
    with pytest.raises(DeviceError, match="device: got 'gpu'"):
        ceilings.measure_ceilings("gpu", [])
    with pytest.raises(DtypeError):
        ceilings.measure_ceilings("cpu", ["float5"])
