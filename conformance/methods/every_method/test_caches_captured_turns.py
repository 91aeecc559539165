"""What happens between the decode steps of `captured`: the bits of plain steps."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

pytest.importorskip("transformers", reason="needs transformers: python -m pip install 'kvtwin[hf]'")

from transformers.generation.streamers import BaseStreamer

from kvtwin.conformance.judge.compare import assert_same
from kvtwin.conformance.methods.support.captured_cases import MAKE, Make, assert_logits, decode, feed, h2o, made
from kvtwin.conformance.methods.support.tiny_models import generate, prompts
from kvtwin.optimized import hf
from kvtwin.optimized._common import graph
from kvtwin.optimized.hf import _step, captured

pytestmark = [pytest.mark.kind("equivalence"), pytest.mark.usefixtures("graphs"), pytest.mark.whole]

some_caches = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)


# Whatever happens between steps --------------------------------------------------------------------------------------


@some_caches
def test_two_generations_in_turn(make, model):
    """Graphs share memory, but not their caches, inputs and outputs."""
    expected = [decode(model, make(model), 8), decode(model, make(model), 8)]
    with captured(model) as steps:
        caches = [make(model), make(model)]
        logits = [[feed(model, cache, [[3, 1, 4]])] for cache in caches]
        for _ in range(8):
            for cache, mine in zip(caches, logits, strict=True):
                mine.append(feed(model, cache, [[int(mine[-1][0, -1].argmax())]]))
        assert (steps.graphs, steps.replays, steps.eager, steps.reasons) == (2, 14, 2, [])
    for mine, other in zip(logits, expected, strict=True):
        assert_logits(mine, other)


@some_caches
def test_one_cache_for_batches_of_other_sizes(make, model, device):
    """A graph of two rows is not used for three, nor for two rows in new buffers."""
    cache = make(model)
    with captured(model) as steps:
        for rows in (2, 3, 2):
            inputs, replays = prompts(5, [0] * rows, device), steps.replays
            expected = plain(make, device, inputs, 7)
            assert torch.equal(generate(model, inputs, 7, past_key_values=cache), expected)
            assert steps.replays == replays + 5
            cache.reset()
        assert steps.graphs == 1, "graphs of buffers that are gone"


@some_caches
@pytest.mark.parametrize("back", [[0, 3], [1, 0, 2, 2]], ids=["fewer", "as many"])
def test_rows_are_repeated_and_selected_between_steps(make, back, model, device):
    """New buffers have graphs of their own. Rows in the same number change in place, and the graph stays."""
    def run() -> list[Tensor]:
        cache, tokens = make(model), [[5], [9]]
        logits = [feed(model, cache, [[3, 1, 4], [2, 7, 1]])]
        for change in (lambda: None, lambda: cache.batch_repeat_interleave(2),
                       lambda: cache.batch_select_indices(torch.tensor(back, device=device))):
            change()
            rows = cache.layers[0].rows
            logits += [feed(model, cache, (tokens * 2)[:rows]) for _ in range(4)]
        return logits

    expected = run()
    with captured(model) as steps:
        assert_logits(run(), expected)
        assert (steps.reasons, steps.replays) == ([], 9 if len(back) == 2 else 10)


def plain(make: Make, device: torch.device, inputs: dict[str, Tensor], new: int, **options: Any) -> Tensor:
    """The tokens without `captured`."""
    model = made("qwen3", device)
    return generate(model, inputs, new, past_key_values=make(model), **options)


@some_caches
@pytest.mark.parametrize("options", [{"num_beams": 3}, {"do_sample": True, "top_k": 0, "temperature": 3.0}], ids=str)
def test_beams_and_sampling(make, options, model, device):
    inputs = prompts(5, [0, 2], device)
    torch.manual_seed(3)
    expected = plain(make, device, inputs, 9, **options)
    torch.manual_seed(3)
    with captured(model) as steps:
        assert torch.equal(generate(model, inputs, 9, past_key_values=make(model), **options), expected)
        assert (steps.reasons, steps.replays) == ([], 7)


def test_a_second_turn_goes_on_with_the_same_graph(model):
    """A turn of several tokens, and one of one token with no mask and no positions."""
    def run() -> list[Tensor]:
        cache = h2o(model)
        logits = decode(model, cache, 4)
        logits.append(feed(model, cache, [[5, 6, 7]]))
        return logits + [feed(model, cache, [[token]]) for token in (8, 9)]

    expected = run()
    with captured(model) as steps:
        assert_logits(run(), expected)
        assert (steps.replays, steps.eager, steps.reasons) == (5, 1, [])


def test_padding_among_new_tokens_has_no_graph(model):
    """A row ends, and the mask of its next tokens is 0. A warning says so once; later steps are replays again."""
    def run() -> list[Tensor]:
        cache, mask = h2o(model), torch.ones(2, 3, dtype=torch.long, device=model.device)
        logits = [feed(model, cache, [[3, 1, 4], [2, 7, 1]], attention_mask=mask)]
        for step in range(10):
            new = [[1], [int(step not in (4, 5))]]
            mask = torch.cat([mask, torch.tensor(new, device=model.device)], 1)
            positions = (mask.cumsum(1) - 1)[:, -1:].clamp_min(0)
            logits.append(feed(model, cache, [[5], [6 + step]], attention_mask=mask, position_ids=positions))
        return logits

    expected = run()
    with captured(model) as steps, pytest.warns(UserWarning, match="a new token is padding"):
        assert_logits(run(), expected)
    assert (steps.replays, steps.eager, len(steps.reasons)) == (7, 3, 1)


def test_a_mask_for_the_constructor_covers_its_tokens(model, device):
    """Tokens that it covers are no decode steps, even if they come one by one."""
    mask = torch.tensor([[0, 1, 1, 1, 0, 1]], device=device)

    def run() -> list[Tensor]:
        cache = hf.H2OCache(model.config, budget=6, block_size=4, attention_mask=mask)
        logits = [feed(model, cache, [[3, 1]])]
        return logits + [feed(model, cache, [[token]]) for token in (4, 1, 5, 9, 2, 6, 5)]

    expected = run()
    with captured(model) as steps:
        assert_logits(run(), expected)
    assert (steps.replays, steps.eager) == (2, 5)


class Stops(BaseStreamer):
    """A streamer that fails after some tokens."""

    def __init__(self, after: int) -> None:
        self.left = after

    def put(self, value: Tensor) -> None:
        self.left -= 1
        if self.left < 0:
            raise InterruptedError

    def end(self) -> None:
        pass


def stop(*_: object) -> None:
    raise InterruptedError


@some_caches
def test_a_generation_after_one_that_failed(make, model, device):
    inputs, cache = prompts(5, [0], device), make(model)
    with captured(model) as steps:
        with pytest.raises(InterruptedError):
            generate(model, inputs, 9, past_key_values=cache, streamer=Stops(6))
        assert steps.replays
        cache.reset()
        assert torch.equal(generate(model, inputs, 9, past_key_values=cache), plain(make, device, inputs, 9))


@some_caches
def test_an_interrupted_pass_is_refused_as_without_a_graph(make, model, monkeypatch):
    cache = make(model)
    with captured(model) as steps:
        decode(model, cache, 4)
        with monkeypatch.context() as patch:
            patch.setattr(model.model.layers[0].mlp, "forward", stop)
            with pytest.raises(InterruptedError):
                feed(model, cache, [[5]], use_cache=True)                 # of another kind, without a graph
        with pytest.raises(RuntimeError, match="interrupted"):
            feed(model, cache, [[5]])
        assert steps.replays == 3


def test_the_errors_of_a_step_are_raised(model, device):
    """Beyond max_tokens, and after close()."""
    quest = hf.QuestCache(model.config, budget=8, page_size=4, max_tokens=8)
    with captured(model) as steps:
        with pytest.raises(ValueError, match="max_tokens"):
            decode(model, quest, 6)
        assert steps.replays == 4
        epikv = MAKE["EpiKV"](model)
        decode(model, epikv, 4)
        epikv.close()
        with pytest.raises(RuntimeError, match="closed"):
            feed(model, epikv, [[5]])


def half_a_reset(cache: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cache.layers[1].state, "_end_change", stop)
    cache.layers[1].state.reset()


def half_a_pass(cache: Any, patch: pytest.MonkeyPatch) -> None:
    """Not through the model's forward method."""
    cache.layers[1].update(*torch.zeros(2, 1, 2, 1, 16, device=cache.layers[1].device))
    stop()


@pytest.mark.parametrize(
    ("change", "says"), [(half_a_reset, r"interrupted reset\(\)"), (half_a_pass, "was interrupted")],
    ids=["reset", "pass"],
)
def test_what_interrupts_one_layer_is_seen(change, says, model, monkeypatch):
    cache = h2o(model)
    with captured(model) as steps:
        decode(model, cache, 4)
        with monkeypatch.context() as patch, pytest.raises(InterruptedError):
            change(cache, patch)
        with pytest.raises(RuntimeError, match=says):
            feed(model, cache, [[5]])
        assert steps.replays == 3


@pytest.mark.parametrize(("what", "taken"), [("_foreach_copy_", 0), ("_launch", 0), ("_with", 1)])
def test_errors_before_and_after_a_launch(what, taken, model, monkeypatch):
    """A step that was not launched leaves the cache as it was. The host counts one that was."""
    def ends(cache: Any, left: int) -> list[Tensor]:
        return [feed(model, cache, [[token]]) for token in (5, 6, 7)[left:]]

    plain, cache = h2o(model), h2o(model)
    expected = decode(model, plain, 4) + ends(plain, 0)[taken:]
    with captured(model) as steps:
        logits = decode(model, cache, 4)
        (step,) = steps._caches[cache].steps.values()
        with monkeypatch.context() as patch, pytest.raises(InterruptedError):
            patch.setattr({"_launch": step, "_with": _step, "_foreach_copy_": torch}[what], what, stop)
            feed(model, cache, [[5]])
        assert [layer.get_seq_length() for layer in cache.layers] == [7 + taken] * 2
        assert_logits(logits + ends(cache, taken), expected)


# Models that change --------------------------------------------------------------------------------------------------


def doubled(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(2)


def replaced(model: Any) -> None:
    linear = model.model.layers[1].mlp.up_proj
    linear.weight = torch.nn.Parameter(linear.weight.detach() * 2)


def moved(model: Any) -> None:
    """The same parameter, elsewhere."""
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.data = weight.detach() * 2


def scaled(model: Any) -> None:
    model.model.layers[1].input_layernorm.variance_epsilon += 0.5


def adapted(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    mlp.up_proj = torch.nn.Sequential(mlp.up_proj, torch.nn.LeakyReLU(0.1)).eval()


@pytest.mark.parametrize(("change", "again"), [(doubled, 0), (replaced, 1), (moved, 1), (scaled, 1), (adapted, 1)])
@pytest.mark.parametrize("reset", [True, False], ids=["between-prompts", "between-steps"])
def test_changes_of_the_model_are_seen(change, again, reset, model, device):
    """In place, without another capture. (Settings are looked at with each prompt.)"""
    def run(model: Any, cache: Any) -> list[Tensor]:
        logits = decode(model, cache, 4)
        change(model)
        if reset or change is scaled:
            cache.reset()
            return logits + decode(model, cache, 4)
        return logits + [feed(model, cache, [[token]]) for token in (5, 6, 7)]

    other = made("qwen3", device)
    expected = run(other, h2o(other))
    with captured(model) as steps:
        assert_logits(run(model, h2o(model)), expected)
        assert (steps.eager, steps.reasons) == (1 + again, [])


def test_an_equal_weight_of_one_element_is_another(model, device):
    def run(model: Any) -> list[Tensor]:
        mlp = model.model.layers[1].mlp
        mlp.act_fn = torch.nn.PReLU(device=device).eval()
        cache = h2o(model)
        logits = decode(model, cache, 4)
        mlp.act_fn.weight = torch.nn.Parameter(mlp.act_fn.weight.detach().clone())
        return logits + [feed(model, cache, [[token]]) for token in (5, 6, 7)]

    expected = run(made("qwen3", device))
    with captured(model) as steps:
        assert_logits(run(model), expected)
        assert (steps.replays, steps.eager) == (5, 2)


def test_a_hook_between_steps_runs(model, device):
    def run(model: Any) -> list[Tensor]:
        cache = h2o(model)
        logits = decode(model, cache, 4)
        hook = model.model.layers[1].mlp.register_forward_hook(lambda _, args, output: 2 * output)
        logits += [feed(model, cache, [[token]]) for token in (5, 6)]
        hook.remove()
        return logits + [feed(model, cache, [[token]]) for token in (7, 8, 9)]

    expected = run(made("qwen3", device))
    with captured(model) as steps, pytest.warns(UserWarning, match="forward hooks"):
        assert_logits(run(model), expected)
    assert (steps.replays, steps.eager) == (5, 4)


# What stays of a graph -----------------------------------------------------------------------------------------------


def test_outputs_are_not_those_of_the_next_step(model):
    expected = decode(model, h2o(model), 5)
    with captured(model):
        assert_logits(decode(model, h2o(model), 5), expected)


@pytest.mark.parametrize("options", [{"output_hidden_states": True}, {"return_dict": False}], ids=str)
def test_outputs_have_all_that_they_had(options, model, device):
    def run() -> list[Any]:
        cache, ids = h2o(model), torch.tensor([[5]], device=device)
        feed(model, cache, [[3, 1, 4]])
        with torch.no_grad():
            found = [model(ids, past_key_values=cache, **options) for _ in range(4)]
        assert all(cache in (one if isinstance(one, tuple) else one.values()) for one in found)
        return found

    expected = run()
    with captured(model) as steps:
        given = run()
        assert (steps.replays, steps.reasons) == (3, [])
    for mine, other in zip(given, expected, strict=True):
        assert type(mine) is type(other)
        for one, two in zip(tree_leaves(tuple(mine)), tree_leaves(tuple(other)), strict=True):
            if isinstance(one, Tensor):
                assert_same(one, two, what="output")


def test_the_end_of_the_context_frees_everything(model, device):
    forward = vars(model).get("forward")
    with captured(model) as steps:
        cache = h2o(model)
        decode(model, cache, 4)
        step = weakref.ref(next(iter(steps._caches[cache].steps.values())))
        assert step() is not None
        assert (steps.memory_bytes > 0) == (device.type == "cuda")
        assert steps.seconds > 0
        for other in [h2o(model)]:
            decode(model, other, 4)
        assert steps.graphs == 2
        del other
        gc.collect()
        assert steps.graphs == 1, "a cache that is gone has a graph"
    assert (steps.graphs, steps.memory_bytes, step()) == (0, 0, None)
    assert vars(model).get("forward") is forward


def test_memory_does_not_grow(model, device):
    reserved = []
    for _ in range(3):
        with captured(model) as steps:
            decode(model, h2o(model), 4)
            assert steps.replays == 3
        if device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
            reserved.append(torch.cuda.memory_reserved())
    assert len(set(reserved[1:])) <= 1, reserved


def test_a_capture_that_fails_leaves_the_cache_as_it_was(model, monkeypatch):
    expected = decode(model, h2o(model), 5)
    capture = graph.captured

    def fails(function: Callable[[], object], memory: Any) -> Callable[[], None]:
        capture(function, memory)
        raise RuntimeError("out of memory\nand more")

    monkeypatch.setattr(graph, "captured", fails)
    with captured(model) as steps, pytest.warns(UserWarning, match="the capture failed: out of memory$"):
        assert_logits(decode(model, h2o(model), 5), expected)
    assert (steps.graphs, steps.replays, steps.eager) == (0, 0, 5)
