"""SyncKV's state under test: which tokens each head attends to at each step, and lockstep with clusters of heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvtwin.conformance.judge import compare
from kvtwin.conformance.judge.checkers.synckv_state import Adapter
from kvtwin.conformance.judge.lockstep import Lockstep
from kvtwin.reference.contract.synckv.types import HeadClusters, SyncKVConfig
from kvtwin.reference.synckv.state import SyncKVState

pytestmark = pytest.mark.kind("equivalence")

SIDES = pytest.mark.parametrize("side", ("reference", "optimized"))
#: Head 1 is the representative of heads 1 and 3, head 2 of heads 0 and 2.
PAIRS = HeadClusters((1, 0, 1, 0), (1, 2))
SIZES = {"batch": 2, "query_heads": 8, "key_value_heads": 4, "head_dim": 16}
#: One row, two heads.
LITTLE = {"batch": 1, "query_heads": 2, "key_value_heads": 2, "head_dim": 16}


def tokens(
    seed: int, device: torch.device, *time: int, dtype: torch.dtype = torch.float32, **sizes: int
) -> list[Tensor]:
    """query, key and value [B, H, *time, D]."""
    generator = torch.Generator().manual_seed(seed)
    size = SIZES | sizes
    heads = (size["query_heads"], size["key_value_heads"], size["key_value_heads"])
    return [
        torch.randn(size["batch"], count, *time, size["head_dim"], generator=generator).to(device, dtype)
        for count in heads
    ]


def lockstep(
    twins: Any, device: torch.device, clusters: HeadClusters, dtype: torch.dtype = torch.float32,
    sizes: dict[str, int] = SIZES, **options: Any,
) -> Lockstep:
    config = SyncKVConfig(**{"clusters": len(clusters.representatives), "max_tokens": 24, **options})
    return Lockstep(
        twins.optimized.synckv.SyncKVState(config, clusters, **sizes, dtype=dtype, device=device),
        SyncKVState(config, clusters, **sizes, dtype=torch.float64, device=device), Adapter(),
    )


@pytest.mark.property("state")
@pytest.mark.parametrize(
    ("clusters", "options", "steps"),
    [
        (PAIRS, {"k": 5, "stride": 2}, 4),
        (PAIRS, {"k": 6, "stride": 2, "exclude_static": False, "rho": 0.7}, 2),
        (HeadClusters((0, 0, 0, 0), (3,)), {"k": 30, "stride": 2}, 2),
    ],
    ids=["pairs", "eq. 6 to the letter", "room for all"],
)
def test_clusters_keep_step_with_float64(clusters, options, steps, twins, device):
    """A prompt with padding, steps beyond an anticipation, and a step after a reorder."""
    both = lockstep(twins, device, clusters, **options)
    occupied = torch.ones(2, 10, dtype=torch.bool, device=device)
    occupied[1, :7] = False
    both.prefill(*tokens(1, device, 10), occupied)
    for step in range(steps):
        both.step(*tokens(2 + step, device))
    both.reorder(torch.tensor([1, 1], device=device))
    both.step(*tokens(20, device))


@pytest.mark.property("state")
@pytest.mark.parametrize("offload", [False, True])
def test_clusters_of_one_head_keep_step(offload, twins, device):
    both = lockstep(twins, device, HeadClusters((0, 1), (0, 1)), sizes=LITTLE, k=2, stride=1, offload=offload)
    for step in range(2):
        both.step(*tokens(step, device, **LITTLE))


@pytest.mark.property("state")
def test_a_stream_without_a_prompt_keeps_step(twins, device):
    """The first steps attend to the newest tokens only. Low precision, and groups of three heads with different
    weights."""
    sizes = {"batch": 1, "query_heads": 6, "key_value_heads": 2, "head_dim": 24}
    both = lockstep(
        twins, device, HeadClusters((0, 0), (1,)), torch.bfloat16, sizes, k=2, stride=3, scale=1.0
    )
    for step in range(7):
        both.step(*tokens(step, device, dtype=torch.bfloat16, **sizes))
    both.reset()
    both.step(*tokens(9, device, dtype=torch.bfloat16, **sizes))


@pytest.mark.property("state")
def test_parts_of_several_programs_are_put_together(twins, device):
    """More tokens than one program in the interpreter processes, and logits so different that the maxima of the parts
    differ."""
    both = lockstep(twins, device, HeadClusters((0, 0), (0,)), sizes=LITTLE, k=20, stride=2, max_tokens=48, scale=1.0)
    both.prefill(*tokens(1, device, 40, **LITTLE))
    for step in range(3):
        both.step(*tokens(2 + step, device, **LITTLE))


# Which tokens heads attend to ----------------------------------------------------------------------------------------


class Shown:
    """A layer of two KV heads that shows the tokens that each attends to: the value of token i is the unit vector e_i.

    Head 0 is the representative. Its query prefers the tokens in `wanted`. The query of head 1 is zero, so all tokens
    that it attends to have equal weights.
    """

    def __init__(self, module: Any, device: torch.device, **options: Any) -> None:
        self.device = device
        self.state = module.SyncKVState(
            SyncKVConfig(clusters=1, max_tokens=16, scale=1.0, **options), HeadClusters((0, 0), (0,)), batch=1,
            query_heads=2, key_value_heads=2, head_dim=16, dtype=torch.float32, device=device,
        )

    def _tokens(self, count: int, wanted: list[int], first: int) -> tuple[Tensor, Tensor, Tensor]:
        query = torch.zeros(1, 2, count, 16)
        # The first wanted token has the largest logit. All other tokens tie, so the lowest index comes first.
        query[0, 0, -1, wanted] = torch.arange(len(wanted), 0, -1).float()
        unit = torch.eye(16)[None, None, first:first + count].expand(1, 2, count, 16)
        query, key, value = (tensor.clone().to(self.device) for tensor in (query, unit, unit))
        return query, key, value

    def prefill(self, count: int, wanted: list[int]) -> None:
        self.state.prefill(*self._tokens(count, wanted, 0))

    def step(self, wanted: list[int]) -> list[int]:
        """Append a token, and return the tokens that head 1 attends to."""
        given = self._tokens(1, wanted, self.state.tokens_seen)
        output = self.state.step(*(tensor[:, :, 0] for tensor in given))[0]
        seen = [(head > 0).nonzero()[:, 0].tolist() for head in output]
        assert seen[0] == list(range(self.state.tokens_seen)), "a representative must attend to every token"
        assert len(set(output[1][seen[1]].tolist())) == 1, "the other head's weights must be equal"
        return seen[1]

    @property
    def sets(self) -> list[list[int]]:
        found = (self.state.static, self.state.chosen)
        return [[token for token in tokens[0, 0].tolist() if token >= 0] for tokens in found]


@pytest.mark.property("state")
@SIDES
def test_sets_are_seen_from_the_step_after_they_were_chosen(side, twins, device):
    """Stride 3: tokens 6, 7 and 8 are appended, and the representative chooses at token 8. The new set is used from
    token 9 on. It may contain the newest tokens, including the anticipation's own."""
    shown = Shown(getattr(twins, side).synckv, device, k=4, stride=3)
    shown.prefill(6, [4, 1, 5, 0])
    assert shown.sets == [[1, 4], [0, 1, 4, 5]]
    assert shown.step([2]) == [0, 1, 4, 5, 6]
    assert shown.step([2]) == [0, 1, 4, 5, 6, 7]
    assert shown.step([8, 3]) == [0, 1, 4, 5, 6, 7, 8]
    assert shown.sets == [[1, 4], [1, 3, 4, 8]]
    assert shown.step([2]) == [1, 3, 4, 8, 9]
    assert shown.step([2]) == [1, 3, 4, 8, 9, 10]
    assert shown.step([4, 1]) == [1, 3, 4, 8, 9, 10, 11]
    assert shown.sets == [[1, 4], [0, 1, 2, 4]], "static tokens are not counted twice, and ties go to the lowest index"
    assert shown.step([]) == [0, 1, 2, 4, 12]


@pytest.mark.property("state")
@SIDES
def test_phase_moves_anticipations_that_many_steps_earlier(side, twins, device):
    """With stride 3 and phase 1, steps 2 and 5 choose. The same holds after a reset."""
    shown = Shown(getattr(twins, side).synckv, device, k=2, stride=3, phase=1)
    for _ in range(2):
        shown.prefill(4, [3, 1])
        assert shown.step([0]) == [1, 3, 4]
        assert shown.step([2]) == [1, 3, 4, 5]
        assert shown.sets == [[3], [2, 3]]
        assert shown.step([0]) == [2, 3, 6]
        assert shown.step([1]) == [2, 3, 6, 7]
        assert shown.step([0]) == [2, 3, 6, 7, 8]
        assert shown.sets == [[3], [0, 3]]
        shown.state.reset()


@pytest.mark.property("state")
@SIDES
def test_eq_6_as_printed_may_choose_static_tokens_again(side, twins, device):
    shown = Shown(getattr(twins, side).synckv, device, k=4, stride=1, exclude_static=False)
    shown.prefill(6, [4, 1, 5, 0])
    assert shown.step([1, 4]) == [0, 1, 4, 5, 6]
    assert shown.sets == [[1, 4], [1, 4]], "the set uses half of the budget"
    assert shown.step([4, 3]) == [1, 4, 7]
    assert shown.step([3, 2]) == [1, 3, 4, 8]
    assert shown.step([]) == [1, 2, 3, 4, 9]


@pytest.mark.property("state")
@SIDES
def test_with_a_stride_of_one_only_the_own_token_is_recent(side, twins, device):
    shown = Shown(getattr(twins, side).synckv, device, k=1, stride=1, rho=0.0)
    shown.prefill(2, [1])
    assert shown.step([0]) == [1, 2]
    assert shown.step([3]) == [0, 3]
    assert shown.step([2]) == [3, 4]


@pytest.mark.property("state")
@SIDES
def test_with_k_of_all_tokens_all_are_chosen(side, twins, device):
    """This holds even if the static set has fewer tokens than its share, as after a prompt of two tokens: the dynamic
    set takes the rest."""
    shown = Shown(getattr(twins, side).synckv, device, k=5, stride=2, rho=0.8)
    shown.prefill(2, [0])
    for count in range(3, 6):
        assert shown.step([0]) == list(range(count))
    assert shown.sets == [[0, 1], [0, 1, 2, 3]]
    assert shown.step([5]) == list(range(6))
    assert shown.sets == [[0, 1], [0, 1, 2, 3, 5]]


@pytest.mark.property("state")
@SIDES
def test_a_stream_sees_its_newest_tokens_until_it_first_chooses(side, twins, device):
    shown = Shown(getattr(twins, side).synckv, device, k=1, stride=3)
    assert [shown.step([1]) for _ in range(4)] == [[0], [0, 1], [0, 1, 2], [1, 3]]
    assert shown.sets == [[], [1]]


@pytest.mark.property("state")
@pytest.mark.kind("laws")
@SIDES
def test_chosen_sets_are_static_tokens_and_others(side, twins, device):
    """The sets have k tokens if there are k, contain the static tokens, and change only at every stride-th step."""
    state = getattr(twins, side).synckv.SyncKVState(
        SyncKVConfig(6, 0.5, 3, 1, max_tokens=20), **LITTLE, dtype=torch.float32, device=device
    )
    state.prefill(*tokens(1, device, 9, **LITTLE))
    static, before = state.static.clone(), state.chosen
    for step in range(1, 5):
        state.step(*tokens(1 + step, device, **LITTLE))
        chosen = state.chosen
        assert torch.equal(state.static, static)
        assert bool((chosen >= 0).all())
        assert bool(compare.named(chosen, 20).gather(-1, static).all())
        assert torch.equal(chosen, before) == (step != 3)
        before = chosen
