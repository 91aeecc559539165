"""Ways to decode with the model families of transformers: rows of a prefix, assisted decoding, attention weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: python -m pip install 'kvtwin[hf]'")

import transformers
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as MODELS

from kvtwin.conformance.methods.every_method.test_caches_captured import CACHES, FIRST, check, make
from kvtwin.conformance.methods.every_method.test_caches_rows import SIDES, fed
from kvtwin.conformance.methods.support.hf_cases import feed
from kvtwin.conformance.methods.support.tiny_models import VOCABULARY, filled, generate, prompts

pytestmark = [pytest.mark.kind("equivalence"), pytest.mark.whole,
    # Of GPT-BigCode's module in transformers 5.17.
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"),
]

#: By all names that configs have for them.
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "n_embd": 64, "n_layer": 2,
    "n_head": 4, "ffn_dim": 48, "word_embed_proj_dim": 64, "num_experts": 4, "num_local_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "eos_token_id": None, "bos_token_id": None,
    "pad_token_id": 0,
}
#: The first layer has a sliding window, whose cache is transformers' own, and the second has full attention.
WINDOWS = ("cohere2", "gemma3_text", "olmo3")
#: The same, with logits that are changed in both layers.
CAPPED: dict[str, dict[str, Any]] = {
    "gemma2": {"attn_logit_softcapping": 1.5, "query_pre_attn_scalar": 1, "tie_word_embeddings": False},
    "gpt_oss": {},
}
#: Caches that take these, by name, of a block method and of LongFlow.
OF_CAPPED: dict[str, dict[str, Any]] = {"H2OCache": {"block_size": 4}, "LongFlowCache": {"window": 3}}
#: The others that do not.
REFUSING = [name for name in FIRST if name in ("thinkv", "synckv", "epikv", "kivi", "pm-kvq", "quest", "cake")]
FAMILIES = [name for name in (
    "apertus", "arcee", "aria_text", "biogpt", "bitnet", "cohere", "ctrl", "ernie4_5", "flex_olmo", "gemma", "gemma2",
    "glm", "glm4", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss", "granite", "granitemoe", "helium", "hunyuan_v1_dense",
    "lfm2", "llama", "mellum", "mistral", "mixtral", "nemotron", "olmo", "olmo2", "olmoe", "opt", "persimmon", "phi",
    "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2", *WINDOWS,
) if name in MODELS]
every_family = pytest.mark.parametrize(("family", "side"), [
    pytest.param(family, side, marks=pytest.mark.slow_on_cpu)
    if side == "optimized" and family not in ("llama", "gpt2") else (family, side)
    for family in FAMILIES for side in SIDES
])


def made(family: str, device: torch.device, first: str = "sliding_attention") -> Any:
    layers: dict[str, Any] = {"sliding_window": None}
    if family in (*WINDOWS, *CAPPED):
        layers = {"sliding_window": 4, "layer_types": [first, "full_attention"]}
    config = type(AutoConfig.for_model(family))(**SIZES, **layers, **CAPPED.get(family, {}))
    model = filled(getattr(transformers, MODELS[family]), config).to(device)
    model.set_attn_implementation("kvtwin")
    return model


def cache(side: str, model: Any, budget: int = 6, name: str = "H2OCache") -> Any:
    return getattr(SIDES[side], name)(model.config, budget=budget, **OF_CAPPED[name])


@every_family
def test_beams_of_one_prefix(family, side, device):
    model, inputs, found = made(family, device), prompts(9, [0], device), []
    prefix = {key: tensor[:, :-1] for key, tensor in inputs.items()}
    for rows in ((0,), (0, 0, 0)):
        used = fed(cache(side, model), model, prefix, *rows)
        used.batch_repeat_interleave(3 // len(rows))
        found.append(generate(model, inputs, 4, past_key_values=used, num_beams=3).tolist())
    assert found[0] == found[1]


@every_family
def test_assisted_decoding(family, side, device):
    model, inputs = made(family, device), prompts(9, [0], device)
    expected = generate(model, inputs, 8, past_key_values=cache(side, model)).tolist()
    got = generate(model, inputs, 8, past_key_values=cache(side, model), prompt_lookup_num_tokens=3).tolist()
    assert got == expected


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("family", CAPPED)
@pytest.mark.parametrize("name", OF_CAPPED)
def test_changed_logits_are_those_of_eager_attention(name, family, side, device):
    """With a budget of all tokens, padding, and blocks; also with a cache of transformers. Without the change, the
    model's tokens are others."""
    model, inputs = made(family, device), prompts(13, [0, 5], device)
    used = cache(side, model, 21, name), transformers.DynamicCache(config=model.config)
    found = [generate(model, inputs, 8, past_key_values=one).tolist() for one in used]
    model.set_attn_implementation("eager")
    expected = generate(model, inputs, 8).tolist()
    assert found == [expected, expected]
    for layer in model.model.layers:
        if family == "gpt_oss":
            layer.self_attn.sinks.data.fill_(-torch.inf)
        layer.self_attn.attn_logit_softcapping = None
    assert generate(model, inputs, 8).tolist() != expected


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("family", CAPPED)
@pytest.mark.parametrize("name", OF_CAPPED)
def test_captured_steps_with_changed_logits(name, family, device):
    name = next(found for found in FIRST if CACHES[found][0] == name.removesuffix("Cache"))
    check(name, made(family, device, "full_attention"), prompts(9, [0, 2], device), 14, 6)


@pytest.mark.parametrize("name", OF_CAPPED)
def test_sinks_are_those_that_the_model_has_now(name, device):
    """A cache keeps no copy: weights change in place, or others take their place."""
    model, inputs = made("gpt_oss", device), prompts(13, [0, 5], device)
    used, found = cache("reference", model, 21, name), []
    for layer in (None, model.model.layers[1].self_attn):
        if layer is not None:
            layer.sinks = torch.nn.Parameter(layer.sinks + 30)
        fresh = cache("reference", model, 21, name)
        found.append([generate(model, inputs, 8, past_key_values=one).tolist() for one in (used, fresh)])
        used.reset()
    assert found[0][0] == found[0][1] != found[1][0] == found[1][1]


@pytest.mark.kind("bad_input")
@pytest.mark.parametrize(("family", "name"), [(family, name) for family in CAPPED for name in REFUSING])
def test_changed_logits_are_refused_by_name(family, name, device):
    model = made(family, device, "full_attention")
    with pytest.raises(NotImplementedError, match=f"passes {'softcap' if family == 'gemma2' else 's_aux'}.*State"):
        feed(model, make(name, model, SIDES["reference"]))


@pytest.mark.kind("bad_input")
@every_family
def test_attention_weights(family, side, device):
    model = made(family, device)
    with pytest.raises(NotImplementedError, match="output_attentions=True is not supported"):
        feed(model, cache(side, model), output_attentions=True)
