"""Checks that each forward pass reaches all layers of a cache and kvtwin's attention.

A layer cannot know whether the other layers have seen the same tokens. `Progress.enter` runs before each layer's
update and compares numbers that the host has, so it neither synchronizes with the GPU nor changes a captured graph.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicSlidingWindowLayer

NAME = "kvtwin"
_INTERRUPTED = (
    "the layers have seen different numbers of tokens{} because a forward pass was interrupted: call reset() on the "
    "cache and pass all tokens again"
)
ACTIVATE = f'model.set_attn_implementation("{NAME}")'


class Progress:
    """The forward passes through `layers`, of which some have `pending` tokens: those that evict.

    config: the model's, which names its attention. It only determines the wording of errors.
    """

    def __init__(self, layers: list[Any], config: PreTrainedConfig) -> None:
        self._layers, self._config = layers, config.get_text_config(decoder=True)
        self._evicting = tuple(n for n, layer in enumerate(layers) if hasattr(layer, "pending"))
        # Subclasses with other contents may count other tokens.
        windows = tuple(n for n, layer in enumerate(layers) if type(layer) is DynamicSlidingWindowLayer)
        self._counted = self._evicting + windows
        self._final = max(self._counted, default=None)
        self.first = min(self._evicting, default=None)
        self._last: int | None = None       # the layer of the last update
        self._start = 0                     # the number of tokens before the current pass, until its last layer

    def enter(self, number: int) -> None:
        """Record that layer `number` is about to get the tokens of a pass.

        RuntimeError, before anything changes, if an earlier pass was interrupted or did not use kvtwin's attention.
        """
        last = self._last
        if last is not None and last in self._evicting and self._layers[last].pending:
            raise self._unattended(last, number)
        if torch.compiler.is_compiling() and any(self._layers[n].is_compileable for n in self._evicting):
            self._compare_on_device(number)
            self._last = number
            return
        if last is None or number <= last:                                              # a new pass begins
            self._start = self.common_length()
        if number in self._counted and self._layers[number].get_seq_length() != self._start:
            raise self._interrupted()
        if number == self._final:
            self._start = 0                 # no other layer will be compared with it in this pass
        self._last = number

    def _compare_on_device(self, number: int) -> None:
        """At the first layer of a compiled pass, whose number of tokens only the device has: an assertion that the
        first and the last layer have seen the same number. After an interrupted pass they differ."""
        if number == self._evicting[0]:
            first, last = (self._layers[n].counted for n in (self._evicting[0], self._evicting[-1]))
            if first is not None and last is not None and first is not last:
                torch._assert_async((first == last).all(), _INTERRUPTED.format(""))

    def common_length(self) -> int:
        """The number of tokens that the layers have seen. Layers without tokens do not count: a model may skip them."""
        lengths = [self._layers[number].get_seq_length() for number in self._counted]
        seen = [length for length in lengths if length]
        if any(length != seen[0] for length in seen):
            raise self._interrupted()
        return seen[0] if seen else 0

    def _interrupted(self) -> RuntimeError:
        seen = ", ".join(f"layer {number}: {self._layers[number].get_seq_length()}" for number in sorted(self._counted))
        return RuntimeError(_INTERRUPTED.format(f" ({seen})"))

    def _unattended(self, last: int, number: int) -> RuntimeError:
        """The error for tokens that layer `last` got before layer `number`, but not its attention."""
        if number <= last and len(self._evicting) > 1:
            return RuntimeError(
                f"a forward pass was interrupted in layer {last}: call reset() on the cache and pass all tokens again"
            )
        if getattr(self._config, "_attn_implementation", None) == NAME:
            return NotImplementedError(
                f"layer {last} did not pass the keys of the cache to its attention function, although that is "
                f"{NAME!r}. kvtwin's caches do not support models that change the keys after the cache, such as those "
                "with multi-head latent attention, or that compute attention in code of their own. (After an "
                "interrupted forward pass, call reset() on the cache)"
            )
        return RuntimeError(
            f"the {self._layers[last].pending} new token(s) of layer {last} did not reach kvtwin's attention: call "
            f"{ACTIVATE} before generating, and reset() on the cache. If the model's attention is {NAME!r} already, or "
            "if this call logs that the model does not support it, the model cannot use kvtwin's caches. (After an "
            "interrupted forward pass, only reset() is needed)"
        )


def one_token_per_pass(method: str, count: int, seen: int) -> NotImplementedError:
    """The error for `count` tokens in a forward pass after the first, for methods whose layers share decisions."""
    return NotImplementedError(
        f"{count} tokens in one forward pass after the {seen} that {method}'s cache has seen: each later pass must "
        "have one token. Pass the prompt in one piece (leave prefill_chunk_size out); a second turn needs a new cache, "
        "or reset()"
    )
