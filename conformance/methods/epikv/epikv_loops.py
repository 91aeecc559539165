"""The tokens that EpiKV's definition keeps while a model generates, from plain loops in float64, and a check of caches
against these loops."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kvtwin.conformance.methods.support.hf_cases import check_against_loops
from kvtwin.conformance.methods.support.hf_loops import Loop
from kvtwin.reference.epikv import hidden_change, kv_variance, rolling_mean, rolling_zscore, score, select

F64 = torch.float64
BANDS = ((0,), (1,))                                    # two layers, so that the hook of the last layer is used too


class EpiKVLoop(Loop):
    """A row without its padding. It stores all keys, values and hidden states so far, and attends to the tokens that
    the definition keeps. Before each token, `select` chooses them from the whole sequence; there is no state."""

    def __init__(self, model: Any, config: Any, bands: Any, padding: int) -> None:
        super().__init__(model)
        self.config, self.bands, self.padding = config, bands, padding
        self.keys: list[list[Tensor]] = [[] for _ in model.model.layers]
        self.values: list[list[Tensor]] = [[] for _ in model.model.layers]
        self.outputs: list[list[Tensor]] = [[] for _ in model.model.layers]
        self.kept: list[list[int]] = [[] for _ in model.model.layers]
        self.prompt = 0

    def attend(self, number: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.keys[number].append(key)
        self.values[number].append(value)
        keys, values = torch.cat(self.keys[number]), torch.cat(self.values[number])
        total, count = len(keys), len(key)
        if self.prompt == 0:
            self.prompt = count
        group = query.shape[1] // key.shape[1]
        outputs = []
        for place in range(total - count, total):
            seen = list(range(place)) if total == count else self.kept[number]
            held = [*seen, place]
            logit = torch.einsum(
                "hd,nhd->hn", query[place - total + count], keys[held].repeat_interleave(group, 1)
            ) * query.shape[-1] ** -0.5
            outputs.append(torch.einsum("hn,nhd->hd", logit.softmax(-1), values[held].repeat_interleave(group, 1)))
        return torch.stack(outputs)

    def norm(self, x: Tensor, module: Any) -> Tensor:
        """Also records hidden states: the output of layer l is the input of the norm that follows it."""
        layers = self.model.model.layers
        for number in range(len(layers)):
            after = layers[number + 1].input_layernorm if number + 1 < len(layers) else self.model.model.norm
            if module is after:
                self.outputs[number].append(x.reshape(-1, x.shape[-1]))
        return super().norm(x, module)

    @torch.no_grad()
    def forward(self, ids: list[int]) -> Tensor:
        logits = super().forward(ids)
        # The final norm gets only the last token, so the last layer's states of the other prompt tokens are missing
        # (WholeLoop computes them).
        self.decide()
        return logits

    def decide(self) -> None:
        """Choose the tokens that each layer keeps when the next token is added."""
        config, total = self.config, self.seen
        scores = self.scores() if total > 1 else torch.zeros(1, total, dtype=F64)
        for number in range(len(self.keys)):
            mine = scores[number] if scores.dim() == 2 and len(scores) > 1 else scores[0]
            budget = config.budget + (0 if config.count_prompt else self.prompt)
            # Leave space for the next token, which will be the newest.
            kept = select(
                torch.cat((mine, torch.zeros(1, dtype=F64)))[None], budget, prompt=self.prompt,
                recent=min(config.newest, total + 1 - self.prompt),
            )
            self.kept[number] = [token for token in kept[0].tolist() if token < total]

    def scores(self) -> Tensor:
        config = self.config
        if not config.reads_hidden:
            sides = self.keys if config.policy == "kv_key" else self.values
            return torch.stack([
                rolling_mean(kv_variance(torch.cat(side).transpose(0, 1)[None]), config.window)[0] for side in sides
            ])
        hidden = [torch.stack([torch.cat(self.outputs[n]) for n in band]) for band in self.bands]
        changes = [hidden_change(h[:, 1:], h[:, :-1])[None] for h in hidden]
        found = score(*changes, policy=config.policy, window=config.window)
        return torch.cat((torch.zeros(1, 1, dtype=F64), found), 1)

    def held_by_layer(self) -> list[list[int]]:
        """The tokens of each layer before the next token is added, without the one that it replaces."""
        return [[token + self.padding for token in kept] for kept in self.kept]


class WholeLoop(EpiKVLoop):
    """The same, with the last layer's hidden states of all tokens. `Loop.forward` applies the norm to the last token
    only."""

    @torch.no_grad()
    def forward(self, ids: list[int]) -> Tensor:
        if len(ids) == 1:
            return super().forward(ids)
        model = self.model.model
        last = len(model.layers) - 1
        for end in range(1, len(ids)):                                             # states of the prompt tokens
            alone = Loop.__new__(WholePrefix)
            Loop.__init__(alone, self.model)
            self.outputs[last].append(alone.last_state(ids[:end]))
        return super().forward(ids)


class HybridLoop(WholeLoop):
    """The hybrids, by their definition: lists of the attention that tokens have received, or of their segments' thought
    types."""

    def attend(self, number: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = super().attend(number, query, key, value)
        if number == 0:
            self.gave: list[dict[int, Tensor]] = []                                    # by layer, token: [Hq]
        if len(key) == 1:
            keys, place = torch.cat(self.keys[number]), len(torch.cat(self.keys[number])) - 1
            held = [*self.kept[number], place]
            group = query.shape[1] // key.shape[1]
            logit = torch.einsum("hd,nhd->hn", query[0], keys[held].repeat_interleave(group, 1))
            weight = (logit * query.shape[-1] ** -0.5).softmax(-1)
            self.gave.append(dict(zip(held, weight.T, strict=True)))
        self.group = query.shape[1] // key.shape[1]
        return output

    def sparsity(self, gave: dict[int, Tensor]) -> float:
        shares = []
        for head in torch.stack(list(gave.values()), 1).split(self.group):             # [G, n] of a KV head
            pooled = head.amax(0)
            shares.append(float((pooled < self.config.sparsity_threshold * pooled.max()).double().mean()))
        return sum(shares) / len(shares)

    def entropy(self, gave: dict[int, Tensor]) -> float:
        each = [-sum(weight * math.log(weight) for weight in head if weight) for head in zip(*(
            weights.tolist() for weights in gave.values()
        ), strict=True)]
        return sum(each) / len(each) / math.log(len(gave)) if len(gave) > 1 else 0.0

    def decide(self) -> None:
        config, total = self.config, self.seen
        if not self.gave:                                                              # the prompt
            self.order = [(2, 0.0)] * total                                            # (thought, received attention)
            self.mine, self.steps, held = 2, 0, list(range(total))
        else:
            held = [*self.kept[0], total - 1]
            received = dict.fromkeys(range(total), 0.0)
            if config.edges is None:
                for gave in self.gave:
                    for token, weights in gave.items():
                        received[token] += float(weights.mean()) / len(self.gave)
            elif self.steps % config.tau == 0 and config.segments_by == "entropy":
                mean = sum(map(self.entropy, self.gave)) / len(self.gave)
                self.mine = 0 if mean < config.edges[0] else 2 if mean < config.edges[1] else 1
            elif self.steps % config.tau == 0:
                mean = sum(map(self.sparsity, self.gave)) / len(self.gave)
                self.mine = 0 if mean >= config.edges[1] else 2 if mean >= config.edges[0] else 1
            self.order = [(thought, sum_ + received[token]) for token, (thought, sum_) in enumerate(self.order)]
            self.order.append((self.mine, received[total - 1]))
            self.steps += 1
        bands = [band for band in self.bands if band]
        hidden = [torch.stack([torch.cat(self.outputs[n]) for n in band]) for band in bands]
        own = [rolling_zscore(hidden_change(h[:, 1:], h[:, :-1])[None], config.window)[0].mean(0) for h in hidden]
        score = [0.0, *(own[0] - own[1] if len(own) == 2 else own[0]).tolist()]
        may_go = [t for t in held if self.prompt <= t <= total - config.newest]
        may_go.sort(key=lambda t: (self.order[t][0], self.order[t][1] + score[t], t))
        room = config.budget - 1 + (0 if config.count_prompt else self.prompt)
        gone = set(may_go[:max(0, len(held) - room)])
        for number in range(len(self.kept)):
            self.kept[number] = [token for token in held if token not in gone]


class WholePrefix(Loop):
    """A prompt with full attention, for the last layer's output of its last token."""

    def last_state(self, ids: list[int]) -> Tensor:
        self.caught: list[Tensor] = []
        self.forward(ids)
        return self.caught[-1][None]

    def norm(self, x: Tensor, module: Any) -> Tensor:
        if module is self.model.model.norm:
            self.caught.append(x)
        return super().norm(x, module)

    def attend(self, number: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        count, group = len(key), query.shape[1] // key.shape[1]
        logit = torch.einsum("qhd,nhd->hqn", query, key.repeat_interleave(group, 1)) * query.shape[-1] ** -0.5
        logit = logit.masked_fill(torch.ones(count, count, dtype=torch.bool).triu(1), -torch.inf)
        return torch.einsum("hqn,nhd->qhd", logit.softmax(-1), value.repeat_interleave(group, 1))


def held(layer: Any, row: int) -> list[int]:
    """The tokens in a row before its next token is added, without the one that it replaces."""
    positions = layer.state.positions[row].clone()
    positions[layer.state.next_slot[row]] = -1
    return sorted(position for position in positions.tolist() if position >= 0)


def check(
    model: Any, cache: Any, inputs: dict[str, Tensor], new: int, bands: Any = BANDS, kind: type[WholeLoop] = WholeLoop
) -> None:
    """Compare the cache with one loop per row, token by token and layer by layer."""

    def make(padding: int) -> tuple[WholeLoop, Any]:
        loop = kind(model, cache.config, bands, padding)
        return loop, loop.held_by_layer

    check_against_loops(make, model, cache, inputs, new, held)
