"""ThinKV inside transformers: tokens and cache contents of every layer, against a plain loop over its float64 state."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs transformers: python -m pip install 'kvtwin[hf]'")

from kvtwin.conformance.judge.compare import assert_within
from kvtwin.conformance.methods.support import tiny_models
from kvtwin.conformance.methods.support.hf_cases import check_against_loops, feed
from kvtwin.conformance.methods.support.hf_loops import PromptLoop, sizes
from kvtwin.conformance.methods.support.tiny_models import generate, prompts
from kvtwin.reference.contract.thinkv.config import ThinKVConfig
from kvtwin.reference.contract.thinkv.types import Thought, Thresholds
from kvtwin.reference.hf.cache_adapter_thinkv import ThoughtCache, ThoughtLayer
from kvtwin.reference.thinkv.state import ThinKVState

pytestmark = [pytest.mark.kind("equivalence"), pytest.mark.whole]

F64 = torch.float64
# Windows of four tokens, of which two are quantized at a time.
SMALL: dict[str, Any] = {
    "tau": 4, "group": 2, "block": 2, "retention": (2, 1), "sparsity_threshold": 0.05, "max_tokens": 40,
}
EDGES = (0.51, 0.61)
# For a model with normalised keys, whose logits are closer together.
NORMED: dict[str, Any] = {"sparsity_threshold": 0.2}
NORMED_EDGES = (0.16, 0.29)


def cache_class(twins: Any, side: str) -> type[ThoughtCache]:
    """The ThinKVCache of a side. If an implementation has only a state, our cache adapter wraps it."""
    own: type[ThoughtCache] = importlib.import_module(f"kvtwin.{side}.hf.thinkv").ThinKVCache
    state = getattr(getattr(twins, side).thinkv, "ThinKVState", own.State)
    return own if state is own.State else type("ThinKVCache", (cache_class_of_reference(),), {"State": state})


def cache_class_of_reference() -> type[ThoughtCache]:
    found: type[ThoughtCache] = importlib.import_module("kvtwin.reference.hf.thinkv").ThinKVCache
    return found


class ThinKVLoop(PromptLoop):
    """A row without its padding, with one state per layer. Thought types are determined after each forward pass."""

    def __init__(self, model: Any, config: ThinKVConfig, thresholds: Thresholds | None) -> None:
        super().__init__(model, [ThinKVState(config, **sizes(model)) for _ in model.model.layers])
        self.config, self.thresholds = config, thresholds
        self.padding = self.prompt = 0
        self.told: list[int] = []                                             # the thought type of each window so far

    def copy(self) -> ThinKVLoop:
        made = copy.copy(self)
        made.states, made.told = copy.deepcopy(self.states), list(self.told)
        return made

    def feed(self, ids: list[int], real: list[bool]) -> Tensor | None:
        if self.seen == 0:
            self.padding, self.prompt = real.count(False), real.count(True)
        return super().feed(ids, real)

    def forward(self, ids: list[int]) -> Tensor:
        step = self.seen - self.prompt
        logits = super().forward(ids)
        if self.thresholds is not None and step >= 0 and self.seen > self.prompt and step % self.config.tau == 0:
            self.told.append(self.thought([float(self.states[n].sparsity) for n in self.thresholds.layers]))
            for state in self.states:
                state.thought = torch.tensor([self.told[-1]])
        return logits

    def thought(self, sparsity: list[float]) -> int:
        """The thought type for the mean sparsity. The error of a float32 mean is at most 2^-21: each layer's sparsity
        has three roundings, the mean three more (a product with the reciprocal), and the edge one. All are below 1."""
        assert self.thresholds is not None
        mean = sum(sparsity) / len(sparsity)
        assert all(abs(mean - edge) > 2**-21 for edge in self.thresholds.edges), "float32 could decide differently"
        low, high = self.thresholds.edges
        return int(Thought.TRANSITION if mean >= high else Thought.REASONING if mean >= low else Thought.EXECUTION)

    def held(self) -> list[dict[int, int]]:
        return [held(state, 0, self.padding) for state in self.states]


def held(state: Any, row: int, padding: int = 0) -> dict[int, int]:
    """The tokens in a row of a state: the thought type of each token by its index, and -1 in the buffer."""
    positions, thoughts = state.cache.positions[row].tolist(), state.cache.thoughts[row].tolist()
    return {at + padding: kind for at, kind in sorted(zip(positions, thoughts, strict=True)) if at >= 0}


def check(model: Any, cache: Any, inputs: dict[str, Tensor], new: int) -> list[list[int]]:
    """Compare the cache with one loop per row, token by token and layer by layer. Returns the thoughts of each row."""
    loops = []

    def make(_: int) -> tuple[ThinKVLoop, Any]:
        loops.append(ThinKVLoop(model, cache.config, cache.thresholds))
        return loops[-1], loops[-1].held

    check_against_loops(make, model, cache, inputs, new, lambda layer, row: held(layer.state, row))
    return [loop.told for loop in loops]


def cache_of(twins: Any, side: str, model: Any, **options: Any) -> Any:
    model.set_attn_implementation("kvtwin")
    return cache_class(twins, side)(model.config, **{**SMALL, **options})


# Generation ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "layers", "edges", "options"),
    [("llama", (0, 1), EDGES, {}), ("qwen2", (1,), EDGES, {}), ("qwen3", (0,), NORMED_EDGES, NORMED)],
)
def test_generation_matches_the_decode_loop(family, layers, edges, options, twins, device):
    """Padding spans a segment, the prompt exceeds the budget, and all three thought types occur."""
    model = tiny_models.model(family, F64, device)
    used = cache_of(twins, "reference", model, budget=8, thresholds=Thresholds(layers, edges), **options)
    told = check(model, used, prompts(11, [0, 2, 7], device), 14)
    assert {kind for row in told for kind in row} == set(Thought), told
    assert all(len(row) == 4 for row in told)
    state = used.layers[0].state
    assert (state.sizes.batch, state.sizes.key_value_heads, state.dtype) == (3, 2, F64)
    assert state.positions.shape == (3, used.config.slots)
    assert used.get_seq_length() == 11 + 13


def test_generation_on_the_optimized_side_matches_the_decode_loop(twins, device):
    options = {"num_attention_heads": 2, "num_key_value_heads": 1} if device.type == "cpu" else {}
    room, new = (14, 6) if device.type == "cpu" else (40, 24)
    model = tiny_models.model("qwen3", torch.float32, device, **options)
    used = cache_of(
        twins, "optimized", model, budget=4, max_tokens=room, thresholds=Thresholds((0, 1), NORMED_EDGES), **NORMED
    )
    told = check(model, used, prompts(5, [0, 2], device), new)
    assert len({kind for row in told for kind in row}) > 1, told


@pytest.mark.parametrize("side", ["reference", "optimized"])
def test_generation_without_quantization_nor_eviction_is_that_of_the_model(side, twins, device):
    """With a budget that nothing exceeds and 16 or 32 bits for each number, the cache holds the model's own keys and
    values. Transitions evict, so there are none."""
    dtype = torch.float32
    options = {"num_attention_heads": 2, "num_key_value_heads": 1} if device.type == "cpu" else {}
    model, inputs = tiny_models.model("llama", dtype, device, **options), prompts(5, [0, 2], device)
    full = generate(model, inputs, 6)
    whole = {"formats": dict.fromkeys("RET", "unquantized"), "budget": 14, "max_tokens": 14}
    used = cache_of(twins, side, model, **whole)
    assert generate(model, inputs, 6, past_key_values=used).tolist() == full.tolist()
    state = used.layers[0].state
    assert state.cache.bits_per_element() >= 32
    assert int(state.occupied[0].sum()) == 10


def test_without_thresholds_everything_is_reasoning(twins, device):
    model = tiny_models.model("llama", F64, device)
    used = cache_of(twins, "reference", model, budget=8)
    assert check(model, used, prompts(9, [0, 4], device), 8) == [[], []]
    assert {kind for layer in used.layers for row in (0, 1) for kind in held(layer.state, row).values()} <= {-1, 2}


def test_user_defined_thoughts_are_used(twins, device):
    """Written in place after a window's first step, they hold until they are written again."""
    model = tiny_models.model("llama", F64, device)
    used = cache_of(twins, "reference", model, budget=20)
    feed(model, used, range(1, 6))
    for step in range(8):
        feed(model, used, [7])
        if step % 4 == 0:
            for layer in used.layers:
                layer.state.thought[:] = step // 4                                         # T, then E
    for layer in used.layers:
        kinds = held(layer.state, 0)
        assert [kinds[at] for at in range(5, 13)] == [0] * 4 + [1] * 4
        assert {kind for at, kind in kinds.items() if at < 5} == {2}


def test_budget_is_1024_unless_given(twins):
    for side in ("reference", "optimized"):
        used = cache_class(twins, side)(tiny_models.model("llama").config)
        assert used.config == ThinKVConfig(budget=1024)
        assert used.thresholds is None


def test_generation_with_beams_is_beams_over_the_loop(twins, device):
    model, inputs, new = tiny_models.model("llama", F64, device), prompts(9, [0], device), 7
    used = cache_of(twins, "reference", model, budget=6, thresholds=Thresholds((0, 1), EDGES))
    generated = generate(model, inputs, new, num_beams=3, past_key_values=used)

    start = ThinKVLoop(model, used.config, used.thresholds)
    logits = start.feed(inputs["input_ids"][0].tolist(), [True] * 9)
    beams: list[tuple[float, list[int], ThinKVLoop, Any]] = [(0.0, [], start, logits)]
    parents = []
    for _ in range(new):
        ways = [
            (score + float(log), [*tokens, token], parent)
            for parent, (score, tokens, _, logits) in enumerate(beams)
            for token, log in enumerate(logits.log_softmax(0))
        ]
        best = sorted(ways, key=lambda way: way[0], reverse=True)[:3]
        parents.append([parent for *_, parent in best])
        grown = [(score, tokens, beams[parent][2].copy()) for score, tokens, parent in best]
        beams = [(score, tokens, loop, loop.feed(tokens[-1:], [True])) for score, tokens, loop in grown]
    assert generated[0].tolist() == beams[0][1]
    assert any(rows != [0, 1, 2] for rows in parents[1:]), "no beam changed its row, so nothing was reordered"
    assert len({tuple(loop.told) for _, _, loop, _ in beams}) > 1 or len(set(beams[0][2].told)) > 1


def test_a_cache_is_new_after_a_reset(twins, device):
    """Even after a forward pass that was interrupted between its layers, in the first step of a window."""
    model, inputs = tiny_models.model("qwen3", F64, device), prompts(5, [0, 3], device)
    used = cache_of(twins, "reference", model, budget=4, thresholds=Thresholds((0, 1), NORMED_EDGES), **NORMED)
    expected = generate(model, inputs, 6, past_key_values=used)
    twin = copy.deepcopy(used)
    one_row = {name: tensor[:1] for name, tensor in inputs.items()}
    for rows, some in ((2, inputs), (1, one_row)):                                # the same batch size, and another one
        used.reset()
        assert used.get_seq_length() == 0
        assert torch.equal(generate(model, some, 6, past_key_values=used), expected[:rows])
    used.reset()
    shorter = {name: tensor[:, 2:] for name, tensor in inputs.items()}
    fresh = cache_of(twins, "reference", model, budget=4, thresholds=Thresholds((0, 1), NORMED_EDGES), **NORMED)
    generate(model, shorter, 9, past_key_values=fresh)
    generate(model, shorter, 9, past_key_values=used)
    for one, other in zip(used.layers, fresh.layers, strict=True):
        assert torch.equal(one.state.cache.thoughts, other.state.cache.thoughts), "segments begin after the new prompt"
    used.reset()
    feed(model, used)
    hook = model.model.layers[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(InterruptedError))
    with pytest.raises(InterruptedError):
        feed(model, used, [5])
    hook.remove()
    used.reset()
    assert torch.equal(generate(model, inputs, 6, past_key_values=used), expected)
    twin.reset()
    assert torch.equal(generate(model, inputs, 6, past_key_values=twin), expected), "a copy must be independent"


def test_layers_with_a_sliding_window_stay_stock(twins, device):
    model = tiny_models.model(
        "qwen2", device=device, use_sliding_window=True, sliding_window=5, max_window_layers=1, num_hidden_layers=3
    )
    used = cache_of(twins, "reference", model, budget=8, thresholds=Thresholds((0,), EDGES))
    assert [layer.is_sliding for layer in used.layers] == [False, True, True]
    generate(model, prompts(9, [0, 4], device), 6, past_key_values=used)
    assert used.get_seq_length() == 14
    with pytest.raises(ValueError, match=r"\[0\] of 3, got \(0, 2\): layer 2 has no full attention"):
        cache_of(twins, "reference", model, thresholds=Thresholds((0, 2), EDGES))


# Quantization without eviction ---------------------------------------------------------------------------------------


def test_fp8_with_room_for_all_is_attention_to_rounded_tokens(twins, device, monkeypatch):
    """In every decode step, attention to the model's queries, keys and values is as close to exact attention over all
    tokens except padding as fp8 rounding allows (`fp8_bound`)."""
    calls: dict[Any, list[tuple[Tensor, ...]]] = {}
    attend = ThoughtLayer.attend

    def watch(layer: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
        output = attend(layer, query, key, value, *rest)
        calls.setdefault(layer, []).append((query, key, value, output.transpose(1, 2)))
        return output

    monkeypatch.setattr(ThoughtLayer, "attend", watch)
    model, inputs = tiny_models.model("llama", F64, device), prompts(7, [0, 3], device)
    for layer in model.model.layers:                            # small logits, so that the bound is meaningful
        layer.self_attn.q_proj.weight.data *= 0.125
    used = cache_of(
        twins, "reference", model, budget=40, formats={"R": "fp8", "E": "fp8", "T": "fp8"}, retention=(40,),
        thresholds=Thresholds((0, 1), (0.2, 1.5)),
    )
    generate(model, inputs, 10, past_key_values=used)
    assert len(calls) == 2
    share = 0.0
    for steps in calls.values():
        keys, values = (torch.cat([step[side] for step in steps], 2) for side in (1, 2))    # [B, Hkv, T, D]
        for number, (query, _, _, output) in enumerate(steps[1:]):
            for row, padding in enumerate((0, 3)):
                key, value = (tensor[row, :, padding:8 + number] for tensor in (keys, values))
                truth, bound = fp8_bound(query[row, :, 0], key, value, 16**-0.5)
                assert_within(output[row, :, 0], truth, bound, what=f"row {row}, decode step {number}")
                share = max(share, float(((output[row, :, 0] - truth).abs() / bound).max()))
    assert share > 0.01, "nothing was rounded, or the bound is too loose"


def fp8_bound(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Exact attention [Hq, D] of query [Hq, D] to key, value [Hkv, T, D], and a bound on the change by fp8 rounding.

    An element x becomes x' with |x - x'| <= e = max(|x| / 17, s / 1024), where s = amax / 448 of its chunk, which is at
    most that of all tokens of its head. An additional 2^-20 |x| covers the float32 arithmetic of the quantizer (x, s, x
    / s and the product are rounded once each, and 1 / 17 changes with x / s). So a logit changes by at most d_j = scale
    sum_d |q_d| e_jd, a weight by at most the factor exp(d_j + max d) (for its own logit and for the denominator), and
    the output, sum_j a_j v_j, by at most sum_j a_j (exp(d_j + max d) - 1) (|v_j| + e_j) + a_j e_j. The error of float64
    here is less than 2^-40 of the terms.
    """
    group = len(query) // len(key)

    def rounding(x: Tensor) -> Tensor:
        return torch.maximum(x.abs() / 17, x.abs().amax((1, 2), keepdim=True) / 448 / 1024) + 2.0**-20 * x.abs()

    key, value, key_error, value_error = (
        tensor.repeat_interleave(group, 0) for tensor in (key, value, rounding(key), rounding(value))
    )
    weight = (scale * (query[:, None] * key).sum(-1)).softmax(-1)[..., None]                # [Hq, T, 1]
    moves = scale * (query.abs()[:, None] * key_error).sum(-1, keepdim=True)
    factor = (moves + moves.amax(1, keepdim=True)).exp() - 1
    change = weight * (factor * (value.abs() + value_error) + value_error + 2.0**-40 * value.abs())
    return (weight * value).sum(1), change.sum(1)


# Bad input -----------------------------------------------------------------------------------------------------------


@pytest.mark.kind("bad_input")
@pytest.mark.parametrize("side", ["reference", "optimized"])
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"budget": 0}, ValueError, "budget must be at least 1"),
        ({"budget": 8.0}, TypeError, "budget must be an int"),
        ({"tau": 1}, ValueError, "tau must be at least 2 here, got 1"),
        ({"group": 1}, ValueError, "group must be at least 2 here, got 1"),
        ({"edges": EDGES}, TypeError, "edges is not an option here: thresholds="),
        ({"scale": 0.1}, TypeError, "scale is not an option"),
        ({"no_option": 1}, TypeError, "no_option"),
        ({"formats": {"R": "fp8"}}, ValueError, "formats must name R, E and T"),
        ({"attention_mask": [[1, 1]]}, TypeError, "attention_mask must be a torch.Tensor"),
        ({"thresholds": EDGES[0]}, TypeError, r"thresholds must be Thresholds\(layers, edges\) or None, got 0.51"),
        ({"thresholds": Thresholds((), EDGES)}, TypeError, r"thresholds.layers must be a tuple of layer numbers"),
        ({"thresholds": Thresholds((0.5,), EDGES)}, TypeError, r"thresholds.layers\[0\] must be an int"),
        ({"thresholds": Thresholds((0, -1), EDGES)}, ValueError, r"thresholds.layers\[1\] must be at least 0"),
        ({"thresholds": Thresholds((1, 1), EDGES)}, ValueError, "no layer twice"),
        ({"thresholds": Thresholds((0, 2), EDGES)}, ValueError, r"\[0, 1\] of 2, got \(0, 2\): layer 2 does not exist"),
        ({"thresholds": Thresholds((0,), EDGES[::-1])}, ValueError, "edges must ascend"),
    ],
)
def test_options(side, options, error, message):
    made = importlib.import_module(f"kvtwin.{side}.hf").ThinKVCache
    with pytest.raises(error, match=message):
        made(tiny_models.model("llama").config, **options)


@pytest.mark.kind("bad_input")
def test_more_than_one_token_after_the_prompt(twins):
    model = tiny_models.model("llama")
    used = cache_of(twins, "reference", model)
    with pytest.raises(NotImplementedError, match="3 tokens .* after the 3 .*leave prefill_chunk_size out"):
        generate(model, prompts(6, [0]), 2, past_key_values=used, prefill_chunk_size=3)
    used.reset()
    feed(model, used)
    with pytest.raises(NotImplementedError, match="a second turn needs a new cache"):
        feed(model, used, [5, 6])


@pytest.mark.kind("bad_input")
def test_more_tokens_than_there_is_room_for(twins):
    model = tiny_models.model("llama")
    with pytest.raises(ValueError, match="max_tokens=8 is too small for 9 tokens"):
        generate(model, prompts(6, [0]), 5, past_key_values=cache_of(twins, "reference", model, max_tokens=8))


@pytest.mark.kind("bad_input")
def test_rejects_a_model_without_our_attention(twins):
    model = tiny_models.model("llama")
    used = cache_class(twins, "reference")(model.config, **SMALL)
    with pytest.raises(RuntimeError, match=r'model\.set_attn_implementation\("kvtwin"\)'):
        generate(model, prompts(5, [0]), 3, past_key_values=used)


@pytest.mark.kind("bad_input")
def test_dtypes_without_kernels_are_refused():
    from kvtwin.optimized.hf import ThinKVCache

    model = tiny_models.model("llama", F64)
    model.set_attn_implementation("kvtwin")
    with pytest.raises(TypeError, match=r"dtype must be one of torch\.float32"):
        feed(model, ThinKVCache(model.config, **SMALL))
