"""KeyDiff's functions against its golden trace: the tokens that float64 keeps, given all keys of a trained model at
once.

test_blocks_golden.py tests its state, block by block and step by step.
"""

from __future__ import annotations

import pytest
import torch

from kvtwin.conformance.cases.key_cases import KeyCase
from kvtwin.conformance.judge.checkers import keydiff as judge
from kvtwin.conformance.judge.compare import assert_same
from kvtwin.fixtures.block_traces import inputs
from kvtwin.fixtures.load import load_trace

pytestmark = [pytest.mark.kind("golden"), pytest.mark.main]

CASES = ("3.64", "6.64")  # layer.budget of the state


def recorded(case: str, device: torch.device, dtype: torch.dtype) -> tuple[KeyCase, torch.Tensor]:
    """The captured keys and values of a layer, and the recorded choice [1, Hkv, N]."""
    golden = load_trace("keydiff")
    _, key, value = inputs(load_trace("capture"), golden.metadata["cases"][case]["layer"], dtype, device)
    kept = golden.tensors[f"{case}.kept"].long()[None].to(device)
    return KeyCase.of(key, value, budget=kept.shape[-1]), kept


@pytest.mark.parametrize("case", CASES)
def test_keydiff_evicts_of_a_trained_models_keys_what_float64_does(case, twins, device):
    """In heads where all choices are decisive, the kept tokens are equal. In other heads the judge decides."""
    given, kept = recorded(case, device, torch.bfloat16)
    if device.type == "cpu":  # one head of each layer: heads choose independently
        head = slice(CASES.index(case), CASES.index(case) + 1)
        given, kept = KeyCase.of(given.key[:, head], given.value[:, head], budget=given.budget), kept[:, head]
    result = twins.optimized.keydiff.evict(**given.inputs)
    verdict = judge.assert_evict_right(result, given)
    assert_same(result.kept, kept, where=verdict.decisive[..., None], what="kept")
    judge.assert_score_right(twins.optimized.keydiff.score(**given.score_inputs), given)


def test_keys_of_a_trained_model_agree_with_their_anchor():
    """KeyDiff's premise: most keys of a head have similar directions, and the kept keys are less similar to the anchor
    than the evicted ones."""
    for case in CASES:
        given, kept = recorded(case, torch.device("cpu"), torch.float64)
        cosine = -judge.keydiff.score(given.key)
        stays = torch.zeros_like(cosine, dtype=torch.bool).scatter(-1, kept, True)
        held, gone = (cosine.masked_fill(~mask, 0).sum(-1) / mask.sum(-1) for mask in (stays, ~stays))
        assert bool((held < gone).all())
