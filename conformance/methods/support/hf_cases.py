"""Shared parts of the tests of `kvtwin.*.hf`: comparison with a decode loop, and the tests of all methods whose State
has `append_block`. Needs transformers.

    class TestH2OCache(BlockCacheTests):
        method = "h2o"
        small = {"default": {"budget": 5, "block_size": 4}}
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache

from ...judge import checkers
from . import tiny_models
from .hf_loops import F64, Loop, StateLoop, cached
from .tiny_models import cache_class, generate, prompts

# Whether transformers starts prefill_chunk_size at token 0 of a cache that is not empty, which is wrong for all caches.
STARTS_AT_0 = tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 21)


# Comparison with transformers ----------------------------------------------------------------------------------------


def watch(model: Any, cache: Any) -> list[list[list[list[list[int]]]]]:
    """Record the cached tokens after each forward pass: [pass][layer][row][head] -> ascending positions."""
    seen: list[list[list[list[list[int]]]]] = []

    def record(*_: Any) -> None:
        layers = []
        for layer in cache.layers:
            positions, heads = layer.state.positions, layer.state.key.shape[1]
            assert layer.state.key.shape[2] == positions.shape[-1] == _capacity(cache.config) + _block(cache.config)
            rows = positions.tolist() if positions.dim() == 3 else [[row] * heads for row in positions.tolist()]
            layers.append([[cached(head) for head in row] for row in rows])
            most = max(len(head) for row in layers[-1] for head in row)
            room = _capacity(cache.config)
            assert most <= room, f"expected at most {room} cached tokens, got {most}"
        seen.append(layers)

    model.model.register_forward_hook(record)
    return seen


def _capacity(config: Any) -> int:
    """The most tokens that a State keeps between calls."""
    return getattr(config, "capacity", config.budget)


def _block(config: Any) -> int:
    """The further slots of a State, for a block."""
    return getattr(config, "block_size", 0)


def cuts(start: int, stop: int, size: int) -> list[tuple[int, int]]:
    """Split [start, stop) into chunks of at most `size`; one chunk if it is 0."""
    return [(at, min(at + size, stop)) for at in range(start, stop, size)] if size else [(start, stop)]


def check_against_loop(
    make: Callable[[], Loop], model: Any, cache: Any, inputs: dict[str, Tensor], new: int, *, chunk: int = 0
) -> None:
    """Assert that each row generates the loop's tokens and, after every forward pass, caches the loop's tokens."""
    alive = watch(model, cache)
    options = {"prefill_chunk_size": chunk} if chunk else {}
    generated = generate(model, inputs, new, past_key_values=cache, **options).tolist()
    total = inputs["input_ids"].shape[1]
    passes = [*cuts(0, total, chunk), *((at, at + 1) for at in range(total, total + new - 1))]
    assert len(alive) == len(passes)
    rows = zip(inputs["input_ids"].tolist(), inputs["attention_mask"].bool().tolist(), strict=True)
    for row, (ids, valid) in enumerate(rows):
        loop = make()
        tokens: list[int] = []
        for (start, stop), layers in zip(passes, alive, strict=True):
            for a, b in cuts(start, stop, _block(cache.config)):
                fed = ids[a:b] if stop <= total else tokens[-1:]
                logits = loop.feed(fed, valid[a:b] if stop <= total else [True])
            cached, expected = [layer[row] for layer in layers], loop.alive()
            assert cached == expected, f"row {row}, tokens {start} to {stop}: expected {expected} cached, got {cached}"
            if stop >= total:
                assert logits is not None
                tokens.append(int(logits.argmax()))
        assert generated[row] == tokens, f"row {row}: expected tokens {tokens}, got {generated[row]}"


def check_against_loops(
    make: Callable[[int], tuple[Loop, Callable[[], list[Any]]]], model: Any, cache: Any, inputs: dict[str, Tensor],
    new: int, contents: Callable[[Any, int], Any],
) -> None:
    """Assert that each row generates the loop's tokens and, after every forward pass, has the loop's cache contents.

    contents(layer, row): the contents of a layer of the cache. make(padding), called after the cache was used: a row's
    loop, and a function that returns the contents of all its layers.
    """
    seen: list[list[list[Any]]] = []                                                       # [pass][layer][row]
    rows = range(len(inputs["input_ids"]))
    hook = model.model.register_forward_hook(
        lambda *_: seen.append([[contents(layer, row) for row in rows] for layer in cache.layers])
    )
    generated = generate(model, inputs, new, past_key_values=cache).tolist()
    hook.remove()
    for row in rows:
        valid = inputs["attention_mask"][row].bool().tolist()
        loop, contents_of_loop = make(valid.count(False))
        logits = loop.feed(inputs["input_ids"][row].tolist(), valid)
        tokens: list[int] = []
        for number, layers in enumerate(seen):
            if number:
                logits = loop.feed(tokens[-1:], [True])
            assert [layer[row] for layer in layers] == contents_of_loop(), f"row {row} after pass {number}"
            assert logits is not None
            tokens.append(int(logits.argmax()))
        assert generated[row] == tokens, f"row {row}: expected tokens {tokens}, got {generated[row]}"


def feed(model: Any, cache: Any, ids: Any = (3, 1, 4), **options: Any) -> None:
    """Run one forward pass over one row."""
    with torch.no_grad():
        model(torch.tensor([list(ids)], device=model.device), past_key_values=cache, **options)


@contextmanager
def fits() -> Iterator[None]:
    """The states of a cache must fit the tokens: a ValueError is a failure."""
    try:
        yield
    except ValueError as error:
        pytest.fail(str(error))


def check_second_turn_in_chunks(model: Any, cache: Any, masked: bool) -> None:
    """A second turn in chunks, below the budget: the stock model's tokens, or refused if transformers is wrong."""
    first = model.generate(**prompts(5, [0]), past_key_values=cache, max_new_tokens=4)
    ids = torch.cat([first, prompts(7, [0])["input_ids"]], 1)
    turn = {"input_ids": ids, "max_new_tokens": 4}
    if masked:
        turn["attention_mask"] = torch.ones_like(ids)
    expected = model.generate(**turn)
    if not STARTS_AT_0:
        assert torch.equal(model.generate(**turn, past_key_values=cache, prefill_chunk_size=3), expected)
        return
    with pytest.raises(ValueError, match="transformers before 5.21 starts at 0"):
        model.generate(**turn, past_key_values=cache, prefill_chunk_size=3)


# The tests of a method whose State takes blocks ----------------------------------------------------------------------


class BlockCacheTests:
    """Tests of NAMECache on both sides; test_caches.py makes a subclass for each method."""

    method: ClassVar[str]
    # Options with small budgets. The interpreter runs the kernels of the first alone, unless all tests run.
    small: ClassVar[dict[str, dict[str, Any]]]
    # Further options that the constructor refuses: (options, error, message).
    refused: ClassVar[list[tuple[dict[str, Any], type[Exception], str]]] = []

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "small_options" in metafunc.fixturenames:
            metafunc.parametrize("small_options", self.small.values(), ids=self.small)
        if "kernel_options" in metafunc.fixturenames:
            first, *others = self.small.values()
            slow = (pytest.param(options, marks=pytest.mark.slow_on_cpu) for options in others)
            metafunc.parametrize("kernel_options", [first, *slow], ids=self.small)

    def cache(self, twins: Any, side: str, model: Any, **options: Any) -> Any:
        """A cache whose options allow small budgets."""
        model.set_attn_implementation("kvtwin")
        config = checkers.ask(self.method, "SMALL", {}) | options
        return cache_class(twins, side, self.method)(model.config, **config)

    @pytest.mark.parametrize(
        "family", ["llama", pytest.param("qwen2", marks=pytest.mark.slow_on_cpu), "qwen3"]
    )
    def test_full_budget_matches_the_stock_model(self, twins: Any, device: torch.device, family: str) -> None:
        """Padding spans a whole chunk, so that one row has an empty chunk."""
        inputs = prompts(9, [0, 4], device)
        for dtype in (torch.float32, F64):
            model = tiny_models.model(family, dtype, device)
            expected = generate(model, inputs, 12, past_key_values=DynamicCache(config=model.config))
            assert len(set(expected[0].tolist())) > 5, "the model repeats a few tokens"
            for chunk in (None, 3):
                used = self.cache(twins, "reference", model, budget=20, block_size=4)
                tokens = generate(model, inputs, 12, past_key_values=used, prefill_chunk_size=chunk)
                said = f"{dtype}, {chunk}: expected {expected.tolist()}, got {tokens.tolist()}"
                assert torch.equal(tokens, expected), said

    @pytest.mark.parametrize(("family", "padding", "chunk"), [("llama", [0, 4], 0), ("qwen3", [0, 0], 3)])
    def test_full_budget_on_the_optimized_side(
        self, twins: Any, device: torch.device, family: str, padding: list[int], chunk: int
    ) -> None:
        steps = 2 if device.type == "cpu" else 16
        model, inputs = tiny_models.model(family, torch.float32, device), prompts(5, padding, device)
        expected = generate(model, inputs, steps)
        options = {"prefill_chunk_size": chunk} if chunk else {}
        used = self.cache(twins, "optimized", model, budget=5 + steps, block_size=5)
        assert torch.equal(generate(model, inputs, steps, past_key_values=used, **options), expected)

    @pytest.mark.parametrize(("family", "chunk"), [
        pytest.param("llama", 0, marks=pytest.mark.slow_on_cpu),
        pytest.param("qwen2", 3, marks=pytest.mark.slow_on_cpu), ("qwen3", 7),
    ])
    def test_small_budget_matches_the_decode_loop(
        self, twins: Any, device: torch.device, family: str, chunk: int, small_options: dict[str, Any]
    ) -> None:
        model = tiny_models.model(family, F64, device)
        used = self.cache(twins, "reference", model, **small_options)
        make = self._loop(model, used.config)
        check_against_loop(make, model, used, prompts(11, [0, 2, 7], device), 8, chunk=chunk)

    def test_small_budget_on_the_optimized_side_matches_the_decode_loop(
        self, twins: Any, device: torch.device, kernel_options: dict[str, Any]
    ) -> None:
        model = tiny_models.model("qwen3", torch.float32, device)
        used = self.cache(twins, "optimized", model, **kernel_options)
        make, steps = self._loop(model, used.config), 3 if device.type == "cpu" else 30
        check_against_loop(make, model, used, prompts(7, [0, 2], device), steps, chunk=4)

    def _loop(self, model: Any, config: Any) -> Callable[[], Loop]:
        return lambda: StateLoop(model, self.method, config)

    def test_chunks_give_the_same_result_as_blocks(self, twins: Any, device: torch.device) -> None:
        """Chunks made by transformers give the same result as blocks made by the State."""
        inputs, options = prompts(11, [0, 5], device), {"budget": 6, "block_size": 4}
        model, results = tiny_models.model("llama", F64, device), []
        for chunk in (None, 4, 8):
            used = self.cache(twins, "reference", model, **options)
            tokens = generate(model, inputs, 6, past_key_values=used, prefill_chunk_size=chunk).tolist()
            results.append((tokens, [layer.state.positions.tolist() for layer in used.layers]))
        assert results[1] == results[0]
        assert results[2] == results[0]

    def test_full_budget_with_beams(self, twins: Any, device: torch.device) -> None:
        model, inputs = tiny_models.model("llama", device=device), prompts(9, [0, 4], device)
        expected = generate(model, inputs, 8, num_beams=3)
        used = self.cache(
            twins, "reference", model, budget=17, attention_mask=inputs["attention_mask"]     # [2, T] for six rows
        )
        assert torch.equal(generate(model, inputs, 8, num_beams=3, past_key_values=used), expected)

    # Bad input

    @pytest.mark.kind("bad_input")
    def test_options(self) -> None:
        model = tiny_models.model("llama")
        for side in ("reference", "optimized"):
            made = own_cache(side, self.method)
            refusals: list[tuple[dict[str, Any], type[Exception], str]] = [
                ({}, TypeError, "budget"),
                ({"budget": 0}, ValueError, "budget must be at least 1"),
                ({"budget": 4, "block_size": 0}, ValueError, "block_size must be at least 1"),
                ({"budget": 4, "block_size": 8.0}, TypeError, "block_size must be an int"),
                ({"budget": 4, "scale": 0.1}, TypeError, "scale is not an option"),
                ({"budget": 4, "no_option": 1}, TypeError, "no_option"),
                *self.refused,
            ]
            for options, error, message in refusals:
                with pytest.raises(error, match=message):
                    made(model.config, **checkers.required(self.method) | options)

    @pytest.mark.kind("bad_input")
    def test_rejects_a_model_without_our_attention(self) -> None:
        model = tiny_models.model("llama")
        used = _made("reference", self.method, model)
        with pytest.raises(RuntimeError, match=r'model\.set_attn_implementation\("kvtwin"\)'):
            model.generate(**prompts(5, [0]), past_key_values=used, max_new_tokens=3)

    @pytest.mark.kind("bad_input")
    def test_dtypes_without_kernels_are_refused(self) -> None:
        model = tiny_models.model("llama", F64)
        model.set_attn_implementation("kvtwin")
        with pytest.raises(TypeError, match=r"dtype must be one of torch\.float32"):
            feed(model, _made("optimized", self.method, model))

    @pytest.mark.kind("bad_input")
    def test_a_mask_that_forgets_the_tokens_before(self) -> None:
        model = tiny_models.model("llama")
        model.set_attn_implementation("kvtwin")
        used = _made("reference", self.method, model)
        feed(model, used)
        with pytest.raises(ValueError, match="3 tokens that the cache has seen and the 2 new ones"):
            feed(model, used, [5, 6], attention_mask=torch.ones(1, 2, dtype=torch.long))

    @pytest.mark.kind("bad_input")
    @pytest.mark.parametrize("masked", [True, False])
    def test_a_second_turn_in_chunks_is_right_or_refused(self, masked: bool) -> None:
        model = tiny_models.model("llama")
        model.set_attn_implementation("kvtwin")
        check_second_turn_in_chunks(model, _made("reference", self.method, model), masked)


def _made(side: str, method: str, model: Any) -> Any:
    return own_cache(side, method)(model.config, budget=40, **checkers.required(method))


def own_cache(side: str, method: str) -> Any:
    """Our own cache of a method, whatever implementation is under test."""
    pair = checkers.pair(method)
    assert pair.state is not None
    module = importlib.import_module(f"kvtwin.{side}.hf")
    return getattr(module, f"{pair.state.__name__.removesuffix('State')}Cache")
