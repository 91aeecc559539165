"""kvpress: the presses, through our adapter, beside the references of KeyDiff, SnapKV, TOVA, StreamingLLM and LagKV."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

from .....reference import keydiff
from .....reference.attention import INF
from .....reference.baselines import lag_kv, snapkv, streaming_llm, tova
from .....reference.selection import top_k
from ..checkout import Checkout, Project, StandIns
from ..comparison import Comparison, Count, at_positions
from ..inputs import repeated, rotate_half, state, tokens

ADAPTER = "kvtwin.conformance.adapters.kvpress"
PRESSES = {
    "ScorerPress": "scorer", "KeyDiffPress": "keydiff", "SnapKVPress": "snapkv", "TOVAPress": "tova",
    "StreamingLLMPress": "streaming_llm", "LagKVPress": "lagkv",
}
STAND_INS: StandIns = {
    "transformers": {}, "transformers.models.llama.modeling_llama": {"rotate_half": rotate_half, "repeat_kv": repeated}
}
HEADS, QUERY_HEADS = 2, 8
CASES = [(seed, total, budget) for seed, (total, budget) in enumerate([(64, 16), (100, 40), (33, 20), (128, 50)] * 3)]


def compare(checkout: Checkout) -> Iterator[Comparison]:
    adapter = adapted(checkout)
    counts = {name: Count() for name in ("keydiff", "snapkv", "streaming_llm")}
    plain, under = Count(), Count()
    for seed, total, budget in CASES:
        query, key, value = tokens(seed, total, heads=HEADS, query_heads=QUERY_HEADS)
        kept = adapter.keydiff.evict(key, value, budget)["kept"]
        counts["keydiff"].add(at_positions(kept, total), at_positions(keydiff.evict(key, value, budget).kept, total))
        window = query[:, :, -8:]
        kept = adapter.snapkv.compress(window, key, value, budget)["kept"]
        counts["snapkv"].add(
            at_positions(kept, total), at_positions(snapkv.compress(window, key, value, budget).kept, total)
        )
        positions = torch.arange(total)
        counts["streaming_llm"].add(
            adapter.streaming_llm.keep(positions, budget), streaming_llm.keep(positions, budget)
        )
        kept = adapter._compress(adapter.TOVAPress(), key, value, budget, query[:, :, -1:])["kept"]
        theirs = at_positions(kept, total)
        ours = state(tova.TOVAState, tova.TOVAConfig(budget, block_size=total), query, key)
        ours.prefill(query, key, value)
        plain.add(theirs, at_positions(ours.positions, total))
        received = tova.attend(query[:, :, -1:], key, value, torch.ones(1, total, dtype=torch.bool)).received.mean(1)
        received[..., -1] = INF
        under.add(theirs, at_positions(top_k(received, budget)[:, None].expand(-1, HEADS, -1), total))
    for name, press in (("keydiff", "KeyDiffPress"), ("snapkv", "SnapKVPress"), ("streaming_llm", "StreamingLLMPress")):
        yield Comparison(f"{press}: prompt tokens kept", "decisions", counts[name])
    yield Comparison(
        "TOVAPress: prompt tokens kept", "decisions", plain, ("tova.heads", "tova.newest-token"), under,
        "`attend`, the mean over all heads, and the newest token first",
    )
    yield lagged(adapter)


def lagged(adapter: Any) -> Comparison:
    """Budgets with which each chunk keeps the same number, so that no ranks are equal where the press cuts."""
    count = Count()
    for seed, (sinks, lag, chunks, each, tail) in enumerate([(4, 16, 5, 6, 3), (0, 8, 7, 3, 0), (4, 10, 3, 7, 9)]):
        total, budget = sinks + (chunks + 1) * lag + tail, sinks + chunks * each + lag + tail
        query, key, value = tokens(seed, total, heads=HEADS)
        score = adapter.LagKVPress(n_sink=sinks, lag_size=lag).score(*adapter._layer(key, None, value))
        kept = score.topk(budget, dim=-1).indices                                 # as ScorerPress.compress does
        ours = state(lag_kv.LagKVState, lag_kv.LagKVConfig(budget, lag=lag, sinks=sinks, block_size=total), query, key)
        ours.prefill(query, key, value)
        count.add(at_positions(kept, total), at_positions(ours.positions, total))
    return Comparison("LagKVPress: prompt tokens kept, the same number of each chunk", "decisions", count)


def adapted(checkout: Checkout) -> Any:
    """Our adapter with the checkout's presses, and these presses. No `kvpress` stays importable."""
    found = {}
    for press, file in PRESSES.items():
        module = checkout.load(
            f"kvpress.presses.{file}_press", bare=("kvpress", "kvpress.presses"), stand_ins=STAND_INS
        )
        found[press] = getattr(module, press)
    package = ModuleType("kvpress")
    package.__dict__.update(found)
    with mock.patch.dict(sys.modules, {"kvpress": package}):
        sys.modules.pop(ADAPTER, None)
        adapter = importlib.import_module(ADAPTER)
    return SimpleNamespace(**{name: getattr(adapter, name) for name in dir(adapter)} | found)


PROJECT = Project(
    "https://github.com/NVIDIA/kvpress", "8bb29b9c3078452a86d692f29123fa6c793e2b05",
    tuple(f"kvpress/presses/{file}_press.py" for file in PRESSES.values()), compare,
)
