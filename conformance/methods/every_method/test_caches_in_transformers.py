"""What else transformers does with caches and with the attention "kvtwin": right tokens, or an error that is true."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: python -m pip install 'kvtwin[hf]'")

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import StaticCache, pipeline
from transformers.masking_utils import causal_mask_function

from kvtwin.conformance.methods.every_method.test_caches_captured import FIRST
from kvtwin.conformance.methods.every_method.test_caches_captured import make as make_cache
from kvtwin.conformance.methods.every_method.test_caches_rows import SIDES
from kvtwin.conformance.methods.support import tiny_models
from kvtwin.conformance.methods.support.hf_cases import feed
from kvtwin.conformance.methods.support.tiny_models import VOCABULARY, generate, prompts
from kvtwin.reference.hf import EpiKVCache, H2OCache, LongFlowCache, ThinKVCache, masks

pytestmark = [pytest.mark.kind("bad_input"), pytest.mark.whole]


@pytest.fixture(scope="module")
def model() -> Any:
    """A shared model, which no test modifies."""
    model = tiny_models.model("llama")
    model.set_attn_implementation("kvtwin")
    return model


NAME_BEFORE_CACHE = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=1, head_dim=16
)
model, tokens = LlamaForCausalLM(config).eval(), torch.ones(1, 4, dtype=torch.long)
import {}

model.set_attn_implementation("kvtwin")
with torch.no_grad():
    model(tokens)
    from kvtwin.reference.hf import H2OCache

    cache = H2OCache(config, budget=2)
    model(tokens, past_key_values=cache)
assert cache.layers[1].state.occupied.sum() == 2
"""


@pytest.mark.parametrize("package", ["kvtwin", "kvtwin.optimized.baselines.h2o"])
def test_the_attention_has_its_name_before_a_cache_is_imported(package: str) -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", NAME_BEFORE_CACHE.format(package)], check=True)


# Models that cannot use the caches -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_latent_attention_is_refused(family: str) -> None:
    """The model's attention is kvtwin's already: to activate it again would not help."""
    model = tiny_models.other(family)
    model.set_attn_implementation("kvtwin")
    with pytest.raises(NotImplementedError, match="although that is 'kvtwin'.*latent attention") as error:
        feed(model, LongFlowCache(model.config, budget=8))
    assert "set_attn_implementation" not in str(error.value)


@pytest.mark.parametrize("family", ["xglm", "gpt_neox_japanese", *tiny_models.GPTJ, "bloom", "falcon", "mpt"])
def test_attention_that_does_not_switch_is_refused(family: str) -> None:
    model = tiny_models.other(family)
    model.set_attn_implementation("kvtwin")
    says = "although that is 'kvtwin'|logs that the model does not support it, the model cannot use kvtwin's caches"
    with pytest.raises(RuntimeError, match=says):
        feed(model, LongFlowCache(model.config, budget=8))


def test_a_model_that_reads_the_mask_is_refused() -> None:
    """Doge adds values of its own to the mask before it calls the attention function."""
    model = tiny_models.other("doge")
    model.set_attn_implementation("kvtwin")
    with pytest.raises(NotImplementedError, match=r"reads the attention mask itself \(dtype\)"):
        feed(model, LongFlowCache(model.config, budget=8))


def test_differential_attention_is_refused() -> None:
    """DiffLlama attends to each key twice. No layer shares the keys of another."""
    model = tiny_models.other("diffllama")
    model.set_attn_implementation("kvtwin")
    with pytest.raises(NotImplementedError, match="DiffLlamaAttention attends several times.*differential") as error:
        feed(model, LongFlowCache(model.config, budget=8))
    assert "sharing" not in str(error.value)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(("name", "family", "implementation"), [
    *((name, "llama", "kvtwin") for name in FIRST), ("longflow", "llama", "eager"), ("longflow", "gpt2", "kvtwin"),
])
def test_attention_weights_are_refused(name: str, family: str, implementation: str, side: str) -> None:
    """Also where the model does not tell its attention function, and before any token is counted."""
    model = tiny_models.model(family) if family == "llama" else tiny_models.other(family)
    model.set_attn_implementation(implementation)
    cache = make_cache(name, model, SIDES[side])
    for _ in range(2):
        with pytest.raises(NotImplementedError, match=r"output_attentions=True is not .*evicted.*eager"):
            feed(model, cache, output_attentions=True)
    assert cache.get_seq_length() == 0


# Stock caches --------------------------------------------------------------------------------------------------------


@pytest.mark.kind("equivalence")
@pytest.mark.parametrize(("padding", "new"), [([0, 3], 5), ([0, 0], 5), ([0, 3], 1), ([0, 0], 1)])
def test_static_caches_work_with_our_attention(padding: list[int], new: int) -> None:
    """A model of its own: generate makes a static cache at least as long as the model's last one."""
    model, inputs = tiny_models.model("llama"), prompts(6, padding)
    expected = generate(model, inputs, new)
    model.set_attn_implementation("kvtwin")
    options = {"cache_implementation": "static", "disable_compile": True}
    assert torch.equal(generate(model, inputs, new, **options), expected)
    static = StaticCache(config=model.config, max_cache_len=20)
    assert torch.equal(generate(model, inputs, new, past_key_values=static, disable_compile=True), expected)


@pytest.mark.kind("equivalence")
@pytest.mark.parametrize("before", [0, torch.tensor(3), torch.tensor(6)])
def test_the_mask_of_a_static_cache_is_a_tensor(before: int | torch.Tensor) -> None:
    """generate compiles the steps of such a cache, so masks must have the same shape at each step."""
    padding = torch.tensor([[0, 1, 1, 1, 1, 1, 0, 0, 0]]).bool()
    arguments = {
        "batch_size": 1, "q_length": 3, "kv_length": 9, "q_offset": before, "mask_function": causal_mask_function,
        "attention_mask": padding,
    }
    mask = masks.make_mask(**arguments)
    assert isinstance(mask, torch.Tensor)
    assert torch.equal(mask, masks.sdpa_mask(**arguments))
    # As many slots as tokens, counted by the host: a cache that grows.
    assert isinstance(masks.make_mask(**{**arguments, "q_offset": 6}), masks.MaskSpec)


# Tokens that are passed again ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [LongFlowCache, H2OCache])
@pytest.mark.parametrize("padding", [[0], [0, 3]])
def test_generation_without_use_cache_is_refused(make: Any, padding: list[int], model: Any) -> None:
    """generate passes the whole sequence again at each step."""
    with pytest.raises(ValueError, match=r"all tokens again with use_cache=False: leave it out") as error:
        generate(model, prompts(6, padding), 3, past_key_values=make(model.config, budget=40), use_cache=False)
    assert ("before 5.21" in str(error.value)) == masks.STARTS_AT_0


def test_positions_of_an_image_may_start_at_0_on_one_axis() -> None:
    spec = lambda: masks.MaskSpec(mask_function=None, attention_mask=None)  # noqa: E731
    for width, fails in ((3, False), (0, True)):
        positions = torch.tensor([[[width, width]], [[0, 1]]])                          # [axes, B, Q]
        if not fails:
            masks.refuse_restart(spec(), positions, None, 4)
            continue
        with pytest.raises(ValueError, match="start at 0"):
            masks.refuse_restart(spec(), positions, None, 4)


# Other ways to decode ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    words = {f"w{number}": number for number in range(VOCABULARY)}
    made = Tokenizer(models.WordLevel(words, unk_token="w1"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="w0", padding_side="left")


@pytest.mark.kind("equivalence")
@pytest.mark.parametrize(
    "make",
    [
        lambda model: LongFlowCache(model.config, budget=5),
        lambda model: H2OCache(model.config, budget=5),
        lambda model: ThinKVCache(model.config, budget=5, max_tokens=40, tau=4, block=4, group=2),
        lambda model: EpiKVCache(model, budget=8, layers=((0,), (1,)), window=4, recent=2),
    ],
    ids=["LongFlowCache", "H2OCache", "ThinKVCache", "EpiKVCache"],
)
def test_a_pipeline_generates_the_tokens_of_generate(make: Any, model: Any, tokenizer: Any) -> None:
    """Two texts of different lengths in one batch: the pipeline pads them."""
    texts = ["w5 w9 w2 w7 w31", "w8 w3"]
    inputs = dict(tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False))
    expected = generate(model, inputs, 12, past_key_values=make(model)).tolist()
    run = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    got = run(
        texts, past_key_values=make(model), max_new_tokens=12, do_sample=False, batch_size=2, return_tensors=True
    )
    assert [row[0]["generated_token_ids"][-12:] for row in got] == expected
