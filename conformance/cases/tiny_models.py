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

from ...reference.hf.plug import StateCache
from ..judge import checkers

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
    with torch.random.fork_rng(devices=[]):
        made = model_class(config_class(**{**sizes, **options})).eval()
    generator = torch.Generator().manual_seed(20)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if "norm" in name:
                weight.uniform_(0.6, 1.4, generator=generator)
            else:
                weight.normal_(0, 0.4, generator=generator)
    return made.to(device, dtype)


def prompts(length: int, padding: list[int], device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """input_ids and attention_mask [B, length]: random tokens, row b with padding[b] of padding on its left."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(1, VOCABULARY, (len(padding), length), generator=generator)
    mask = torch.arange(length) >= torch.tensor(padding)[:, None]
    return {"input_ids": ids.where(mask, 0).to(device), "attention_mask": mask.long().to(device)}


def generate(model: Any, inputs: dict[str, Tensor], new: int, **options: Any) -> Tensor:
    """Decode greedily; returns the generated tokens, [B, new]."""
    options = {"do_sample": False, **options}
    return model.generate(**inputs, max_new_tokens=new, **options)[:, inputs["input_ids"].shape[1]:]


def cache_class(twins: Any, side: str, method: str = "longflow") -> type[StateCache]:
    """A method's cache class on a side. A third-party State is wrapped in our cache adapter."""
    pair = checkers.pair(method)
    assert pair.config is not None
    assert pair.state is not None
    name = f"{pair.state.__name__.removesuffix('State')}Cache"
    state = getattr(checkers.module(getattr(twins, side), pair), pair.state.__name__)
    if state.__module__.startswith(f"kvtwin.{side}."):
        found: type[StateCache] = getattr(importlib.import_module(f"kvtwin.{side}.hf"), name)
        return found
    return type(name, (StateCache,), {"Config": pair.config, "State": state})
