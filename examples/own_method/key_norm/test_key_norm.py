"""Tests by hand: what the cache keeps of keys with known norms."""

from __future__ import annotations

import pytest
import torch

from key_norm.reference import KeyNormConfig

SIDES = pytest.mark.parametrize("side", ["reference", "optimized"])


def filled(twins, side, device, lengths, budget, **options):
    """A state after tokens whose keys have these norms, in blocks of four."""
    state = getattr(twins, side).key_norm.KeyNormState(
        KeyNormConfig(budget, 4, **options), batch=1, query_heads=1, key_value_heads=1, head_dim=16,
        dtype=torch.float32, device=device,
    )
    key = torch.zeros(1, 1, len(lengths), 16, device=device)
    key[0, 0, :, 3] = torch.tensor(lengths, device=device) / 5 * 3
    key[0, 0, :, 7] = torch.tensor(lengths, device=device) / 5 * -4
    state.prefill(torch.ones_like(key), key, torch.ones_like(key))
    return state


def kept(state):
    """The tokens in the cache, by position."""
    return sorted(state.positions[0, 0][state.occupied[0, 0]].tolist())


@SIDES
def test_the_tokens_with_the_smallest_keys_are_kept(side, twins, device):
    assert kept(filled(twins, side, device, [3.0, 1.0, 4.0, 1.5, 9.0, 2.0, 6.0], budget=3)) == [1, 3, 5]


@SIDES
def test_a_step_evicts_the_token_with_the_largest_key(side, twins, device):
    state = filled(twins, side, device, [3.0, 1.0, 4.0], budget=3)
    vector = torch.full((1, 1, 16), 0.5, device=device)  # its norm is 2
    state.step(vector, vector, vector)
    assert kept(state) == [0, 1, 3]


@SIDES
def test_the_score_is_the_negative_norm(side, twins, device):
    state = filled(twins, side, device, [5.0, 10.0], budget=3)
    assert state.score[0, 0, :2].tolist() == [-5.0, -10.0]  # exact: keys of 3 and 4, and of 6 and 8
    assert (state.score[0, 0, 2:] == -torch.inf).all()


@SIDES
def test_the_newest_tokens_are_protected(side, twins, device):
    assert kept(filled(twins, side, device, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], budget=3, recent=2)) == [0, 4, 5]


@SIDES
def test_ties_go_to_the_lowest_slot(side, twins, device):
    """The token in the lowest slot is evicted."""
    assert kept(filled(twins, side, device, [2.0, 2.0, 2.0, 1.0], budget=3)) == [1, 2, 3]
