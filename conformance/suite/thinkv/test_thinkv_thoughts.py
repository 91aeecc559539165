"""ThinKV's thoughts under test: the sparsity of a decode step, its thought type, and the calibration of thresholds."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvtwin.conformance.cases.draws import at_least
from kvtwin.conformance.cases.layouts import MIXED
from kvtwin.conformance.cases.thought_cases import SparsityCase, sparsity_cases
from kvtwin.conformance.judge.checkers import thinkv_thoughts as judge

pytestmark = [pytest.mark.kind("equivalence"), pytest.mark.main]

SIDES = pytest.mark.parametrize("side", ("reference", "optimized"))
few = settings(max_examples=max(at_least(3), settings().max_examples // 6))


def module_of(twins, side):
    return getattr(twins, side).thinkv


# Sparsity ------------------------------------------------------------------------------------------------------------


@pytest.mark.property("layouts")
@pytest.mark.parametrize("slots", [45, 300])
def test_sparsity_of_arguments_with_different_strides(slots, twins, device):
    """Several rows, KV heads and tiles, with weights on both sides of the threshold."""
    case = SparsityCase(
        batch=2, key_value_heads=3, group=2, head_dim=16, slots=slots, occupancy="random", layout=MIXED, scale=1.0,
        threshold=0.3, seed=slots, device=str(device),
    )
    actual = twins.optimized.thinkv.attention_sparsity(**case.inputs)
    assert bool(((actual > 0) & (actual < 1)).all())
    judge.assert_sparsity_right(actual, case)


@pytest.mark.property("accuracy")
@pytest.mark.parametrize(("content", "threshold"), [("rising", 0.04), ("early", 0.3)])
def test_sparsity_of_rising_logits_in_several_splits(content, threshold, twins, device):
    """All weights of one head are equal. Those of the other rise from slot to slot, or are equal in the first 64 slots
    and tiny elsewhere. So the sum of the weights differs between the heads, and between the splits of a head."""
    slots = 300
    place = torch.arange(slots, dtype=torch.float32)
    logits = 40 * place / slots if content == "rising" else torch.where(place < 64, 0.0, -20.0)
    key = torch.zeros(1, 1, slots, 16)
    key[..., 0] = logits
    query = torch.zeros(1, 2, 16)
    query[0, 0, 0] = 1.0
    case = SparsityCase.given(query.to(device), key.to(device), threshold=threshold, scale=1.0)
    actual = twins.optimized.thinkv.attention_sparsity(**case.inputs)
    assert bool((actual > 0.7).all() & (actual < 0.95).all())
    judge.assert_sparsity_right(actual, case)


@pytest.mark.property("layouts")
@given(case=sparsity_cases(content=("ordinary",), layout=("far",), slots=(3, 5)))
@few
def test_sparsity_reads_beyond_two_to_the_31_elements(case, twins):
    judge.assert_sparsity_right(twins.optimized.thinkv.attention_sparsity(**case.inputs), case)


def aimed(device, *weights: list[float]) -> SparsityCase:
    """Inputs with one row that have these weights (up to a factor): [heads][group][tokens]."""
    heads, group, tokens = len(weights), len(weights[0]), len(weights[0][0])
    query = torch.zeros(1, heads * group, 16, device=device)
    key = torch.zeros(1, heads, tokens, 16, device=device)
    for head, rows in enumerate(weights):
        for member, row in enumerate(rows):
            query[0, head * group + member, member] = 1
            key[0, head, :, member] = torch.tensor(row).log()
    return SparsityCase.given(query, key, scale=1.0)


@pytest.mark.property("accuracy")
@pytest.mark.claim("TK-10a")
@SIDES
def test_sparsity_pools_a_group_by_its_largest_weights(side, twins, device):
    """Both heads attend to the first two tokens, and each to one other token with 0.015 of that weight. No token is
    below the threshold. By the mean, both of the others would be, and by either head alone, one."""
    case = aimed(device, [[1.0, 1.0, 0.015, 1e-4], [1.0, 1.0, 1e-4, 0.015]])
    assert module_of(twins, side).attention_sparsity(**case.inputs).tolist() == [0.0]
    for head in (0, 1):
        alone = SparsityCase.given(case.query[:, head:head + 1], case.key, scale=1.0)
        assert module_of(twins, side).attention_sparsity(**alone.inputs).tolist() == [0.25]


@pytest.mark.property("accuracy")
@pytest.mark.claim("TK-10a")
@SIDES
def test_sparsity_normalises_before_it_pools(side, twins, device):
    """The second head spreads its weight, so its largest weight is small compared with the first head's, whatever its
    logits."""
    spread = [50.0] * 400
    case = aimed(device, [[1.0] + [1e-6] * 399, spread])
    # The second head gives 1 / 400 to each token, which is below 0.01 of the first head's largest weight.
    share = module_of(twins, side).attention_sparsity(**case.inputs)
    assert share.tolist() == [torch.tensor(399 / 400).item()]


@pytest.mark.property("accuracy")
@SIDES
def test_sparsity_is_averaged_over_kv_heads(side, twins, device):
    case = aimed(device, [[1.0, 1.0, 1.0, 0.001]], [[1.0, 0.001, 0.001, 0.001]])
    assert module_of(twins, side).attention_sparsity(**case.inputs).tolist() == [0.5]


@pytest.mark.property("accuracy")
@SIDES
def test_the_mean_of_heads_has_another_sparsity(side, twins, device):
    """Each of two heads attends to a token of its own and, by 0.015, to a third one. It does not attend to the other
    two. In the mean, only the fourth token is not attended to."""
    case = aimed(device, [[1.0, 1e-4, 0.015, 1e-4]], [[1e-4, 1.0, 0.015, 1e-4]])
    call = module_of(twins, side).attention_sparsity
    assert call(**case.inputs).tolist() == [0.5]
    assert call(**case.inputs | {"sparsity_of": "mean"}).tolist() == [0.25]


@pytest.mark.property("accuracy")
@SIDES
def test_the_mean_weights_each_kv_head_equally(side, twins, device):
    """Eq. 4 divides each KV head's weights by their sum. The query heads of the first KV head attend to different
    tokens, so its largest weights are 1/2, 1/2 and 0, and those of the second one 0, 0 and 1. In the mean, the first
    two tokens have half of the third one's weight. Without eq. 4, all three would be equal."""
    case = aimed(device, [[1.0, 1e-6, 1e-6], [1e-6, 1.0, 1e-6]], [[1e-6, 1e-6, 1.0], [1e-6, 1e-6, 1.0]])
    call = module_of(twins, side).attention_sparsity
    two_thirds = torch.tensor(2 / 3).item()
    found = [call(**case.inputs | {"sparsity_of": "mean", "threshold": share}).tolist() for share in (0.45, 0.55)]
    assert found == [[0.0], [two_thirds]]


@pytest.mark.property("accuracy")
@SIDES
def test_the_mean_of_many_tokens(side, twins, device):
    """The most attended token is the first of 600 tokens, more than a tile. All others are below the threshold."""
    case = aimed(device, [[1.0] + [1e-3] * 599], [[1.0] + [1e-4] * 599])
    share = module_of(twins, side).attention_sparsity(**case.inputs | {"sparsity_of": "mean"})
    assert share.tolist() == [torch.tensor(599 / 600).item()]


@pytest.mark.property("accuracy")
@SIDES
def test_one_kv_head_is_its_own_mean(side, twins, device):
    case = aimed(device, [[1.0, 0.5, 0.015, 1e-4], [0.3, 1.0, 1e-4, 0.005]])
    call = module_of(twins, side).attention_sparsity
    assert call(**case.inputs | {"sparsity_of": "mean"}).tolist() == call(**case.inputs).tolist() == [0.25]


@pytest.mark.property("free_slots")
@SIDES
def test_sparsity_of_few_tokens(side, twins, device):
    """A single token is never below the threshold, the share without tokens is 0, and free slots do not count."""
    key = torch.full((3, 1, 5, 16), math.nan, device=device)
    occupied = torch.zeros(3, 5, dtype=torch.bool, device=device)
    occupied[0, 3] = occupied[2, 1] = occupied[2, 4] = True
    key[0, 0, 3], key[2, 0, 1], key[2, 0, 4] = -100.0, 1.0, -1.0
    for sparsity_of in ("heads", "mean"):
        found = module_of(twins, side).attention_sparsity(
            torch.ones(3, 2, 16, device=device), key, occupied, sparsity_of=sparsity_of
        )
        assert found.tolist() == [0.0, 0.0, 0.5]


# Classification ------------------------------------------------------------------------------------------------------


@pytest.mark.property("decisions")
@SIDES
@given(
    edges=st.tuples(st.floats(0, 1, width=32), st.floats(0, 1, width=32)).map(sorted).map(tuple),
    shape=st.sampled_from(((), (3,), (2, 5))), data=st.data(),
    dtype=st.sampled_from((torch.float32, torch.float16, torch.bfloat16)),
)
@example(edges=(0.3, 0.7), shape=(7,), data=None, dtype=torch.float32)
@few
def test_classify_splits_at_the_edges(side, edges, shape, data, dtype, twins, device):
    """On an edge, next to it, beyond all edges, and NaN: T from theta_2 on, R from theta_1 on, otherwise E."""
    theta = torch.tensor(edges).to(dtype)
    beside = [torch.nextafter(theta.float(), torch.full((2,), end)).to(dtype) for end in (-1.0, 2.0)]
    special = torch.tensor([math.nan, math.inf, -math.inf, 0.0]).to(dtype)
    values = torch.cat([theta, *beside, special])
    count = math.prod(shape)
    picked = range(count) if data is None else [data.draw(st.integers(0, len(values) - 1)) for _ in range(count)]
    sparsity = values[list(picked)].view(shape).to(device)
    found = module_of(twins, side).classify(sparsity, edges)
    low, high = torch.tensor(edges).tolist()  # in float32
    expected = [0 if x >= high else 2 if x >= low else 1 for x in sparsity.float().flatten().tolist()]
    assert found.dtype == torch.int64 and found.shape == sparsity.shape
    assert found.flatten().tolist() == expected


# Calibration ---------------------------------------------------------------------------------------------------------

STEP = 1 / 512


def spikes(*places: float, times: int = 40) -> torch.Tensor:
    """Steps [len(places) * times] with these sparsities, each equally often."""
    return torch.tensor(places, dtype=torch.float64).repeat(times)


def valley(steps: torch.Tensor, left: float, right: float, factor: float | None = None) -> float:
    """The minimum of the density of the steps between two modes, by bisection of its derivative."""
    width = float(steps.std()) * (len(steps) ** -0.2 if factor is None else factor)

    def slope(x: float) -> float:
        return float(-((x - steps) * (-((x - steps) / width).square() / 2).exp()).sum())

    while right - left > 1e-12:
        middle = (left + right) / 2
        left, right = (middle, right) if slope(middle) < 0 else (left, middle)
    return left


TRIMODAL = [(0.1, 0.5, 0.9), (0.05, 0.45, 0.95), (0.12, 0.5, 0.85), (0.0, 0.42, 1.0), (0.2, 0.55, 0.97)]


@pytest.mark.property("accuracy")
@SIDES
@pytest.mark.parametrize("bandwidth", [None, 0.25])
def test_calibrate_finds_the_valleys(side, bandwidth, twins, device):
    """The neighbours of the lowest grid point are higher, so it is within one grid step of the valley, and so is a mean
    of such points. Layers with one or two modes are skipped. Of the other five, four are chosen: those that have three
    modes in both prompts, then the first of the rest."""
    flat, two = spikes(0.3, times=120), spikes(0.2, 0.8, 0.8)
    rows = [spikes(*places) for places in TRIMODAL]
    first = [two, rows[0], rows[1], flat, rows[2], rows[3], rows[4]]
    second = [two, rows[1], flat, flat, rows[3], two, rows[0]]
    traces = [torch.stack(prompt).to(device) for prompt in (first, second)]
    found = module_of(twins, side).calibrate(traces, bandwidth=bandwidth)
    assert found.layers == (1, 2, 4, 6)
    inside = [places for prompt in (first, second) for layer in found.layers for places in TRIMODAL
              if torch.equal(prompt[layer], spikes(*places))]
    assert len(inside) == 7
    for number in (0, 1):
        exact = [valley(spikes(*places), *places[number:number + 2], bandwidth) for places in inside]
        assert abs(found.edges[number] - sum(exact) / len(exact)) <= STEP


@pytest.mark.property("accuracy")
@SIDES
def test_calibrate_of_clouds_lies_between_them(side, twins, device):
    """Random steps around 0.1, 0.5 and 0.9, in float16 and float64, with prompts of several lengths."""
    generator = torch.Generator().manual_seed(5)
    traces = []
    for steps in (150, 300):
        centres = torch.tensor([0.1, 0.5, 0.9])[torch.arange(steps) % 3]
        noise = 0.03 * torch.randn(5, steps, generator=generator)
        traces.append((centres + noise).clamp(0, 1).to(device))
    found = module_of(twins, side).calibrate([trace.half() for trace in traces])
    assert found.layers == (0, 1, 2, 3)
    assert all(isinstance(layer, int) for layer in found.layers)
    low, high = found.edges
    assert 0.2 < low < 0.4 < 0.6 < high < 0.8
    other = module_of(twins, "reference").calibrate([trace.half() for trace in traces])
    assert other.layers == found.layers
    # Two lowest grid points may have nearly equal densities. Then rounding decides.
    assert all(abs(one - two) <= STEP for one, two in zip(found.edges, other.edges, strict=True))


@pytest.mark.property("accuracy")
@SIDES
def test_calibrate_takes_the_middle_of_a_flat_valley(side, twins, device):
    """With such narrow kernels, the density between the spikes is exactly 0."""
    traces = [torch.stack([spikes(0.0, 0.5, 1.0)] * 2).to(device)]
    found = module_of(twins, side).calibrate(traces, layers=2, bandwidth=0.005, grid=1025)
    assert found.layers == (0, 1)
    assert all(abs(edge - middle) <= 1 / 1024 for edge, middle in zip(found.edges, (0.25, 0.75), strict=True))
