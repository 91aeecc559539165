"""Tiny random models of transformers, and helpers, for the tests of `kvtwin.*.hf`. Needs transformers.

Weights are drawn from a separate generator with a large spread, so that every parameter matters and greedy decoding
does not repeat itself.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import transformers
from torch import Tensor

from ....reference.hf.cache_adapter import ARGUMENT, NAMES, StateCache
from ...judge import checkers

VOCABULARY = 89

_FAMILIES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),        # biases on query, key and value
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),        # norms on query and key
    "granite": (transformers.GraniteConfig, transformers.GraniteForCausalLM),  # a scaling of its own
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),  # sliding windows
    "gemma2": (transformers.Gemma2Config, transformers.Gemma2ForCausalLM),     # softcapped logits
}
FAMILIES = ("llama", "qwen2", "qwen3")

_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_GPT2_SIZES = {"n_embd": 32, "n_layer": 2, "n_head": 4}
_LATENT = {
    **_SIZES, "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "first_k_dense_replace": 2,
}
# Architectures whose modules, or attention, differ from Llama's. Their configs have names of their own for sizes.
_OTHERS: dict[str, tuple[str, str, Any]] = {
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", _SIZES),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", _GPT2_SIZES),
    "gptj": ("GPTJConfig", "GPTJForCausalLM", {**_GPT2_SIZES, "rotary_dim": 4}),
    "gpt_neox_japanese": ("GPTNeoXJapaneseConfig", "GPTNeoXJapaneseForCausalLM", _SIZES),
    "xglm": ("XGLMConfig", "XGLMForCausalLM", {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48}),
    "bloom": ("BloomConfig", "BloomForCausalLM", {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "falcon": ("FalconConfig", "FalconForCausalLM", _SIZES),
    "mpt": ("MptConfig", "MptForCausalLM", {"d_model": 32, "n_layers": 2, "n_heads": 4}),
    "doge": ("DogeConfig", "DogeForCausalLM", {**_SIZES, "num_key_value_heads": 2}),
    "diffllama": ("DiffLlamaConfig", "DiffLlamaForCausalLM", {**_SIZES, "num_key_value_heads": 2}),
    "deepseek_v2": ("DeepseekV2Config", "DeepseekV2ForCausalLM", _LATENT),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", _LATENT),
}

#: GPT-J has attention of its own before transformers 5.24.
GPTJ = ["gptj"] if NAMES[0] != ARGUMENT else []


def model(
    family: str, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", **options: object
) -> transformers.PreTrainedModel:
    """Two layers, 4 query and 2 KV heads of 16; generation has no end token. Stock sdpa attention."""
    config_class, model_class = _FAMILIES[family]
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
        "eos_token_id": None, "bos_token_id": None, "pad_token_id": 0, "attn_implementation": "sdpa",
    }
    return filled(model_class, config_class(**{**sizes, **options})).to(device, dtype)


def other(
    family: str, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> transformers.PreTrainedModel:
    """A model of another architecture: two layers and 4 heads, with its default attention."""
    config, model_class, sizes = _OTHERS[family]
    tokens = {"vocab_size": VOCABULARY, "eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
    made = getattr(transformers, config)(**tokens, **sizes)
    return filled(getattr(transformers, model_class), made).to(device, dtype)


def filled(model_class: Any, config: Any) -> Any:
    """A model with weights of a large spread, whose steps `generate` does not compile on a GPU by itself."""
    with torch.random.fork_rng(devices=[]):
        made = model_class(config).eval()
    made.generation_config.disable_compile = True
    generator = torch.Generator().manual_seed(20)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if "norm" in name:
                weight.uniform_(0.6, 1.4, generator=generator)
            else:
                weight.normal_(0, 0.4, generator=generator)
    return made


def prompts(length: int, padding: list[int], device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """input_ids and attention_mask [B, length]: random tokens, row b with padding[b] of padding on its left."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(1, VOCABULARY, (len(padding), length), generator=generator)
    mask = torch.arange(length) >= torch.tensor(padding)[:, None]
    return {"input_ids": ids.where(mask, 0).to(device), "attention_mask": mask.long().to(device)}


def generate(model: Any, inputs: dict[str, Tensor], new: int, **options: Any) -> Tensor:
    """Decode greedily; returns the generated tokens, [B, new]."""
    options = {ARGUMENT if name in NAMES else name: value for name, value in {"do_sample": False, **options}.items()}
    return model.generate(**inputs, max_new_tokens=new, **options)[:, inputs["input_ids"].shape[1]:]


def cache_class(twins: Any, side: str, method: str = "longflow") -> type[StateCache]:
    """A method's cache class on a side. A third-party State is wrapped in our cache adapter."""
    pair = checkers.pair(method)
    assert pair.config is not None
    assert pair.state is not None
    name = f"{pair.state.__name__.removesuffix('State')}Cache"
    module = checkers.module(getattr(twins, side), pair)
    state = getattr(module, pair.state.__name__)
    ours = state.__module__.startswith(f"kvtwin.{side}.")
    found: type[StateCache] = StateCache
    if ours or not pair.takes_blocks:
        found = getattr(importlib.import_module(f"kvtwin.{side}.hf"), name)
    if ours:
        return found
    parts = {"Config": pair.config, "State": state}
    if hasattr(found, "Cascade"):
        parts["Cascade"] = getattr(module, found.Cascade.__name__)
    return type(name, (found,), parts)
