"""The cache from block to block: the tokens that it holds and attends to, and its memory (claims KD-6, KD-7).

Both twins are tested. Counts are exact. The value of token t is the t-th unit vector, so an output shows the tokens
that its query attends to. A test named ..._rejects_... shows that a slightly changed statement fails, so the claim's
own test is not empty.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtwin.conformance.cases.draws import at_least
from kvtwin.conformance.cases.key_cases import KeyCase
from kvtwin.conformance.judge.checkers.keydiff import assert_evict_right
from kvtwin.conformance.judge.compare import gathered
from kvtwin.reference.keydiff import EvictResult

pytestmark = pytest.mark.kind("claims")

DIM = 16


@pytest.fixture(scope="module", params=["reference", "optimized"])
def keydiff(request, twins):
    return getattr(twins, request.param).keydiff


def empty_state(keydiff, device, budget: int, block_size: int):
    return keydiff.KeyDiffState(
        keydiff.KeyDiffConfig(budget, block_size), batch=1, query_heads=1, key_value_heads=1, head_dim=DIM,
        dtype=torch.float32, device=device,
    )


def tokens(count: int, device, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """query, key, value [1, 1, T, D]: zero queries, which attend to all tokens equally, random keys, and unit vectors
    as values."""
    key = torch.randn(1, 1, count, DIM, generator=torch.Generator().manual_seed(seed)).to(device)
    return torch.zeros_like(key), key, torch.eye(DIM, dtype=key.dtype, device=device)[None, None, :count]


def attended(output: torch.Tensor) -> list[list[int]]:
    """The tokens that each query attended to."""
    return [row.nonzero().flatten().tolist() for row in output.reshape(-1, DIM)]


def feed(state, count: int, device, seed: int = 0) -> list[list[int]]:
    return attended(state.append_block(*tokens(count, device, seed)))


def alive(state) -> list[int]:
    return sorted(state.positions[state.positions >= 0].tolist())


def blocks(total: int, size: int) -> list[list[int]]:
    """X_0 to X_{m-1} of section 2.4, with m = ceil(T / B). The last one ends with the prompt."""
    return [list(range(i * size, min(total, (i + 1) * size))) for i in range(-(-total // size))]


def most_held(total: int, budget: int, size: int) -> int:
    """The largest number of tokens in memory during attention over a block."""
    return max(min(budget, block[0]) + len(block) for block in blocks(total, size))


sizes = {"budget": st.integers(1, 9), "size": st.integers(1, 9), "count": st.integers(1, DIM)}


# ---- KD-6: memory ----------------------------------------------------------------------------------------------------


@pytest.mark.claim("KD-6c")
@pytest.mark.parametrize(("budget", "block"), [(1, 1), (3, 2), (2, 7)])
def test_keydiff_needs_memory_for_cache_and_block(keydiff, device, budget, block):
    state = empty_state(keydiff, device, budget, block)
    assert state.score.numel() == budget + block != budget
    assert state.key.numel() + state.value.numel() == 2 * DIM * (budget + block)


def evicted(state, device, seed: int) -> list[int]:
    """The token that each of 12 steps with random keys evicts, or -1."""
    gone, before = [], set()
    for t, (query, key, value) in enumerate(zip(*(x[0, 0] for x in tokens(12, device, seed)), strict=True)):
        state.append_block(*(x[None, None, None] for x in (query, key, value)))
        now = set(alive(state))
        gone.append(next(iter((before | {t}) - now), -1))
        before = now
    return gone


@pytest.mark.claim("KD-6d")
@pytest.mark.parametrize("side", ["reference", "optimized"])
@pytest.mark.parametrize("budget", [2, 3, 6])
def test_sink_holds_its_budget_and_needs_a_counter_to_evict(twins, side, device, budget):
    """With the cache, memory is O(N), as the text says: N tokens stay. Without it, it is O(1), as the table says: the
    token that goes follows from the number of tokens, whatever the keys are."""
    streaming = getattr(twins, side).baselines.streaming_llm
    for seed in (0, 1):
        state = streaming.StreamingLLMState(
            streaming.StreamingLLMConfig(budget, 1, sinks=1), batch=1, query_heads=1, key_value_heads=1, head_dim=DIM,
            dtype=torch.float32, device=device,
        )
        gone = evicted(state, device, seed)
        assert gone == [-1] * budget + list(range(1, 13 - budget))
        assert len(alive(state)) == budget


@pytest.mark.claim("KD-6d")
def test_a_counter_rejects_keydiff(keydiff, device):
    first, second = (evicted(empty_state(keydiff, device, 3, 1), device, seed) for seed in (0, 1))
    assert first != second


# ---- KD-7: eq. 6 -----------------------------------------------------------------------------------------------------


@pytest.mark.claim("KD-7a")
@given(**sizes, seed=st.integers(0, 2**32 - 1))
def test_budget_holds_after_every_block(keydiff, device, budget, size, count, seed):
    state, tensors = empty_state(keydiff, device, budget, size), tokens(count, device, seed)
    for block in blocks(count, size):
        state.append_block(*(tensor[:, :, block] for tensor in tensors))
        assert len(set(alive(state))) == min(budget, block[-1] + 1)
        assert int(state.occupied.sum()) != min(budget, block[-1] + 1) + 1


@pytest.mark.claim("KD-7b")
@given(**sizes)
def test_peak_is_budget_and_block(keydiff, device, budget, size, count):
    seen = feed(empty_state(keydiff, device, budget, size), count, device)
    assert max(map(len, seen)) == most_held(count, budget, size) <= budget + size


@pytest.mark.claim("KD-7b")
def test_peak_rejects_the_budget_and_anything_below_budget_and_block(keydiff, device):
    """Figure 1 has 7 tokens in three blocks and "at most 4 tokens". At the second block, 6 of the 7 are in memory."""
    seen = feed(empty_state(keydiff, device, 4, 3), 7, device)
    assert [len(row) for row in seen] == [1, 2, 3, 4, 5, 6, 5]
    assert max(map(len, seen)) == 6 > 4
    for budget in range(1, 10):
        for size in range(1, 10):
            peaks = [most_held(total, budget, size) for total in range(1, 41)]
            assert max(peaks) == budget + size                                         # attained, so it is the peak
            assert all(peak == budget + size for total, peak in enumerate(peaks, 1) if total >= budget + 2 * size)


@pytest.mark.claim("KD-7c")
@given(count=st.integers(1, DIM), more=st.integers(0, 3), budget=st.integers(1, 9), seed=st.integers(0, 2**32 - 1))
def test_one_block_is_the_prompt_at_once(keydiff, device, count, more, budget, seed):
    """Every query attends to the tokens before it, and the tokens that remain are those of a single eviction. Of two
    keys, both have the same cosine with their mean, so which one remains is judged by the error of the arithmetic."""
    _, key, value = tokens(count, device, seed)
    for size in {count, count + more}:
        state = empty_state(keydiff, device, budget, size)
        assert feed(state, count, device, seed) == [list(range(t + 1)) for t in range(count)]
        stays = torch.tensor([[alive(state)]], device=device)
        assert_evict_right(
            EvictResult(gathered(key, stays), gathered(value, stays), stays, stays >= 0),
            KeyCase.of(key, value, budget=min(budget, count)),
        )


@pytest.mark.claim("KD-7c")
def test_one_block_rejects_a_block_that_is_a_token_short(keydiff, device):
    short, whole = (empty_state(keydiff, device, 3, size) for size in (7, 8))
    assert feed(short, 8, device) != feed(whole, 8, device)
    chains = [(empty_state(keydiff, device, 3, size), seed) for seed in range(5) for size in (4, 8)]
    for state, seed in chains:
        feed(state, 8, device, seed)
    found = [alive(state) for state, _ in chains]
    assert found[::2] != found[1::2]                                                   # nor are the same tokens kept


def printed_recursion(total: int, size: int) -> list[int]:
    """Eq. 6 taken literally, with a policy that evicts nothing: C_0 is empty, followed by blocks 1 to m - 1."""
    cached: list[int] = []
    for block in blocks(total, size)[1:]:
        cached = cached + block
    return cached


def corrected_recursion(total: int, size: int) -> list[int]:
    """The same, starting with an empty C_{-1} and block 0."""
    cached: list[int] = []
    for block in blocks(total, size):
        cached = cached + block
    return cached


@pytest.mark.claim("KD-7d")
def test_printed_recursion_loses_the_first_block():
    for total in range(1, 20):
        for size in range(1, 9):
            assert printed_recursion(total, size) == list(range(size, total)) != list(range(total))


@pytest.mark.claim("KD-7e")
@given(**sizes)
def test_recursion_from_an_empty_cache_sees_every_token_once(keydiff, device, budget, size, count):
    assert corrected_recursion(count, size) == list(range(count))
    state = empty_state(keydiff, device, max(budget, count), size)                     # evicts nothing
    assert feed(state, count, device) == [list(range(t + 1)) for t in range(count)]
    assert alive(state) == list(range(count))


@pytest.mark.claim("KD-7e")
def test_recursion_rejects_blocks_that_are_not_cut_at_the_end():
    uncut = [token for i in range(-(-7 // 3)) for token in range(3 * i, 3 * (i + 1))]  # as printed: up to B (i + 1) - 1
    assert uncut != corrected_recursion(7, 3) == list(range(7))
    assert [token for i in range(6 // 3) for token in range(3 * i, 3 * (i + 1))] == corrected_recursion(6, 3)


def apart(order: list[int], device) -> torch.Tensor:
    """Keys [1, 1, T, D] with one component x from .75 to .95, larger for a higher place in `order`, and one of their
    own. Among n >= 3 of them, x mean(x) + (1 - x^2) / n, n times the product with the mean key, grows with x by more
    than .1 dx, which is 1000 times the error of float32. So the key with the largest x goes."""
    x = 0.75 + 0.2 * torch.tensor(order) / DIM
    key = torch.zeros(1, 1, len(order), DIM)
    key[..., 0] = x
    key[0, 0, range(len(order)), range(1, len(order) + 1)] = (1 - x.square()).sqrt()
    return key.to(device)


@pytest.mark.claim("KD-7f")
@given(budget=st.integers(1, 9), count=st.integers(1, DIM - 1), seed=st.integers(0, 2**32 - 1))
def test_blocks_of_one_are_decoding(keydiff, device, budget, count, seed):
    """Two keys have the same cosine with their mean, so with a budget of 1, rounding decides which one remains."""
    block, step = (empty_state(keydiff, device, budget, 1) for _ in range(2))
    query, _, value = tokens(count, device)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    key = apart(order, device)
    held: list[int] = []
    for t in range(count):
        (at_once,) = attended(block.append_block(*(tensor[:, :, t:t + 1] for tensor in (query, key, value))))
        (alone,) = attended(step.step(query[:, :, t], key[:, :, t], value[:, :, t]))
        assert len(alone) == len(at_once) == min(budget, t) + 1
        if budget > 1:
            assert alone == at_once == [*held, t]
            held = sorted(sorted(range(t + 1), key=order.__getitem__)[:budget])
            assert alive(step) == alive(block) == held


@pytest.mark.claim("KD-7f")
def test_decoding_rejects_blocks_of_two(keydiff, device):
    ones, twos = (feed(empty_state(keydiff, device, 3, size), 8, device) for size in (1, 2))
    assert ones != twos
    assert max(map(len, ones)) == 4 < max(map(len, twos)) == 5


# ---- KD-2, KD-18: what an eviction depends on ------------------------------------------------------------------------


@pytest.mark.claim("KD-2e")
@pytest.mark.parametrize("side", ["reference", "optimized"])
def test_two_readings_of_the_anchor_keep_different_tokens(twins, side, device):
    """Keys along e1, e2 and between them, the first 100 times as long. With keys of one length, the readings agree."""
    evict = getattr(twins, side).keydiff.evict
    key = torch.zeros(1, 1, 3, DIM)
    key[0, 0, :, :2] = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])
    for length, stays in ((100, [[0, 1], [1, 2]]), (1, [[0, 1], [0, 1]])):
        key[0, 0, 0, 0] = length
        found = [evict(key.to(device), key.to(device), 2, anchor=anchor).kept.flatten().tolist()
                 for anchor in ("mean_normalized", "mean")]
        assert found == stays


def kept_of(module, state, config, device, query, key, value) -> list[int]:
    """The tokens that a state keeps of these, in blocks of 3."""
    held = getattr(module, state)(
        config, batch=1, query_heads=1, key_value_heads=1, head_dim=DIM, dtype=torch.float32, device=device,
    )
    for start in range(0, key.shape[2], 3):
        held.append_block(*(x[:, :, start:start + 3].float().to(device) for x in (query, key, value)))
    return alive(held)


others = st.integers(0, 2**32 - 1)


@pytest.mark.claim("KD-18")
@pytest.mark.parametrize("side", ["reference", "optimized"])
@given(first=others, second=others)
@settings(max_examples=max(at_least(3), settings().max_examples // 6))
def test_queries_and_values_do_not_change_what_is_kept(twins, side, device, first, second):
    module = getattr(twins, side).keydiff
    key = torch.randn(1, 1, 12, DIM, generator=torch.Generator().manual_seed(0))
    config = module.KeyDiffConfig(4, 3)
    found = []
    for seed in (first, second):
        query, value = torch.randn(2, 1, 1, 12, DIM, generator=torch.Generator().manual_seed(seed))
        found.append(kept_of(module, "KeyDiffState", config, device, query, key, value))
    assert found[0] == found[1]


@pytest.mark.claim("KD-18")
@pytest.mark.parametrize("side", ["reference", "optimized"])
def test_keys_alone_rejects_attention_weights(twins, side, device):
    """The queries q and -q keep different tokens of the same keys where the score is an attention weight: with SnapKV,
    which LongFlow needs, too."""
    module = getattr(twins, side).baselines.snapkv
    key, value = torch.randn(2, 1, 1, 12, DIM, generator=torch.Generator().manual_seed(0))
    query = torch.ones(1, 1, 12, DIM)
    config = module.SnapKVConfig(4, 3, window=1, kernel_size=1)
    found = [kept_of(module, "SnapKVState", config, device, sign * query, key, value) for sign in (1, -1)]
    assert found[0] != found[1]


@pytest.mark.claim("KD-19")
@pytest.mark.parametrize("side", ["reference", "optimized"])
def test_gathering_columns_keeps_channels_not_tokens(twins, side, device):
    """30 tokens of 16 channels, of which 20 stay. `evict` returns rows of K. K has no column for a token after the
    16th."""
    key = torch.randn(30, DIM, generator=torch.Generator().manual_seed(0)).to(device)
    found = getattr(twins, side).keydiff.evict(key[None, None], key[None, None], 20)
    kept = found.kept[0, 0]
    assert torch.equal(found.key[0, 0], key[kept]) and found.key[0, 0].shape == (20, DIM)
    assert int(kept.max()) >= DIM
    columns = kept[kept < DIM]
    assert key[:, columns].shape == (30, len(columns))                                 # each has all 30 tokens
