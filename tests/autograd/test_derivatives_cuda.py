"""The derivatives of ops on a GPU: the cases of the CPU whose inputs are all arguments."""

from __future__ import annotations

import pytest

from tensorgrad.errors import DeviceError
from tests import derivatives
from tests.autograd.test_mutated_tangents import MODULES

CASES = [(module, name) for module in MODULES for name in module.CASES]
MOST_OMITTED = 0.4  # fraction of the cases that use arrays of the CPU too


@pytest.mark.gpu
def test_derivatives_on_a_gpu_match_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(derivatives, "device", "cuda:0")
    wrong, omitted = [], 0
    for module, name in CASES:
        try:
            module.test_derivatives_match_differences(name)
        except DeviceError:
            omitted += 1
        except Exception as error:
            wrong.append(f"{module.__name__}, {name}: {type(error).__name__}: {error}"[:300])
    assert wrong == []
    assert omitted < MOST_OMITTED * len(CASES)
