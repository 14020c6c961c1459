from __future__ import annotations

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


def test_devices_and_dtypes_that_do_not_exist() -> None:
    with pytest.raises(DeviceError, match="device: got 'gpu'"):
        ceilings.measure_ceilings("gpu", [])
    with pytest.raises(DtypeError):
        ceilings.measure_ceilings("cpu", ["float5"])
