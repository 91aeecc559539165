"""Checkers: one module per pair, with the pair's name, found by that name. A method of another package names its own.

Lockstep, laws, strategies and replay are generic and read method-specific facts from here. A checker may define

- `BUDGET`: the name of the config's budget (default: "budget"), None if it has none; `EVICTS`: False if a state keeps
  every token, so that a budget limits how many a step attends to; `KEEPS_PROMPTS`: True if by default only generated
  tokens are evicted;
- `Adapter`: the checks of a state's choices (default: `lockstep.Adapter`);
- `configs(most, window)`: a Hypothesis strategy of the config's keyword arguments for drawn traces: `budget` from 1 to
  `most`, and all others but `scale` (default: the budget alone). `window`: the largest observation window of a prompt;
- `LAYERS`: numbers of layers of drawn traces, for a method whose layers decide together (default: 1 alone), and
  `together(module, config, layers=, **sizes)`: the states of so many layers of a side, and what they have in common,
  which has `reset` and `reorder`;
- `LONGEST`: the most tokens of a prompt and the most steps of a trace drawn on a GPU (default: 300 and 48);
- `REQUIRED`: the config's options without a default, other than the budget, with values for tests (default: none);
- `SMALL`: keyword arguments with which the config accepts any budget from 2 on (default: none); `small(budget)`: those
  that say more for a budget from 2 on, for the laws (default: none);
- `GROUPINGS`: a list of options, dicts, that change the shapes of a state;
- `LAWS`: a list of further options, dicts, under which the laws are tested;
- `VARIANTS`: what the method can do, `variants.Variant`, each of which lockstep judges, besides those that every method
  has; one of the same name replaces that. `DECIDING`: options for all of them, if with `SMALL` scores decide little;
- `PLAIN`: options with which a state multiplies queries and keys as they come (default: none needed);
- `COMPILED`: a list of options, dicts, for which a state uses other kernels, for `compile_only`; "sink_logits" is one
  of `tiny.new_state`;
- `arguments(device)`: values of required parameters that `tiny` does not know, by parameter name, with the sizes of
  `tiny`; "function.parameter" if a parameter's meaning depends on the function;
- `variants(name, given)`: lists of further arguments of the function of this name, made from `given`, those with all
  optional ones that are known: other types of the same arguments;
- `parts(module)`: what the pair exports besides functions, config and state, for tests of wrong arguments: by name, a
  function of the device that returns a callable, the object behind it, or None, and good arguments by name;
- `ON_THE_HOST`: functions that return Python numbers, so that they cannot be compiled;
- `DECIDES`: False if a state chooses nothing by its scores: what it does to a token follows from counts alone;
- `LOSSY`: True if a state does not store keys and values unchanged;
- `HEAD_DIMS`: the head dims of drawn traces, if a state accepts some only (default: those of `strategies`);
- `extras(state, query, key, value)`: further keyword arguments of the state's `prefill` and `step` for these tokens,
  [B, H, T, D] or [B, H, D], computed from them, so that a trace needs no other inputs (default: none);
- `max_kept(state, tokens)`: the most tokens that a row (of a head) may hold after so many valid ones (default: the
  budget); `poison(state)`: overwrites all free memory of a state (default: NaN and infinity in the free slots of `key`
  and `value`); `bytes_of(state)`: the memory of the tokens (default: that of `key` and `value`);
- `CACHES`: for a method whose cache for transformers is derived, options with small budgets by name, for its tests.
  Tests that need one config use the first. `REFUSED`: options that its constructor refuses, with error and message;
- `NUMBERS`: the config's own options with values that it refuses at a budget of 4: (option, values, error, message);
- `SERVED_ROWS`: the rows of the traces of judge/served.py, if the reference takes too long for so many (default: 64);
- `Model`: for a method whose state takes blocks, its rules with plain lists, a `block_model.Head`;
- `SUBJECTS`: the method's functions that the property tests call, `subjects.Subject`; `SCORED`: False if a state has no
  scores that lockstep compares;
- `measured(budget)`: options of the config with which the accuracy tables and the benchmarks measure a method whose
  options depend on the budget or have no default (default: `REQUIRED`, and what the config's `defaults_for` gives);
- `AUTHORS`: the options of the authors' code that differ from our defaults, which the accuracy tables also measure:
  those of the config, or of the cache for transformers;
- `FORMS`: the options of each other form of the method, by name, None for those that it does not take. The accuracy
  tables also measure the forms, and golden traces have a case of each;
- `DEFAULTS`: the defaults of the config's options, typed from the paper or from its authors' code (sizes without a
  source are ours: blocks of 128 tokens, one token per eviction, 32,768 tokens at most); `SAME`: those that functions
  have as parameters of the same name and default (default: none). See methods/every_method/test_pinned.py;
- `SCORES_WHEN_DUE`: True if a state with an interval scores its tokens when it evicts; new ones then have +inf;
- `TIED`: the contents with which its choices between equal tokens are judged (default: `subjects.TIED`);
- `TRACE`: options of the golden trace's config besides the budget and the block size (default: none);
- `CASES` and `replay(case, module)`: the pair's kinds of cases, and a function that judges a saved one again with
  `module`, the pair's module of the implementation under test. It yields a line per passed check and raises
  AssertionError.

A checker also has the pair's error bounds, with their derivations, and the comparators that its tests call.
"""

from __future__ import annotations

from ...registry import (
    ask,
    checker_of,
    every,
    extras,
    held_bytes,
    lossy,
    measured,
    module,
    pair,
    required,
    small,
    small_config,
    state_name,
    with_budget,
)

__all__ = [
    "ask", "checker_of", "every", "extras", "held_bytes", "lossy", "measured", "module", "pair", "required", "small",
    "small_config", "state_name", "with_budget",
]
