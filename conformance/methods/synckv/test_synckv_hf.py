"""SyncKV inside transformers: tokens and the chosen sets of every layer, against a plain loop over its float64
state."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs transformers: python -m pip install 'kvtwin[hf]'")

from kvtwin.conformance.methods.support import tiny_models
from kvtwin.conformance.methods.support.hf_cases import check_against_loops, feed
from kvtwin.conformance.methods.support.hf_loops import PromptLoop, sizes
from kvtwin.conformance.methods.support.tiny_models import generate, prompts
from kvtwin.reference.attention import logits
from kvtwin.reference.hf.cache_adapter_synckv import SyncCache, layer_similarities, watching
from kvtwin.reference.synckv import HeadClusters, SyncKVConfig, SyncKVState, cluster_heads, head_similarity
from kvtwin.reference.synckv.sets import log_weights

pytestmark = [pytest.mark.kind("equivalence"), pytest.mark.whole]

F64 = torch.float64
#: Two layers with two KV heads each. The representatives differ between the layers.
CLUSTERS = (HeadClusters((0, 0), (1,)), HeadClusters((0, 0), (0,)))
SMALL: dict[str, Any] = {"k": 4, "stride": 3, "max_tokens": 28, "head_clusters": CLUSTERS}


def cache_of(twins: Any, side: str, model: Any, **options: Any) -> Any:
    """A cache that is ready to run. If an implementation has only a state, our cache adapter wraps it."""
    model.set_attn_implementation("kvtwin")
    made: type[SyncCache] = importlib.import_module(f"kvtwin.{side}.hf.synckv").SyncKVCache
    state = getattr(getattr(twins, side).synckv, "SyncKVState", made.State)
    made = made if state is made.State else type("SyncKVCache", (SyncCache,), {"State": state})
    return made(model.config, **{**SMALL, **options})


class SyncLoop(PromptLoop):
    """A row without its padding, with one state per layer."""

    def __init__(
        self, model: Any, config: SyncKVConfig, clusters: tuple[HeadClusters, ...], phases: Sequence[int]
    ) -> None:
        super().__init__(model, [
            SyncKVState(replace(config, phase=phase), one, **sizes(model))
            for one, phase in zip(clusters, phases, strict=True)
        ])


def chosen(state: Any, row: int, padding: int = 0) -> list[list[int]]:
    return [[token + padding for token in head if token >= 0] for head in state.chosen[row].tolist()]


def check(model: Any, cache: Any, inputs: dict[str, Tensor], new: int, phases: Sequence[int] = (0, 0)) -> None:
    """Compare the cache with one loop per row: tokens, and the chosen sets of each layer after every forward pass."""

    def make(padding: int) -> tuple[SyncLoop, Any]:
        clusters = tuple(layer.state.head_clusters for layer in cache.layers)
        config = cache.layers[0].state.config
        config = SyncKVConfig(
            config.k, config.rho, config.stride, config.clusters, max_tokens=config.max_tokens,
            union_clusters=config.union_clusters,
        )
        loop = SyncLoop(model, config, clusters, phases)
        return loop, lambda: [chosen(state, 0, padding) for state in loop.states]

    check_against_loops(make, model, cache, inputs, new, lambda layer, row: chosen(layer.state, row))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_generation_matches_the_decode_loop(family, twins, device):
    """Left padding, which leaves fewer than k tokens in one row, and several anticipations."""
    model = tiny_models.model(family, F64, device)
    used = cache_of(twins, "reference", model)
    check(model, used, prompts(11, [0, 2, 8], device), 9)
    assert used.get_seq_length() == 11 + 8
    assert [layer.state.head_clusters for layer in used.layers] == list(CLUSTERS)


@pytest.mark.parametrize("offload", [False, True])
def test_generation_on_the_optimized_side_matches_the_decode_loop(offload, twins, device):
    model = tiny_models.model("qwen3", torch.float32, device)
    used = cache_of(twins, "optimized", model, stride=2, max_tokens=14, offload=offload)
    check(model, used, prompts(7, [0, 3], device), 4)


@pytest.mark.parametrize("side", ["reference", "optimized"])
def test_heads_may_attend_to_the_sets_of_all_clusters(side, twins, device):
    """Head 2 follows head 0 and head 3 head 1. With one set each, the logits would differ."""
    dtype = F64 if side == "reference" else torch.float32
    model = tiny_models.model("llama", dtype, device, num_attention_heads=4, num_key_value_heads=4)
    clusters, inputs = [HeadClusters((0, 1, 0, 1), (0, 1))] * 2, prompts(9, [0, 3], device)
    options = {"head_clusters": clusters, "k": 2, "stride": 2, "max_tokens": 16}
    check(model, cache_of(twins, side, model, **options, union_clusters=True), inputs, 4)
    outputs = []
    for union in (False, True):
        cache = cache_of(twins, side, model, **options, union_clusters=union)
        feed(model, cache, range(8))
        with torch.no_grad():
            outputs.append(model(torch.tensor([[5]], device=device), past_key_values=cache).logits)
    assert not torch.equal(*outputs)


def test_layers_may_anticipate_at_different_steps(twins, device):
    model = tiny_models.model("llama", F64, device)
    used = cache_of(twins, "reference", model, spread=True)
    check(model, used, prompts(7, [0, 3], device), 6, phases=(0, 1))
    used.join()


def test_phases_repeat_after_stride_layers(twins, device):
    """Each layer has its own phase, and as many representatives as its own clusters."""
    model = tiny_models.model("llama", F64, device, num_hidden_layers=5)
    clusters = [HeadClusters((0, 0), (1,)), HeadClusters((0, 1), (0, 1)), *[HeadClusters((1, 0), (1, 0))] * 3]
    used = cache_of(twins, "reference", model, spread=True, stride=2, head_clusters=clusters)
    feed(model, used)
    assert [layer.state.config.phase for layer in used.layers] == [0, 1, 0, 1, 0]
    assert [layer.state.head_clusters for layer in used.layers] == clusters
    assert [layer.state.config.clusters for layer in used.layers] == [1, 2, 2, 2, 2]


@pytest.mark.kind("bad_input")
@pytest.mark.parametrize(("options", "error", "message"), [
    ({"spread": 1}, TypeError, "spread must be a bool"),
    ({"spread": True, "phase": 1}, TypeError, "phase is not an option beside spread"),
])
def test_rejects_invalid_spread_and_phases(options, error, message, twins, device):
    with pytest.raises(error, match=message):
        cache_of(twins, "reference", tiny_models.model("llama", F64, device), **options)


def test_rejects_a_copy_during_a_transfer(device):
    from kvtwin.optimized.hf import SyncKVCache

    model = tiny_models.model("llama", device=device)
    model.set_attn_implementation("kvtwin")
    used = SyncKVCache(model.config, **SMALL, offload=True)
    feed(model, used)
    with pytest.raises(NotImplementedError, match="a state with offload=True cannot be copied"):
        copy.deepcopy(used)


def test_full_budget_matches_the_stock_model(twins, device):
    """This also holds for a second generation with the same cache."""
    model, inputs = tiny_models.model("llama", F64, device), prompts(9, [0, 4], device)
    expected = generate(model, inputs, 6)
    used = cache_of(twins, "reference", model, k=28)
    assert torch.equal(generate(model, inputs, 6, past_key_values=used), expected)
    used.reset()
    assert used.get_seq_length() == 0
    assert torch.equal(generate(model, inputs, 6, past_key_values=used), expected)


def test_beams_are_reordered(twins, device):
    """If all tokens are kept, beam search equals that of the stock cache, with rows reordered on the way."""
    model, inputs = tiny_models.model("llama", F64, device), prompts(6, [0], device)
    expected = generate(model, inputs, 6, num_beams=3)
    used = cache_of(twins, "reference", model, k=28)
    moves = []
    for layer in used.layers:
        layer.reorder_cache = lambda index, own=layer.reorder_cache: (moves.append(index.tolist()), own(index))[1]
    assert torch.equal(generate(model, inputs, 6, num_beams=3, past_key_values=used), expected)
    assert any(index != sorted(index) for index in moves)


def test_heads_are_in_runs_unless_clusters_are_given(twins):
    for side in ("reference", "optimized"):
        used = importlib.import_module(f"kvtwin.{side}.hf").SyncKVCache(tiny_models.model("llama").config, k=3)
        assert used.config == SyncKVConfig(3)


# Clusters of similar heads -------------------------------------------------------------------------------------------


def test_clusters_are_those_of_whole_attention_matrices(twins, device):
    """They equal the clusters from eager attention weights over unpadded rows, pooled over groups. The model is left as
    it was."""
    own = importlib.import_module("kvtwin.reference.hf.synckv")
    model = tiny_models.model("llama", F64, device, num_attention_heads=8, num_key_value_heads=4)
    inputs = prompts(12, [0, 4], device)
    kept: dict[int, tuple[Tensor, Tensor, float]] = {}
    with torch.no_grad(), watching(model, lambda layer, q, k, scale, real: kept.update({layer: (q, k, scale)})):
        model(**inputs)
    found = own.head_clusters(model, [inputs], k=3, clusters=2, steps=5)
    assert model.config._attn_implementation == "sdpa"
    for layer, (query, key, scale) in kept.items():
        rows = []
        for at in range(7, 12):
            for row, padding in enumerate((0, 4)):
                one = logits(
                    query[row:row + 1, :, at], key[row:row + 1, :, padding:at + 1],
                    torch.ones(1, at + 1 - padding, dtype=torch.bool, device=device), scale=scale,
                ).log_softmax(-1)
                rows.append(head_similarity(one.unflatten(1, (4, 2)).amax(2), 3))
        assert found[layer] == cluster_heads(torch.stack(rows).mean(0), 2)


def test_every_token_counts_once_for_the_similarity_of_heads(device):
    """At the first steps, one row has tokens and the other one padding."""
    model = tiny_models.model("llama", F64, device, num_attention_heads=8, num_key_value_heads=4)
    both, alone = prompts(12, [0, 4], device), []
    for row, padding in enumerate((0, 4)):
        text = {name: tensor[row:row + 1, padding:] for name, tensor in both.items()}
        alone.append(similarities(model, text, steps=10 if padding == 0 else 8))
    for together, *rows in zip(similarities(model, both, steps=10), *alone, strict=True):
        expected = (10 * rows[0] + 8 * rows[1]) / 18
        # 18 numbers from 0 to 1 are added.
        assert float((together - expected).abs().max()) <= 18 * 2.0**-52


def similarities(model: Any, text: dict[str, Tensor], *, steps: int) -> list[Tensor]:
    return layer_similarities(
        model, [text], k=3, steps=steps, log_weights=log_weights, head_similarity=head_similarity
    )


def test_both_sides_find_the_same_clusters(twins, device, tmp_path):
    """The clusters can be saved as JSON, and a cache accepts the loaded ones."""
    model = tiny_models.model("llama", torch.float32, device)
    texts = [prompts(6, [0, 2], device)["input_ids"]]
    found = [
        importlib.import_module(f"kvtwin.{side}.hf.synckv").head_clusters(model, texts, k=2, clusters=1, steps=2)
        for side in ("reference", "optimized")
    ]
    assert found[0] == found[1]
    HeadClusters.save(tmp_path / "clusters.json", found[0])
    used = cache_of(twins, "reference", model, head_clusters=HeadClusters.load(tmp_path / "clusters.json"))
    feed(model, used)
    assert tuple(layer.state.head_clusters for layer in used.layers) == found[0]


# Bad input -----------------------------------------------------------------------------------------------------------


@pytest.mark.kind("bad_input")
@pytest.mark.parametrize("side", ["reference", "optimized"])
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"k": 0}, ValueError, "k must be at least 1"),
        ({"scale": 0.1}, TypeError, "scale is not an option"),
        ({"no_option": 1}, TypeError, "no_option"),
        ({"clusters": 1}, TypeError, "clusters is not an option beside head_clusters"),
        ({"head_clusters": CLUSTERS[0]}, TypeError, "head_clusters must be a sequence of HeadClusters, one per layer"),
        ({"head_clusters": CLUSTERS[:1]}, ValueError, "one entry per layer of the model: expected 2, got 1"),
        (
            {"head_clusters": (CLUSTERS[0], HeadClusters((0, 0, 0), (1,)))}, ValueError,
            r"head_clusters\[1\] needs one label per KV head: expected 2, got 3",
        ),
    ],
)
def test_options(side, options, error, message):
    made = importlib.import_module(f"kvtwin.{side}.hf").SyncKVCache
    with pytest.raises(error, match=message):
        made(tiny_models.model("llama").config, **{**SMALL, **options})


@pytest.mark.kind("bad_input")
def test_more_tokens_than_there_is_room_for(twins):
    model = tiny_models.model("llama")
    with pytest.raises(ValueError, match="max_tokens=8 is too small for 9 tokens"):
        generate(model, prompts(6, [0]), 5, past_key_values=cache_of(twins, "reference", model, max_tokens=8))


@pytest.mark.kind("bad_input")
def test_rejects_calibration_without_texts():
    own = importlib.import_module("kvtwin.reference.hf.synckv")
    with pytest.raises(ValueError, match="texts must hold at least one text"):
        own.head_clusters(tiny_models.model("llama"), [], k=2)
