"""Tests of the judge: bounds of the attention that keys receive, of sums over many blocks, and of the resulting ranks.

They are sound: no machine of emulate.py exceeds them. They are tight: on ordinary data some come near. See
test_judge_bounds.py.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from kvtwin.conformance import discovery, stats
from kvtwin.conformance.cases import contents
from kvtwin.conformance.cases.block_cases import AttendCase, with_spiked_values
from kvtwin.conformance.cases.state_trace import StateTrace
from kvtwin.conformance.judge import checkers, lockstep
from kvtwin.conformance.judge.bounds import arithmetic
from kvtwin.conformance.judge.checkers import blocks
from kvtwin.conformance.judge.compare import Mismatch, assert_within
from kvtwin.conformance.tool.emulate import Machine
from kvtwin.reference.attention import per_query_head, zero_unoccupied

TOVA = checkers.checker_of("tova")  # None if there is no such method
#: Methods that add up what keys receive.
METHODS = {pair.name: pair.reference for pair in discovery.methods() if pair.name in ("h2o", "vatp")}

FULL = (
    Machine("sequential", lean=-1), Machine("reversed", fused=True, lean=1, block=16, logs=True),
    Machine("pairwise", lean=-1, block=16, flushes=True), Machine("strided", lean=1, block=16),
)
HALF = (Machine("sequential", truncates=True, lean=1, block=16, flushes=True), Machine("pairwise", lean=-1, logs=True))
MACHINES = [*((torch.float32, machine) for machine in FULL), *((torch.bfloat16, machine) for machine in HALF)]


@pytest.fixture(autouse=True)
def keep_failures_out_of_the_tree(tmp_path, monkeypatch):
    monkeypatch.setenv("KVTWIN_FAILURES", str(tmp_path))


def weights(machine: Machine, query: Tensor, key: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Weights and their base-2 logarithms [B, Hq, Q, S], as a machine computes them: from logits minus the log-sum-exp,
    or by division by the sum. query [B, Hq, Q, D]; key [B, Hkv, S, D]; seen [B, Hq, Q, S] bool."""
    keys = per_query_head(key, query.shape[1]).float()[:, :, None]                        # [B, Hq, 1, S, D]
    logit = machine.logits(query, keys, seen, scale)
    top, total, _ = machine.softmax(logit, torch.zeros(1, 1, 1, logit.shape[-1], 1))
    log_weight = (logit - top[..., None]) - machine.log2(total)[..., None]
    if machine.fused:
        weight = machine.exp2(logit - top[..., None]) / total.masked_fill(total == 0, 1)[..., None]
    else:
        weight = machine.exp2(logit - (top + machine.log2(total))[..., None])
    return weight.masked_fill(~seen, 0), log_weight.masked_fill(~seen, -math.inf)


def received(machine: Machine, weight: Tensor, heads: int) -> Tensor:
    """The sum over queries of the mean over the group, [B, Hkv, S], in the machine's order."""
    per_head = machine.sum(weight.transpose(2, 3)).unflatten(1, (heads, -1))              # [B, Hkv, G, S]
    return machine.sum(per_head.transpose(2, 3)) / per_head.shape[2]


def used_by(machine: Machine, case: AttendCase) -> dict[str, float]:
    """The largest error, relative to its bound, of the attention received from a block and, with TOVA, of the newest
    query's weights."""
    attention, allowed = case.attention, arithmetic(case.dtype)
    query = case.query.masked_fill(~case.valid.repeat_interleave(case.group, 1)[..., None], 0)
    weight, log_weight = weights(machine, query, zero_unoccupied(case.key, case.occupied), attention.seen, case.factor)
    found = {"received": assert_within(
        received(machine, weight, case.key_value_heads), blocks.received_attention(attention),
        blocks.received_error(attention, allowed), what="received",
    )}
    if TOVA is None:
        return found
    newest = TOVA.newest(attention, case.valid)
    last = (attention.logit == newest.logit).all(-1).to(torch.int8).argmax(2)[..., None, None]
    one, log = (x.gather(2, last.expand(-1, -1, 1, x.shape[-1])) for x in (weight, log_weight))
    total = machine.log2_of_sum(log[:, :, 0].unflatten(1, (case.key_value_heads, -1)))
    low, high = blocks.log_sum_interval(newest, allowed)
    truth = (newest.logit - newest.lse)[:, :, 0].unflatten(1, (case.key_value_heads, -1)).logsumexp(2)
    seen = truth.isfinite()
    half = torch.maximum(high - truth, truth - low)
    found["log weight"] = assert_within(total[seen] * math.log(2), truth[seen], half[seen], what="log weight")
    mean = machine.exp2(total) / case.group if machine.logs else received(machine, one, case.key_value_heads)
    found["weight"] = assert_within(
        mean, blocks.received_attention(newest), TOVA.weight_error(newest, allowed), what="weight"
    )
    return found


@pytest.mark.parametrize("content", contents.CONTENTS)
@pytest.mark.parametrize(("dtype", "machine"), MACHINES, ids=str)
def test_no_correct_arithmetic_exceeds_the_bounds_of_a_block(dtype, machine, content):
    for shape in (
        {"slots": 16, "queries": 1, "group": 3}, {"slots": 21, "queries": 6, "group": 2, "scale": 1.0},
        {"slots": 9, "queries": 9, "occupancy": "left_padding"}, {"slots": 12, "queries": 3, "occupancy": "random"},
    ):
        used_by(machine, AttendCase(batch=2, key_value_heads=2, dtype=dtype, content=content, seed=3, **shape))


@pytest.mark.parametrize("machine", FULL, ids=str)
def test_ordinary_data_reaches_one_percent_of_each_bound_of_a_block(machine):
    """For D = 16, S <= 16 and float32."""
    worst: dict[str, float] = {}
    for group, slots, queries in ((1, 4, 1), (1, 16, 4), (2, 8, 8), (4, 16, 1)):
        found = used_by(machine, AttendCase(batch=64, group=group, slots=slots, queries=queries, seed=1))
        worst = {name: max(used, worst.get(name, 0)) for name, used in found.items()}
    assert all(0.01 <= used <= 1 for used in worst.values()), worst


def emulated(machine: Machine, base: type) -> type:
    """A reference state in which a machine of emulate.py computes the received attention."""

    class Emulated(base):
        def _observe(self, chunk):
            heads, seen = self.sizes.key_value_heads, chunk.logit != -math.inf
            key = zero_unoccupied(self.key, self.occupied)
            query = chunk.query.masked_fill(~chunk.valid[:, None, :, None], 0)
            weight, _ = weights(machine, query, key, seen, self.scale)
            self.score.copy_(machine.plus(self.score, received(machine, weight, heads)))

        def _rank(self):
            rank, protected = super()._rank()
            if base.__name__ == "VATPState":
                value = machine.flush(zero_unoccupied(self.value, self.occupied).float())
                rank = machine.times(self.score.masked_fill(~self.occupied, 0), machine.sum(value.abs()))
            return rank, protected

    return Emulated


@pytest.mark.slow
@pytest.mark.parametrize("content", ["ordinary", "overflow_88", "zero_values", "tiny_values", "integers"])
@pytest.mark.parametrize(("dtype", "machine"), MACHINES, ids=str)
def test_no_correct_arithmetic_exceeds_the_bounds_of_sums_over_many_blocks(dtype, machine, content):
    """Sums move with their tokens and accumulate over a whole trace. VATP's ranks are their products with value
    norms."""
    for name, module in METHODS.items():
        trace = StateTrace(
            method=name, key_value_heads=2, group=2, dtype=dtype, content=content, prompt=14, steps=8, seed=5,
            padding="random", config=(("budget", 6), ("block_size", 4)),
        )
        state = emulated(machine, checkers.pair(name).state)
        tested = type("Tested", (), {state.__mro__[1].__name__: state})
        with stats.collect():
            lockstep.run(trace, tested, module)
            if name == "vatp" and content == "ordinary":
                lockstep.run(with_spiked_values(trace), tested, module)


def test_errors_of_sums_are_noticed_once_they_exceed_their_bound():
    """One addition to a sum is rounded to float16."""
    class Sloppy(Machine):
        def plus(self, left, right):
            return super().plus(left, right.half().float())

    trace = StateTrace(method="h2o", group=2, prompt=10, steps=3, config=(("budget", 6), ("block_size", 4)))
    tested = type("Tested", (), {"H2OState": emulated(Sloppy(), METHODS["h2o"].H2OState)})
    with pytest.raises(Mismatch, match="score"), stats.collect():
        lockstep.run(trace, tested, METHODS["h2o"])


def test_bounds_of_blocks_are_zero_where_nothing_can_err():
    case = AttendCase(batch=3, slots=9, queries=4, key_value_heads=2, occupancy="empty_row", per_head=True)
    allowed = arithmetic(case.dtype)
    error = blocks.received_error(case.attention, allowed)
    seen = case.attention.seen.any(2).unflatten(1, (2, -1)).any(2)
    assert bool((error[~seen] == 0).all()) and bool((error[seen] > 0).all()) and bool((~seen).any())
    for content in contents.CONTENTS:
        wide = dataclasses.replace(case, content=content, head_dim=256, scale=1.0, occupancy="full")
        assert bool(blocks.received_error(wide.attention, allowed).isfinite().all()), content


@pytest.mark.parametrize("pair", [pair for pair in discovery.methods() if pair.name == "tova"], ids=str)
def test_tova_newest_is_the_last_real_query(pair):
    """If a block ends with padding, it is the query before it. If a block is all padding, it attends to nothing."""
    case = AttendCase(batch=3, slots=6, queries=3, group=2)
    occupied = torch.ones(3, 6, dtype=torch.bool)
    occupied[1, -1] = False
    occupied[2, -3:] = False
    case._adopt({**case.tensors, "occupied": occupied})
    newest = TOVA.newest(case.attention, case.valid)
    for row, query in ((0, 2), (1, 1)):
        assert torch.equal(newest.logit[row, :, 0], case.attention.logit[row, :, query])
    assert not bool(newest.seen[2].any())
    tensors = (case.tensors[name].double() for name in ("query", "key", "value"))
    truth = pair.reference.attend(*tensors, occupied).received
    assert_within(blocks.received_attention(newest), truth, blocks.received_error(newest, arithmetic(case.dtype)))
