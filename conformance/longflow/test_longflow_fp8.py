"""LongFlow over FP8 keys and values with scales: as over the numbers that they stand for."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtwin.conformance.cases.fp8_cases import FORMATS, LARGEST, Fp8Case, exact, fp8_cases
from kvtwin.conformance.cases.paged_states import OWN_LAYOUTS
from kvtwin.conformance.cases.strategies import DTYPES
from kvtwin.conformance.harness.impl import NotProvided
from kvtwin.conformance.judge.checkers import longflow as judge
from kvtwin.conformance.judge.compare import assert_same

SIDES = ("optimized", "reference")
each_side = pytest.mark.parametrize("side", SIDES)
each_format = pytest.mark.parametrize("fp8", FORMATS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
few = settings(max_examples=max(2, settings().max_examples // 5))


def function(twins: Any, side: str, name: str = "decode_attention") -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(getattr(twins, side).longflow, name)
    if "key_scale" not in inspect.signature(found).parameters:
        raise NotProvided(f"{name}: key_scale")
    return found


@pytest.mark.kind("equivalence")
@each_side
@given(data=st.data())
def test_longflow_decodes_fp8_as_float64_would(side, data, twins):
    case = data.draw(fp8_cases())
    judge.assert_decode_right(function(twins, side)(**case.inputs), case)
