"""EpiKV's functions and state with arguments of which each lies in memory in its own way, and of several tiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvtwin.conformance.cases.layouts import lay_out
from kvtwin.conformance.judge.checkers import epikv_scores as judge
from kvtwin.conformance.judge.checkers.epikv import assert_inside, extras
from kvtwin.conformance.judge.compare import assert_same, assert_within
from kvtwin.reference.contract.epikv.config import EpiKVConfig

pytestmark = [pytest.mark.kind("equivalence"), pytest.mark.property("layouts")]

LAYOUTS = ("sliced", "channels_first", "spread")


def drawn(seed: int, device: torch.device, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


@pytest.mark.parametrize("turn", range(3))
def test_functions_read_every_argument_by_its_own_strides(turn, twins, device):
    epikv, one, other = twins.optimized.epikv, LAYOUTS[turn], LAYOUTS[turn - 1]
    key, value = drawn(1, device, 2, 3, 14, 16), drawn(2, device, 2, 3, 14, 16)
    occupied = torch.ones(2, 14, dtype=torch.bool, device=device)
    occupied[1, [0, 5]] = False
    placed = lay_out(key, one), lay_out(value, other)
    clean = [tensor.double().masked_fill(~occupied[:, None, :, None], 0) for tensor in (key, value)]
    for chunk in (3, 5):
        interval = judge.lag_interval(*clean, occupied, chunk)
        assert_inside(epikv.lag_kv(*placed, chunk=chunk, occupied=occupied), interval, what="lag_kv")
    variance = judge.variance_of(key.double())
    assert_within(epikv.kv_variance(placed[0]), variance.exact[:, 0], variance.error[:, 0], what="kv_variance")
    hidden, previous = drawn(3, device, 2, 5, 90), drawn(4, device, 2, 5, 90)
    moved = epikv.hidden_change(lay_out(hidden, one), lay_out(previous, other))
    exact = twins.reference.epikv.hidden_change(hidden.double(), previous.double())
    assert_within(moved, exact, judge.change_error(hidden.double(), previous.double()), what="hidden_change")


@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize("options", [{"policy": "band_adaptive", "bands": (2, 3)}, {"policy": "lag_kv"}],
                         ids=lambda options: options["policy"])
def test_a_step_reads_every_argument_by_its_own_strides(options, turn, twins, device):
    config = EpiKVConfig(5, recent=1, window=3, chunk=2, hidden_size=70, **options)
    sizes = {"batch": 2, "query_heads": 2, "key_value_heads": 2, "head_dim": 16, "dtype": torch.float32}
    plain, tested = (twins.optimized.epikv.EpiKVState(config, **sizes, device=device) for _ in range(2))
    for step in range(7):
        tokens: dict[str, Any] = {
            name: drawn(10 * step + number, device, 2, 2, 16) for number, name in enumerate(("query", "key", "value"))
        }
        tokens |= extras(plain, **tokens)
        placed = {name: lay_out(tensor, LAYOUTS[(turn + number) % 3])
                  for number, (name, tensor) in enumerate(sorted(tokens.items()))}
        assert_same(tested.step(**placed), plain.step(**tokens), what="output")
        assert_same(tested.score, plain.score, what="score")
        assert_same(tested.positions, plain.positions, what="positions")
