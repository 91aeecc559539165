"""The cache adapter for block states: padding anywhere, masks from two sources, compiled steps, restarted prompts."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: python -m pip install 'kvtwin[hf]'")

from kvtwin.conformance import discovery
from kvtwin.conformance.judge import checkers
from kvtwin.conformance.methods.support import tiny_models
from kvtwin.conformance.methods.support.hf_cases import cuts
from kvtwin.conformance.methods.support.hf_loops import F64, StateLoop
from kvtwin.conformance.methods.support.tiny_models import cache_class, generate, prompts
from kvtwin.reference.blocks import BlockConfig
from kvtwin.reference.hf import H2OCache, LongFlowCache, masks

BLOCKS = [pair.name for pair in discovery.built_in() if pair.config and issubclass(pair.config, BlockConfig)]

pytestmark = [pytest.mark.kind("equivalence"), pytest.mark.whole]


def places(mask: torch.Tensor) -> torch.Tensor:
    return (mask.cumsum(1) - 1).clamp_min(0)


@pytest.mark.parametrize("method", BLOCKS)
def test_padding_behind_tokens_is_the_loop(twins: Any, device: torch.device, method: str) -> None:
    """Two turns in one batch, each with left padding, followed by single tokens, some of which are padding."""
    model = tiny_models.model("llama", F64, device)
    model.set_attn_implementation("kvtwin")
    options = checkers.ask(method, "SMALL", {}) | {"budget": 5, "block_size": 3}
    cache = cache_class(twins, "reference", method)(model.config, **options)
    ids = prompts(15, [0, 0, 0], device)["input_ids"]
    mask = torch.tensor([
        [1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1],
        [0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 1],
        [0, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 0, 0, 1],
    ], device=device)
    passes = [(0, 7), (7, 12), (12, 13), (13, 14), (14, 15)]
    alive, logits = [], []
    for start, stop in passes:
        with torch.no_grad():
            output = model(
                ids[:, start:stop], attention_mask=mask[:, :stop], position_ids=places(mask)[:, start:stop],
                past_key_values=cache,
            )
        alive.append([layer.state.positions.tolist() for layer in cache.layers])
        logits.append(output.logits[:, -1].argmax(-1).tolist())
    for row in range(3):
        loop = StateLoop(model, method, cache.config)
        for number, (start, stop) in enumerate(passes):
            for a, b in cuts(start, stop, 3):
                expected = loop.feed(ids[row, a:b].tolist(), mask[row, a:b].bool().tolist())
            held = [[sorted(p for p in head if p >= 0) for head in layer[row]] for layer in alive[number]]
            assert held == loop.alive(), (row, start, stop)
            if mask[row, stop - 1]:
                assert logits[number][row] == int(expected.argmax()), (row, start, stop)


@pytest.mark.parametrize("side", ["reference", "optimized"])
def test_a_single_token_is_a_step_unless_it_is_padding(
    twins: Any, device: torch.device, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = tiny_models.model("llama", device=device), prompts(5, [0, 2], device)
    model.set_attn_implementation("kvtwin")
    cache = cache_class(twins, side, "h2o")(model.config, budget=6, block_size=4)
    with torch.no_grad():
        model(**ids, past_key_values=cache)
    state, called = cache.layers[0].state, []
    for name in ("step", "append_block"):
        whole = getattr(state, name)
        monkeypatch.setattr(state, name, lambda *a, name=name, whole=whole: called.append(name) or whole(*a))
    mask, token = ids["attention_mask"], torch.tensor([[7], [8]], device=device)
    for real in (None, [1, 1], [1, 0]):
        if real is not None:
            mask = torch.cat([mask, torch.ones_like(token)], 1) if cache.get_seq_length() > mask.shape[1] else mask
            mask = torch.cat([mask, torch.tensor(real, device=device)[:, None]], 1)
        with torch.no_grad():
            model(token, attention_mask=mask if real else None, past_key_values=cache)
    assert called == ["step", "step", "append_block"]
    held = [sorted(p for p in row[0] if p >= 0) for row in state.positions.tolist()]
    assert 7 in held[0]
    assert 7 not in held[1]


def test_the_mask_is_read_for_the_first_layer_alone() -> None:
    """Reading the mask synchronises with the GPU."""
    spec = masks.MaskSpec(mask_function=None, attention_mask=None)
    for what, expected in (("one", True), ("other", False)):
        assert spec.all(what, torch.tensor([True, expected])) is expected
        assert spec.all(what, torch.empty(2, dtype=torch.bool, device="meta")) is expected


@pytest.mark.parametrize("chunk", [2, 3, 9])
def test_padding_may_be_given_to_the_cache_instead_of_the_model(twins: Any, device: torch.device, chunk: int) -> None:
    """A loop over forward() that passes positions but no mask. The mask given to the constructor has the padding of
    each chunk. Tokens beyond its end are valid."""
    model, inputs = tiny_models.model("llama", device=device), prompts(9, [0, 5], device)
    model.set_attn_implementation("kvtwin")
    mask, ids = inputs["attention_mask"], inputs["input_ids"]
    told, asked = (
        cache_class(twins, "reference", "keydiff")(model.config, budget=4, block_size=2, attention_mask=given)
        for given in (mask[:, :max(chunk, 7)], None)
    )
    for start, stop in cuts(0, 9, chunk):
        positions = places(mask)[:, start:stop]
        with torch.no_grad():
            model(ids[:, start:stop], position_ids=positions, past_key_values=told)
            model(ids[:, start:stop], position_ids=positions, attention_mask=mask[:, :stop], past_key_values=asked)
        for one, other in zip(told.layers, asked.layers, strict=True):
            assert one.state.positions.tolist() == other.state.positions.tolist()
    assert set(told.layers[0].state.positions[1].flatten().tolist()) == {5, 6, 7, 8, -1}


def test_two_masks_that_differ_in_a_later_chunk() -> None:
    model, inputs = tiny_models.model("llama"), prompts(6, [0, 0])
    model.set_attn_implementation("kvtwin")
    own = inputs["attention_mask"].clone()
    own[1, 4] = 0
    with pytest.raises(ValueError, match="differs from the model's"):
        inputs["attention_mask"][0, 0] = 0                                          # otherwise transformers may drop it
        own[0, 0] = 0
        generate(
            model, inputs, 2, past_key_values=H2OCache(model.config, budget=4, attention_mask=own), prefill_chunk_size=3
        )


@pytest.mark.parametrize("chunk", [None, 4])
def test_full_budget_over_two_turns(twins: Any, device: torch.device, chunk: int | None) -> None:
    """The second turn is an ordinary block. Its mask prevents positions from starting at 0 (see masks.STARTS_AT_0)."""
    model, first, results = tiny_models.model("llama", device=device), prompts(9, [0, 4], device), []
    for name in ("sdpa", "kvtwin"):
        model.set_attn_implementation(name)
        used = None if name == "sdpa" else cache_class(twins, "reference", "h2o")(model.config, budget=40, block_size=4)
        answer = generate(model, first, 7, past_key_values=used, prefill_chunk_size=chunk if used else None)
        ids = torch.cat([first["input_ids"], answer, prompts(5, [0, 0], device)["input_ids"]], 1)
        mask = torch.cat([first["attention_mask"], torch.ones_like(ids[:, 9:])], 1)
        turn = {"input_ids": ids, "attention_mask": mask}
        results.append(generate(model, turn, 7, past_key_values=used))
    assert torch.equal(*results)


# Prompts that transformers feeds twice -------------------------------------------------------------------------------


@pytest.mark.kind("bad_input")
@pytest.mark.parametrize("cache", [H2OCache, LongFlowCache])
def test_tokens_fed_again_without_a_mask_are_noticed(cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.18 to 5.20 do this with prefill_chunk_size on a cache that is not empty: positions start at 0."""
    monkeypatch.setattr(masks, "STARTS_AT_0", True)
    model, ids = tiny_models.model("llama"), prompts(5, [0])["input_ids"]
    model.set_attn_implementation("kvtwin")
    used = cache(model.config, budget=20)
    with torch.no_grad():
        model(ids, past_key_values=used)
        model(ids[:, :2], past_key_values=used)                                      # positions 5 and 6
        for count in (3, 1):
            used.reset()
            model(ids, past_key_values=used)
            with pytest.raises(ValueError, match=r"start at 0, but the cache has seen 5 tokens.*prefill_chunk_size"):
                model(ids[:, :count], position_ids=torch.arange(count)[None], past_key_values=used)


@pytest.mark.kind("bad_input")
def test_a_row_of_padding_alone_may_start_at_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "STARTS_AT_0", True)
    spec = lambda: masks.MaskSpec(mask_function=None, attention_mask=None)  # noqa: E731
    own = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]]).bool()
    masks.refuse_restart(spec(), torch.tensor([[2, 3], [0, 1]]), own, 2)
    masks.refuse_restart(spec(), torch.tensor([[2, 3], [2, 3], [0, 1], [0, 1]]), own, 2)                    # two beams
    masks.refuse_restart(spec(), torch.tensor([[0, 1], [0, 1]]), own, 0)
    for positions in ([[0, 1], [0, 1]], [[0, 1]]):
        with pytest.raises(ValueError, match="start at 0"):
            masks.refuse_restart(spec(), torch.tensor(positions), own, 2)
    with pytest.raises(ValueError, match="start at 0"):
        masks.refuse_restart(spec(), torch.tensor([[2, 3], [0, 1]]), own, 3)


# torch.compile -------------------------------------------------------------------------------------------------------


@pytest.fixture
def compiled(device: torch.device) -> Iterator[Any]:
    """compiled(model) returns its forward, compiled to one graph without breaks, and the list of graphs so far."""
    graphs: list[object] = []

    def backend(graph: Any, inputs: object) -> Any:
        graphs.append(graph)
        return graph.forward

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")                              # warnings of the compiler do not concern us
        torch.compiler.reset()
        yield lambda model: (torch.compile(model.forward, fullgraph=True, backend=backend), graphs)
        torch.compiler.reset()


def decode(forward: Any, model: Any, cache: Any, device: torch.device, steps: list[list[int]]) -> list[list[int]]:
    """The next tokens after single tokens that follow a padded prompt, which is not compiled. steps: a mask for
    each."""
    inputs = prompts(5, [0, 2], device)
    mask, follow = inputs["attention_mask"], []
    with torch.no_grad():
        model(**inputs, past_key_values=cache)
        for number, real in enumerate(steps):
            mask = torch.cat([mask, torch.tensor(real, device=device)[:, None]], 1)
            token = torch.tensor([[3], [4 + number]], device=device)
            output = forward(
                input_ids=token, attention_mask=mask, position_ids=places(mask)[:, -1:], past_key_values=cache
            )
            follow.append(output.logits[torch.tensor(real).bool(), -1].argmax(-1).tolist())
    return follow


@pytest.mark.slow_on_cpu
@pytest.mark.parametrize(("side", "method"), [("reference", "h2o")])
def test_compiled_steps_heed_padding(twins: Any, device: torch.device, compiled: Any, side: str, method: str) -> None:
    model = tiny_models.model("llama", device=device)
    model.set_attn_implementation("kvtwin")
    forward, graphs = compiled(model)
    steps, follow, alive = [[1, 1], [1, 0], [0, 1]], [], []
    options = checkers.ask(method, "SMALL", {}) | {"budget": 4, "block_size": 2}
    for run in (model.forward, forward):
        cache = cache_class(twins, side, method)(model.config, **options)
        follow.append(decode(run, model, cache, device, steps))
        alive.append([layer.state.positions.tolist() for layer in cache.layers])
    assert follow[0] == follow[1]
    assert alive[0] == alive[1]
    assert len(graphs) <= 2, "expected at most two graphs for all steps"


@pytest.mark.slow
def test_a_compiled_step_refuses_padding_that_the_state_cannot_take(twins: Any, compiled: Any) -> None:
    """On the CPU even if --kv-device is cuda: after a failed assertion on CUDA, the process cannot use the GPU."""
    model, device = tiny_models.model("llama"), torch.device("cpu")
    model.set_attn_implementation("kvtwin")
    forward, graphs = compiled(model)
    decode(forward, model, LongFlowCache(model.config, budget=4, window=2), device, [[1, 1]] * 4)
    assert len(graphs) <= 2, "expected at most two graphs for all steps"
    with pytest.raises(RuntimeError, match="padding behind tokens that the cache has seen"):
        decode(forward, model, LongFlowCache(model.config, budget=4, window=2), device, [[1, 1], [1, 0]])
