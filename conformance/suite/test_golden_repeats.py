"""Golden traces with a recorder of their own: float64 repeats each from the captured queries, keys and values.

Decisions are equal. Other numbers are within the tolerance of the recorder's `--check`, which allows for the rounding
of other machines. What a trace shows, and the state under test that follows it, are in a method's own golden test. The
traces of block caches are repeated in test_blocks_golden.py.
"""

from __future__ import annotations

import pytest

from kvtwin.fixtures.block_traces import OWN, BlockRecorder
from kvtwin.fixtures.load import load_trace
from kvtwin.fixtures.record import recorders

pytestmark = [pytest.mark.kind("golden"), pytest.mark.main]

RECORDERS = {
    method: recorder for method, recorder in recorders().items() if not isinstance(recorder, BlockRecorder)
}


@pytest.mark.parametrize("method", RECORDERS)
def test_float64_repeats_the_golden_trace(method):
    recorder = RECORDERS[method]
    capture = load_trace(getattr(recorder, "capture", OWN))
    assert recorder.compare(capture, load_trace(method), recorder.record(capture)) == []
