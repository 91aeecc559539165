"""Corner cases: each test reproduces a bug that a reviewer found: what only our own sides promise."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings

from kvtwin.conformance.cases.case import DecodeCase
from kvtwin.conformance.cases.draws import at_least
from kvtwin.conformance.cases.strategies import decode_cases
from kvtwin.conformance.judge.checkers import longflow as judge
from kvtwin.optimized import longflow
from kvtwin.optimized.longflow import _ops
from kvtwin.reference.longflow import LongFlowConfig

pytestmark = pytest.mark.kind("equivalence")

few = settings(max_examples=max(at_least(3), settings().max_examples // 4))
SIDES = pytest.mark.parametrize("name", ("reference", "optimized"))


def made(side, device):
    return side.LongFlowState(
        LongFlowConfig(4), batch=2, query_heads=2, key_value_heads=1, head_dim=16,
        dtype=torch.float32, device=device,
    )


def token(device, *time, seed=0):
    generator = torch.Generator(device).manual_seed(seed)
    return [torch.randn(2, heads, *time, 16, generator=generator, device=device) for heads in (2, 1, 1)]


FAR = decode_cases(
    content=("ordinary",), layout=("far",), slots=(2, 3), dtypes=(torch.float16, torch.bfloat16)
)


@given(case=FAR)
@few
def test_longflow_reads_beyond_two_to_the_31_elements(case, twins):
    """Slots that are at least 2^31 elements apart, with aligned and unaligned strides."""
    judge.assert_decode_right(twins.optimized.longflow.decode_attention(**case.inputs), case)


@pytest.mark.parametrize("sign", [1, -1])
def test_longflow_of_the_largest_float16_values_is_finite(sign, twins, device):
    """A mean of values is not larger than the values, even if weights are rounded before the product.

    16 of 17 weights are 0.50026 of the largest one, which float16 rounds up to 0.50049.
    """
    query, key, value = torch.zeros(3, 1, 1, 17, 16, dtype=torch.float16, device=device)
    query[..., 0] = 1
    key[:, :, 1:, 0] = -1
    value[:] = sign * 65504
    occupied = torch.ones(1, 17, dtype=torch.bool, device=device)
    module = twins.optimized.longflow
    output = module.decode_attention(query[:, :, 0], key, value, occupied, scale=-math.log(0.50026)).output
    assert output.tolist() == [[[sign * 65504.0] * 16]]


def test_longflow_takes_more_rows_than_a_grid_axis_holds(twins, device):
    """CUDA limits the second and third axis of a grid to 65,535 programs."""
    rows = 70_000 if device.type == "cuda" else 5
    generator = torch.Generator(device).manual_seed(3)
    query, key, value = (
        torch.randn(rows, *shape, 16, generator=generator, device=device) for shape in ((1,), (1, 2), (1, 2))
    )
    occupied = torch.ones(rows, 2, dtype=torch.bool, device=device)
    actual = twins.optimized.longflow.decode_attention(query, key, value, occupied)
    last = slice(rows - 3, rows)
    case = DecodeCase.of(query[last], key[last], value[last], occupied[last])
    judge.assert_decode_right(type(actual)(*(field[last] for field in actual)), case)


@SIDES
def test_longflow_next_slot_is_copied_and_checked(name, twins, device):
    state = made(getattr(twins, name).longflow, device)
    state.prefill(*token(device, 3))
    wanted = torch.tensor([[2, 9], [1, 9]], device=device)
    state.next_slot = wanted[:, 0]  # not contiguous
    wanted.fill_(0)
    state.step(*token(device, seed=1))
    assert state.positions.tolist() == [[0, 1, 3, -1], [0, 3, 2, -1]]
    for wrong, message in (
        (torch.tensor([0, 4], device=device), "from 0 to 3, got values from 0 to 4"),
        (torch.tensor([0, 1], device=device, dtype=torch.int32), "torch.int64"),
        (torch.tensor([0], device=device), r"\(2,\)"),
        (7, "torch.Tensor"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"next_slot.*{message}"):
            state.next_slot = wrong


@SIDES
def test_longflow_does_not_lose_precision_under_autocast(name, twins, device):
    plain, cast = (made(getattr(twins, name).longflow, device) for _ in range(2))
    outputs = [plain.prefill(*token(device, 9)), plain.step(*token(device, seed=1))]
    with torch.autocast(device.type, dtype=torch.bfloat16):
        again = [cast.prefill(*token(device, 9)), cast.step(*token(device, seed=1))]
    for one, other in zip(outputs, again, strict=True):
        assert torch.equal(one, other)


@SIDES
def test_longflow_state_made_in_inference_mode_is_usable_outside(name, twins, device):
    with torch.inference_mode():
        state = made(getattr(twins, name).longflow, device)
        state.prefill(*token(device, 9))
        state.step(*token(device, seed=1))
    with torch.no_grad():
        state.step(*token(device, seed=2))
        state.reset()
        state.step(*token(device, seed=3))
    assert state.tokens_seen == 1


def test_longflow_reset_recovers_from_an_interrupted_launch(device):
    """reset sets the completion counters, by which a program knows that it is the last one, to zero."""
    state, fresh = made(longflow, device), made(longflow, device)
    state._scratch[2].fill_(1)
    state.reset()
    for step in range(6):
        given = token(device, seed=step)
        assert torch.equal(state.step(*given), fresh.step(*given))
    assert state.positions.amax(-1).tolist() == [5, 5] and bool(state.occupied.all())


@given(case=decode_cases(slots=(1, 150), occupancy=("full", "random"), content=("ordinary", "extreme_1e4")))
@few
def test_longflow_merges_many_splits(case):
    """As many splits as otherwise occur only on a GPU. The last one is partial."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_ops, "split_slots", lambda sizes, block, *_: (-(-sizes.slots // 16), 16))
        actual = longflow.decode_attention(**case.inputs)
    judge.assert_decode_right(actual, case)


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_longflow_splits_the_last_rows_further(batch, device):
    """With many heads, the last rows have more and smaller splits. Splits do not overlap, and all rows are right."""
    block = _ops.key_block(32, 4, 512)
    case = DecodeCase(
        batch=batch, key_value_heads=2, group=2, head_dim=32, dtype=torch.float32, slots=4 * block - 3,
        occupancy="full", device=str(device),
    )
    sizes = _ops.Sizes(batch, 4, 2, case.slots, 32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_ops, "fused", lambda *_: True)
        patch.setattr(_ops, "split_slots", lambda *_: (2, 2 * block))
        patch.setattr(_ops, "early_rows", lambda *_: (batch + 1) // 2)
        work = _ops._cut(sizes, case.key)
        actual = longflow.decode_attention(**case.inputs)
    assert work == (block, (batch + 1) // 2, 2, 2 * block, 4, block)
    judge.assert_decode_right(actual, case)


@pytest.mark.slow_on_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("many", [False, True], ids=["few heads", "many heads"])
@pytest.mark.parametrize("slots", [17, 65, 129, 200])
def test_longflow_rounds_the_partial_tile_like_full_tiles(slots, many, dtype, device):
    """All slots hold the same token, so the first one is evicted. The last tile is partial and has its own loop. There,
    a GPU once rounded the product with the scale, but not in the loop over full tiles."""
    generator, rows = torch.Generator(device).manual_seed(slots), 32 if device.type == "cuda" else 6
    for head_dim in (64, 128):
        query, key, value = (
            torch.randn(rows, heads, head_dim, generator=generator, device=device).to(dtype) for heads in (4, 2, 2)
        )
        key, value = (x[:, :, None].expand(-1, -1, slots, -1).contiguous() for x in (key, value))
        occupied = torch.ones(rows, slots, dtype=torch.bool, device=device)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_ops, "fused", lambda *_: many)
            slot = longflow.decode_attention(query, key, value, occupied, scale=0.3).slot
        assert slot.tolist() == [0] * rows


@SIDES
def test_longflow_ties_tokens_of_a_prompt_with_those_of_steps(name, twins, device):
    """All tokens are equal. Whether they come from the prompt or from steps, the lowest slot except the newest is
    evicted. The stored norms of prompt tokens, summed in another order, once made their scores larger."""
    module, rows, head_dim = getattr(twins, name).longflow, 32, 160
    generator = torch.Generator(device).manual_seed(0)
    state = module.LongFlowState(
        LongFlowConfig(4), batch=rows, query_heads=1, key_value_heads=1, head_dim=head_dim, dtype=torch.float32,
        device=device,
    )
    query, key, value = (torch.randn(rows, 1, 1, head_dim, generator=generator, device=device) for _ in range(3))
    value /= head_dim                            # norms near 1 have logarithms near 0, which show a last bit
    state.prefill(*(tensor.expand(-1, -1, 3, -1).contiguous() for tensor in (query, key, value)))
    for victim in (0, 1, 0, 1):                  # the first step fills slot 3
        state.step(query[:, :, 0], key[:, :, 0], value[:, :, 0])
        assert state.next_slot.tolist() == [victim] * rows
