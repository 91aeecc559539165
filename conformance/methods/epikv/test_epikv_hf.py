"""EpiKV inside transformers: tokens and cache contents against a plain float64 loop over its definition."""

from __future__ import annotations

import copy
import gc
import importlib
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs transformers: python -m pip install 'kvtwin[hf]'")

from kvtwin.conformance.methods.epikv.epikv_loops import BANDS, F64, HybridLoop, check, held
from kvtwin.conformance.methods.support import tiny_models
from kvtwin.conformance.methods.support.hf_cases import feed
from kvtwin.conformance.methods.support.tiny_models import generate, prompts
from kvtwin.reference.hf.cache_adapter_epikv import BandLayer, check_bands

pytestmark = [pytest.mark.kind("equivalence"), pytest.mark.whole]

SEGMENT_HS = {"policy": "segment_hs", "layers": BANDS, "tau": 2, "edges": (0.74, 0.79), "sparsity_threshold": 0.4}
BY_ENTROPY = {"policy": "segment_hs", "layers": BANDS, "tau": 2, "edges": (0.25, 0.3), "segments_by": "entropy"}
POLICIES = {"epikv": {"layers": BANDS}, "attn_x_hs": {"policy": "attn_x_hs", "layers": ((1,), ())},
            "segment_hs": SEGMENT_HS}
every_policy = pytest.mark.parametrize("options", POLICIES.values(), ids=POLICIES)


def cache_class(twins: Any, side: str) -> Any:
    """The EpiKVCache of a side. A missing state is reported as not provided."""
    assert getattr(twins, side).epikv.EpiKVState is not None
    return importlib.import_module(f"kvtwin.{side}.hf.epikv").EpiKVCache


@pytest.fixture
def llama(device):
    model = tiny_models.model("llama", F64, device)
    model.set_attn_implementation("kvtwin")
    return model


def hooks(model: Any) -> int:
    return sum(len(layer._forward_pre_hooks) + len(layer._forward_hooks) for layer in model.model.layers)


# Generation ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"policy": "epikv"}),
        ("qwen2", {"policy": "hs_variance", "count_prompt": False, "max_prompt": 9, "budget": 4}),
        ("qwen3", {"policy": "band_adaptive", "recent": 1}),
        ("llama", {"policy": "kv_val"}),
    ],
)
def test_generation_matches_the_decode_loop(family, options, twins, device):
    model = tiny_models.model(family, F64, device)
    model.set_attn_implementation("kvtwin")
    reads = not options["policy"].startswith("kv")
    bands = ((0, 1), (1,)) if options["policy"] == "band_adaptive" else BANDS
    made = {"budget": 12, "window": 5, **options, **({"layers": bands} if reads else {})}
    with cache_class(twins, "reference")(model, **made) as used:
        check(model, used, prompts(9, [0, 3], device), 12, bands)
        assert used.get_seq_length() == 9 + 11
        assert any(len(set(held(layer, 0))) < 19 for layer in used.layers), "nothing was evicted"
    assert hooks(model) == 0


@pytest.mark.parametrize("side", ["reference", "optimized"])
@pytest.mark.parametrize("options", [POLICIES["attn_x_hs"], SEGMENT_HS, BY_ENTROPY],
                         ids=("attn_x_hs", "segment_hs", "entropy"))
def test_generation_with_a_hybrid_is_the_loop(options, side, twins, device):
    """All layers contribute to the choice, and keep the same tokens."""
    small = {"num_attention_heads": 2, "num_key_value_heads": 1} if side == "optimized" and device.type == "cpu" else {}
    dtype = F64 if side == "reference" else torch.float32
    model = tiny_models.model("llama", dtype, device, **small)
    model.set_attn_implementation("kvtwin")
    with cache_class(twins, side)(model, budget=10, window=5, recent=2, **options) as used:
        check(model, used, prompts(4, [0, 2], device), 14, options["layers"], HybridLoop)
        state = used.layers[0].state
        made = None if state.thoughts is None else state.thoughts[state.positions >= 4].tolist()
        assert made is None or len(set(made)) > 1, "there is only one thought type"
    assert hooks(model) == 0


def test_generation_on_the_optimized_side_matches_the_decode_loop(twins, device):
    options = {"num_attention_heads": 2, "num_key_value_heads": 1} if device.type == "cpu" else {}
    model = tiny_models.model("llama", torch.float32, device, **options)
    model.set_attn_implementation("kvtwin")
    with cache_class(twins, "optimized")(model, budget=8, window=5, layers=BANDS) as used:
        check(model, used, prompts(5, [0, 2], device), 8)
        assert used.get_seq_length() == 5 + 7
        assert any(len(set(held(layer, 0))) < 12 for layer in used.layers), "nothing was evicted"


@every_policy
def test_generations_in_a_row_do_not_leak(options, llama, twins, device):
    """A plain generation, a second cache on the same model, closing the first one, and a reset affect no result."""
    inputs, made = prompts(7, [0, 2], device), {"budget": 10, "window": 4, **options}
    each = sum(map(len, made["layers"]))
    first = cache_class(twins, "reference")(llama, **made)
    expected = generate(llama, inputs, 8, past_key_values=first)
    plain = generate(llama, inputs, 8)
    assert not first._passes._hidden, "it recorded a forward pass on another cache"
    second = cache_class(twins, "reference")(llama, **made)
    assert hooks(llama) == 2 * each
    assert torch.equal(generate(llama, inputs, 8, past_key_values=second), expected)
    before = first.layers[0].state.positions.clone()
    first.close()
    first.close()
    assert torch.equal(first.layers[0].state.positions, before)
    assert hooks(llama) == each
    second.reset()
    assert second.get_seq_length() == 0
    one_row = {name: tensor[:1] for name, tensor in inputs.items()}
    assert torch.equal(generate(llama, one_row, 8, past_key_values=second), expected[:1])
    second.close()
    assert torch.equal(generate(llama, inputs, 8), plain)


def test_hooks_are_removed_with_the_cache(llama, twins, device):
    used = cache_class(twins, "reference")(llama, budget=10, layers=BANDS)
    generate(llama, prompts(5, [0], device), 3, past_key_values=used)
    gone, state = weakref.ref(used), weakref.ref(used.layers[0].state)
    assert hooks(llama) == 2
    del used
    gc.collect()
    assert gone() is None
    assert state() is None
    assert hooks(llama) == 0


def test_no_hidden_state_outlives_a_pass(llama, twins, device):
    """The scorer keeps only those of the last token: one vector per row and layer of the bands."""
    used = cache_class(twins, "reference")(llama, budget=30, layers=BANDS)
    feed(llama, used, range(1, 12))
    feed(llama, used, [5])
    assert not used._passes._hidden
    assert used._passes._prompt is None
    shapes = [tuple(value.shape) for value in vars(used._passes.scorer).values() if isinstance(value, Tensor)]
    assert [shape for shape in shapes if 32 in shape] == [(1, 2, 32)]
    used.close()


@every_policy
def test_an_interrupted_pass_needs_a_reset(options, llama, twins, device):
    inputs = prompts(5, [0, 3], device)
    used = cache_class(twins, "reference")(llama, budget=8, window=4, **options)
    expected = generate(llama, inputs, 6, past_key_values=used)
    used.reset()
    feed(llama, used)
    hook = llama.model.layers[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(InterruptedError))
    with pytest.raises(InterruptedError):
        feed(llama, used, [5])
    hook.remove()
    used.reset()
    assert used._passes.scorer.tokens_seen == 0
    assert not used._passes._attended
    assert torch.equal(generate(llama, inputs, 6, past_key_values=used), expected)
    used.close()


def test_beams_move_the_scores_too(llama, twins, device):
    """A reordered row has the scores of its source. A beam search that never evicts equals that of the stock cache."""
    inputs = prompts(6, [0], device)
    stock = generate(llama, inputs, 8, num_beams=3)
    used = cache_class(twins, "reference")(llama, budget=40, window=4, layers=BANDS)
    assert torch.equal(generate(llama, inputs, 8, num_beams=3, past_key_values=used), stock)
    scorer = used._passes.scorer
    before = {name: getattr(scorer, name).clone() for name in ("score", "positions", "_previous", "_values")}
    used.reorder_cache(torch.tensor([2, 0, 0], device=device))
    for name, tensor in before.items():
        assert torch.equal(getattr(scorer, name), tensor[[2, 0, 0]]), name
    used.close()


# Bad input -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["reference", "optimized"])
@pytest.mark.parametrize(
    ("error", "says", "options"),
    [
        (ValueError, "both bands have layer 1", {}),
        (ValueError, "must be below 2", {"layers": ((0,), (2,))}),
        (ValueError, "twice", {"layers": ((0, 0), (1,))}),
        (TypeError, "two tuples", {"layers": (0,)}),
        (TypeError, "tuple of layer numbers", {"layers": (0, 1)}),
        (TypeError, r"layers\[1\] must be \(\) for policy 'attn_x_hs'", {"layers": BANDS, "policy": "attn_x_hs"}),
        (TypeError, "tuple of layer numbers", {"layers": ((0,), ())}),
        (ValueError, "edges must be given", {"layers": BANDS, "policy": "segment_hs"}),
        (ValueError, "keep_prompt", {"layers": BANDS, "keep_prompt": False}),
        (ValueError, "layers must be None", {"layers": BANDS, "policy": "kv_key"}),
        (TypeError, "not an option", {"layers": BANDS, "hidden_size": 3}),
        (ValueError, "policy must be one of", {"policy": "attention"}),
        (ValueError, "budget must be at least 1", {"layers": BANDS, "budget": 0}),
    ],
)
@pytest.mark.kind("bad_input")
def test_a_cache_refuses(error, says, options, side, llama, twins):
    with pytest.raises(error, match=says):
        cache_class(twins, side)(llama, **{"budget": 8, **options})
    assert hooks(llama) == 0


@pytest.mark.kind("bad_input")
def test_rejects_a_config_as_model(llama, twins):
    with pytest.raises(TypeError, match="model must be the model itself"):
        cache_class(twins, "reference")(llama.config, budget=8)


@pytest.mark.kind("bad_input")
def test_what_a_forward_pass_may_not_bring(llama, twins, device):
    used = cache_class(twins, "reference")(llama, budget=8, layers=BANDS, count_prompt=True)
    with pytest.raises(ValueError, match=r"prompt \+ recent = 11 \+ 2, got 8"):
        feed(llama, used, range(1, 12))
    used.reset()
    feed(llama, used, [1, 2, 3])
    with pytest.raises(NotImplementedError, match="one token"):
        feed(llama, used, [4, 5])
    with pytest.raises(NotImplementedError, match="hooks in its model"):
        copy.deepcopy(used)
    used.close()


def test_bands_are_scaled_to_the_depth():
    assert check_bands(None, "epikv", 32) == ((10,), (21,))
    assert check_bands(None, "epikv", 8) == ((2,), (5,))
    assert check_bands([[1], [2]], "epikv", 8) == ((1,), (2,))
    assert check_bands(None, "band_adaptive", 32) == (tuple(range(7, 14)), tuple(range(18, 26)))


def test_layers_with_a_sliding_window_stay_stock(twins, device):
    model = tiny_models.model(
        "qwen2", device=device, use_sliding_window=True, sliding_window=5, max_window_layers=1, num_hidden_layers=3
    )
    model.set_attn_implementation("kvtwin")
    with cache_class(twins, "reference")(model, budget=12, layers=((0,), (2,))) as used:
        assert [isinstance(layer, BandLayer) for layer in used.layers] == [True, False, False]
        generate(model, prompts(9, [0, 4], device), 6, past_key_values=used)
        assert used.get_seq_length() == 14
