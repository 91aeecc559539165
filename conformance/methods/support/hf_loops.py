"""A float64 decoder independent of transformers, for the tests of `kvtwin.*.hf`: its layers are loops over a cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...judge import checkers

F64 = torch.float64


class Loop:
    """A decoder of one row in float64. It reads the model's weights; transformers computes nothing here.

    `attend` implements the cache; `alive` returns the cached tokens by their index in the row, padding included.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.seen = 0                                                               # tokens so far, without padding

    def attend(self, number: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The new tokens' attention in a layer: query [Q, Hq, D]; key, value [Q, Hkv, D] -> [Q, Hq, D]."""
        raise NotImplementedError

    def alive(self) -> list[list[list[int]]]:
        """[layer][KV head] -> indices, ascending."""
        raise NotImplementedError

    def feed(self, ids: list[int], valid: list[bool]) -> Tensor | None:
        """The logits [V] after these tokens. `valid` is False for padding; None if all tokens are padding."""
        ids = [token for token, is_valid in zip(ids, valid, strict=True) if is_valid]
        return self.forward(ids) if ids else None

    @torch.no_grad()
    def forward(self, ids: list[int]) -> Tensor:
        model = self.model.model
        x = model.embed_tokens.weight.to("cpu", F64)[ids]                           # [Q, C]
        places = torch.arange(self.seen, self.seen + len(ids))
        for number, layer in enumerate(model.layers):
            attention, normed = layer.self_attn, self.norm(x, layer.input_layernorm)
            query = self.rotate(self.heads(normed, attention, "q"), places)         # [Q, Hq, D]
            key = self.rotate(self.heads(normed, attention, "k"), places)           # [Q, Hkv, D]
            output = self.attend(number, query, key, self.heads(normed, attention, "v"))
            x = x + self.linear(output.flatten(1), attention.o_proj)
            normed = self.norm(x, layer.post_attention_layernorm)
            gate = torch.nn.functional.silu(self.linear(normed, layer.mlp.gate_proj))
            x = x + self.linear(gate * self.linear(normed, layer.mlp.up_proj), layer.mlp.down_proj)
        self.seen += len(ids)
        return self.linear(self.norm(x[-1], model.norm), self.model.lm_head)

    def linear(self, x: Tensor, module: Any) -> Tensor:
        y = x @ module.weight.to("cpu", F64).T
        return y if module.bias is None else y + module.bias.to("cpu", F64)

    def norm(self, x: Tensor, module: Any) -> Tensor:
        square = (x * x).mean(-1, keepdim=True) + self.model.config.rms_norm_eps
        return x / square.sqrt() * module.weight.to("cpu", F64)

    def heads(self, x: Tensor, attention: Any, which: str) -> Tensor:
        """[Q, C] -> [Q, H, D]"""
        y = self.linear(x, getattr(attention, f"{which}_proj")).unflatten(-1, (-1, attention.head_dim))
        norm = getattr(attention, f"{which}_norm", None)
        return y if norm is None else self.norm(y, norm)

    def rotate(self, x: Tensor, places: Tensor) -> Tensor:
        """Rotary embedding of [Q, H, D]: rotates the pair (d, d + D/2) by place * theta ** (-2d / D)."""
        half = x.shape[-1] // 2
        theta = self.model.config.rope_parameters["rope_theta"]
        angle = places[:, None, None] * theta ** (-torch.arange(half, dtype=F64) / half)
        one, other = x[..., :half], x[..., half:]
        return torch.cat([one * angle.cos() - other * angle.sin(), other * angle.cos() + one * angle.sin()], -1)


def sizes(model: Any) -> dict[str, Any]:
    """What a State in float64 of one row of a model is made with, apart from its config."""
    return {
        "batch": 1, "query_heads": model.config.num_attention_heads,
        "key_value_heads": model.config.num_key_value_heads, "head_dim": model.model.layers[0].self_attn.head_dim,
        "dtype": F64, "device": "cpu",
    }


class PromptLoop(Loop):
    """A loop with a State per layer that takes the prompt in one piece, and then single tokens."""

    def __init__(self, model: Any, states: list[Any]) -> None:
        super().__init__(model)
        self.states = states

    def attend(self, number: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        tokens = [tensor.transpose(0, 1)[None] for tensor in (query, key, value)]   # [1, H, Q, D]
        output: Tensor
        if self.seen == 0:
            output = self.states[number].prefill(*tokens)[0].transpose(0, 1)
        else:
            output = self.states[number].step(*(tensor[:, :, 0] for tensor in tokens))
        return output


class StateLoop(Loop):
    """A loop with a reference State per layer, fed block by block. Padding is NaN."""

    def __init__(self, model: Any, method: str, config: Any) -> None:
        super().__init__(model)
        pair = checkers.pair(method)
        assert pair.state is not None
        self.states = [pair.state(config, **sizes(model)) for _ in model.model.layers]
        self._rotates = getattr(config, "inv_freq", None) is not None
        self._valid = torch.empty(0, dtype=torch.bool)

    def feed(self, ids: list[int], valid: list[bool]) -> Tensor | None:
        self._valid = torch.tensor(valid)
        if any(valid):
            return super().feed(ids, valid)
        for number, state in enumerate(self.states):
            _, query_heads, heads, _, head_dim = state.sizes
            none = torch.empty(0, heads, head_dim, dtype=F64)
            self.attend(number, torch.empty(0, query_heads, head_dim, dtype=F64), none, none)
        return None

    def attend(self, number: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        def with_padding(tensor: Tensor) -> Tensor:
            whole = torch.full((len(self._valid), *tensor.shape[1:]), torch.nan, dtype=F64)
            whole[self._valid] = tensor
            return whole.transpose(0, 1)[None]                                      # [1, H, Q, D]

        output = self.states[number].append_block(*map(with_padding, (query, key, value)), self._valid[None])
        return output[0].transpose(0, 1)[self._valid]

    def rotate(self, x: Tensor, places: Tensor) -> Tensor:
        return x if self._rotates else super().rotate(x, places)                    # the states do

    def alive(self) -> list[list[list[int]]]:
        return [[cached(head) for head in state.positions[0].tolist()] for state in self.states]


def cached(positions: list[int]) -> list[int]:
    return sorted(position for position in positions if position >= 0)
