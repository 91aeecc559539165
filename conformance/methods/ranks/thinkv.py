"""What the tests of ThinKV run on each rank, besides those of all states."""

from __future__ import annotations

from typing import Any

import torch

from ....reference.contract.thinkv.types import Thought
from ...cases.state_trace import StateTrace
from ...cases.thought_cases import SegmentCase
from ...judge.checkers.thinkv_eviction import assert_representatives_right
from ...judge.compare import assert_same
from . import sharded, states


def shrinks(group: Any, side: str, trace: StateTrace) -> tuple[bool, bool]:
    """Keep step. Returns whether segments shrank in a step that ended no thought, and in one that ended a transition.
    """
    seen = [False, False]

    def watch(state: Any) -> None:
        step = state.step

        def watched(**tokens: Any) -> Any:
            before = int(state.occupied.sum())
            output = step(**tokens)
            evicted = before + state.sizes.batch > int(state.occupied.sum())
            ends = (state.tokens_seen - trace.prompt) % state.config.tau == 0
            if not ends or bool((state.thought == int(Thought.TRANSITION)).any()):
                seen[ends] |= evicted
            return output

        state.step = watched

    states.keeps_step(group, side, trace, watch)
    return seen[0], seen[1]


def keeps_step_as_if_captured(group: Any, trace: StateTrace) -> None:
    def capture(state: Any) -> None:
        state._expect_replays()

    states.keeps_step(group, "optimized", trace, capture)


def has_the_sparsity_of_one_rank(group: Any, side: str, trace: StateTrace) -> None:
    """Without evictions, all ranks measure the sparsity that a state of all heads measures."""
    case = states.here(trace)
    both = [
        one.ThinKVState(states.pair("thinkv").config(**case.options), **case.sizes)
        for one in (states.module(group, side, "thinkv"), states.side_of(side, "thinkv"))
    ]
    for state in both:
        state.prefill(**case.prompt_inputs)
    for step in range(case.steps):
        outputs = [state.step(**case.step_inputs(step)) for state in both]
        assert_same(*outputs, what="output")
        assert_same(both[0].sparsity, both[1].sparsity, what="sparsity")
        assert_same(both[0].thought, both[1].thought, what="thought")


def represents(group: Any, side: str, case: SegmentCase) -> None:
    """Choose the representatives of a segment whose KV heads are spread over the ranks."""
    case = states.here(case)
    ranks, method = group.size(), states.side_of(side, "thinkv")
    copies = max(1, ranks // case.key_value_heads)
    mine = sharded.shares(case.key_value_heads * copies, case.key_value_heads, ranks)[group.rank()]
    given = case.inputs
    result = method.select_representatives(
        given["key_segment"][slice(*mine.key_value)], given["keep"], process_group=group, replicas=copies
    )
    assert_representatives_right(result, case)
    sharded.assert_same_on_all_ranks(torch.cat((result.indices, result.assignments.flatten())), "tokens", group)


def refuses(group: Any, side: str, device: str, replicas: int) -> str:
    """What the constructor says to this number of replicas on all ranks."""
    method = states.side_of(side, "thinkv")
    try:
        method.ThinKVState(
            method.ThinKVConfig(), process_group=group, replicas=replicas, device=device, **states.SIZES
        )
    except ValueError as error:
        return str(error)
    return ""
