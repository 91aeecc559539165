"""PM-KVQ's calibration: the allocation against all choices, and smoothing that changes no logit."""

from __future__ import annotations

import pytest

from kvtwin.reference.baselines import pm_kvq_calibration as calibration

pytestmark = pytest.mark.kind("equivalence")


@pytest.mark.kind("bad_input")
@pytest.mark.parametrize(("arguments", "error", "says"), [
    (([], [4], 1), ValueError, "sensitivities needs a list of numbers per layer, got none"),
    (([[0.1, float("nan")]], [4, 2], 4), ValueError, r"sensitivities\[0\] must be finite and at least 0"),
    (([[0.1, 0.2]], [4], 4), ValueError, "memory needs as many layers and choices as sensitivities"),
    (([[0.1, 0.2]], [4, 2.0], 4), TypeError, "memory must be an int, got float"),
    (([[0.1, 0.2]] * 2, [4, 2], 3), ValueError, "total must be at least 4, the least memory of all layers, got 3"),
    (([["0.1"]], [4], 4), TypeError, r"sensitivities\[0\] must be a float, got str"),
], ids=str)
def test_wrong_arguments_of_allocate(arguments, error, says):
    with pytest.raises(error, match=f"^{says}"):
        calibration.allocate(*arguments)
