"""SyncKV's state with several representatives, rows that differ, and every loop of its kernels going around often.

The heads in the order of the state's tables (representatives first) are no inverse of themselves, so that a table taken
for its inverse is noticed, and representatives do not ascend.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvtwin.conformance.cases import layouts
from kvtwin.conformance.judge.checkers.synckv_state import Adapter
from kvtwin.conformance.judge.lockstep import Lockstep
from kvtwin.conformance.suite.synckv.synckv_offloaded import as_in_a_graph
from kvtwin.optimized.synckv import _offload, _step
from kvtwin.reference.synckv import HeadClusters, SyncKVConfig
from kvtwin.reference.synckv import SyncKVState as Reference

pytestmark = [pytest.mark.kind("equivalence"), pytest.mark.property("state")]

#: Head 3 represents itself and head 0, head 1 itself and head 2.
CLUSTERS = HeadClusters((0, 1, 1, 0), (3, 1))
#: The tokens of a prompt, by row.
PROMPT = ((0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0), (1,) * 12)


def tokens(seed: int, device: torch.device, sizes: dict[str, int], *time: int) -> list[Tensor]:
    """query, key and value [B, H, *time, D], each in a layout of its own."""
    generator = torch.Generator().manual_seed(seed)
    heads = {"query": sizes["query_heads"], "key": sizes["key_value_heads"], "value": sizes["key_value_heads"]}
    made = {
        name: torch.randn(sizes["batch"], count, *time, sizes["head_dim"], generator=generator).to(device)
        for name, count in heads.items()
    }
    return [layouts.lay_out(tensor, layouts.layout_of(layouts.MIXED, name)) for name, tensor in made.items()]


def lockstep(twins: Any, device: torch.device, clusters: HeadClusters, sizes: dict[str, int], **options: Any) -> Any:
    config = SyncKVConfig(clusters=len(clusters.representatives), scale=1.0, **options)
    return Lockstep(
        twins.optimized.synckv.SyncKVState(config, clusters, **sizes, dtype=torch.float32, device=device),
        Reference(config, clusters, **sizes, dtype=torch.float64, device=device), Adapter(),
    )


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists, prompts and runs of new tokens have several chunks, and programs several units."""
    for name, value in {"CHUNK": 2, "BLOCK": 1, "PROGRAMS": 3, "SHARE": 10}.items():
        monkeypatch.setattr(_offload, name, value)


@pytest.mark.slow_on_cpu
@pytest.mark.parametrize(("group", "form"), [(3, "launched"), (5, "offloaded"), (1, "as in a graph")])
def test_rows_in_another_order_keep_step_in_the_middle_of_a_stride(group, form, small_tiles, twins, device):
    """A prompt with padding on both sides; another order between two anticipations; then a reset, no prompt, and
    another order. Groups have 3, 5 and 1 heads."""
    sizes = {"batch": 2, "query_heads": 4 * group, "key_value_heads": 4, "head_dim": 16}
    both = lockstep(
        twins, device, CLUSTERS, sizes, k=5, rho=0.3, stride=3, max_tokens=22, offload=form != "launched",
        exclude_static=group != 1,
    )
    if form == "as in a graph":
        as_in_a_graph(both.tested, device)
    occupied = torch.tensor(PROMPT, dtype=torch.bool, device=device)
    both.prefill(*tokens(1, device, sizes, 12), occupied)
    for step in range(8):
        if step in (1, 4):
            both.reorder(torch.tensor([1, 0], device=device))
        both.step(*tokens(2 + step, device, sizes))
    both.reset()
    for step in range(8):
        if step == 5:
            both.reorder(torch.tensor([1, 0], device=device))
        both.step(*tokens(20 + step, device, sizes))


@pytest.mark.parametrize("slots", [399, 400])
def test_many_parts_are_merged_in_several_rounds(slots, twins, device, monkeypatch):
    """Four parts of a head, merged one or two at a time, and several chunks of slots and of chosen tokens."""
    monkeypatch.setattr(_step, "MERGED", 1)
    monkeypatch.setattr(_step, "FEW", 4)
    sizes = {"batch": 1, "query_heads": 6, "key_value_heads": 2, "head_dim": 16}
    both = lockstep(
        twins, device, HeadClusters((0, 0), (1,)), sizes, k=270, stride=2, max_tokens=slots,
        exclude_static=slots % 2 == 1,
    )
    both.prefill(*tokens(1, device, sizes, 390))
    for step in range(3):
        both.step(*tokens(2 + step, device, sizes))
