"""Automatic differentiation of tensors: what an op records, and derivatives of functions.

An op computes arrays and calls `record`; see core/record.py. Its tangent is the rule from which
derivatives beyond the first follow; see tangents.py. Functions of functions: functions.py.
Tests: tests/autograd/test_autograd.py.
"""

from __future__ import annotations

from tensorgrad.autograd import functions as _functions
from tensorgrad.autograd.functions import *
from tensorgrad.autograd.tangents import tangent_of
from tensorgrad.core.record import no_grad, on_grad_ready, record

__all__ = ["no_grad", "on_grad_ready", "record", "tangent_of"]
__all__ += _functions.__all__
