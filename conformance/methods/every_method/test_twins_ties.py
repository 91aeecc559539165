"""In kvtwin's references, which are also the oracle, equal tokens have equal logits, weights and scores in any slot.

These tests check our own reference for any --kv-impl. On CPUs, torch's matrix product and its sums over other
dimensions than the last may add the elements of the last slots in another order.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvtwin.reference import attention, blocks
from kvtwin.reference.baselines import h2o, snapkv, tova
from kvtwin.reference.epikv import hybrids

pytestmark = pytest.mark.whole

SEEDS = 4
every_size = pytest.mark.parametrize("slots", (9, 17, 23, 40))
every_group = pytest.mark.parametrize("group", (2, 5, 8))
every_dtype = pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=("float32", "float64"))


def equal_tokens(device: torch.device, dtype: torch.dtype, slots: int, heads: int, queries: int) -> list[Tensor]:
    """query [B, heads, queries, D] and key [B, 1, slots, D]; the keys of a row are equal. occupied [B, slots]."""
    generator = torch.Generator().manual_seed(slots)
    query = torch.randn(SEEDS, heads, queries, 16, generator=generator, dtype=dtype)
    key = torch.randn(SEEDS, 1, 1, 16, generator=generator, dtype=dtype).repeat(1, 1, slots, 1)
    return [tensor.to(device) for tensor in (query, key, torch.ones(SEEDS, slots, dtype=torch.bool))]


def assert_equal(score: Tensor) -> None:
    """score [..., S]: the same bits along the last dimension."""
    assert torch.equal(score, score[..., :1].expand_as(score))


@pytest.mark.parametrize("queries", (1, 2, 5, 17))
@every_size
@every_dtype
def test_equal_keys_have_equal_logits_and_a_query_has_its_own(dtype, slots, queries, device):
    query, key, occupied = equal_tokens(device, dtype, slots, 2, queries)
    logit = attention.logits(query, key, occupied, scale=0.3)
    assert_equal(logit)
    alone = [attention.logits(query[:, :, place], key, occupied, scale=0.3) for place in range(queries)]
    assert torch.equal(logit, torch.stack(alone, 2))


@every_group
@every_size
@every_dtype
def test_sums_of_equal_columns_are_equal(dtype, slots, group, device):
    generator = torch.Generator().manual_seed(group)
    column = torch.rand(SEEDS, 3 * group, 1, generator=generator, dtype=dtype).repeat(1, 1, slots).to(device)
    assert_equal(attention.sum_in_order(column, 1))
    assert_equal(attention.logsumexp_in_order(column, 1))
    assert_equal(blocks.group_mean(column, 3))
    assert_equal(hybrids.received(column))
    # Torch adds a row of memory in one order, and sums of small whole numbers are exact in any order.
    assert torch.equal(attention.logsumexp_in_order(column, 1)[:, 0], column[..., 0].contiguous().logsumexp(-1))
    whole = (16 * column).round()
    assert torch.equal(attention.sum_in_order(whole, 1), whole.sum(1))


@every_group
@every_size
@every_dtype
def test_equal_tokens_receive_equal_attention(dtype, slots, group, device):
    """Of several queries, those that attend to all of these tokens."""
    query, key, occupied = equal_tokens(device, dtype, slots, group, 8)
    before = slots - 8
    assert_equal(tova.attend(query, key, key, occupied).received)
    assert_equal(h2o.attend(query, key, key, occupied).received[..., :before])
    assert_equal(snapkv.attend(query, key, key, occupied).received[..., :before])
    for shared_heads in (False, True):
        score = snapkv.window_score(query, key, occupied, kernel_size=1, shared_heads=shared_heads)
        assert_equal(score[..., :before])


@pytest.mark.parametrize("per_head", (False, True))
@every_group
@every_size
@every_dtype
def test_tova_of_equal_tokens_evicts_the_lowest_slots(dtype, slots, group, per_head, device):
    query, key, _ = equal_tokens(device, dtype, slots, 2 * group, 1)
    query, key = query.expand(-1, -1, slots, -1), key.repeat(1, 2, 1, 1)
    state = tova.TOVAState(
        tova.TOVAConfig(budget=slots - 3, block_size=slots, per_head=per_head), batch=SEEDS,
        query_heads=2 * group, key_value_heads=2, head_dim=16, dtype=dtype, device=device,
    )
    state.append_block(query, key, key)
    assert state.positions[..., :slots - 3].unique(dim=0)[0].tolist() == [list(range(3, slots))] * 2
