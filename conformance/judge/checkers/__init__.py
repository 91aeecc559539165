"""What the judge must know of each pair: one module per pair, of the pair's name, found and never listed.

Lockstep, laws, strategies and replay are generic; they ask here for what differs. A module may hold

- `BUDGET`: what the config calls its budget (default: "budget"); `EVICTS`: False where a state keeps every token, and
  the budget says how many a step attends to; `KEEPS_PROMPTS`: True where by default only what is generated is evicted;
- `Adapter`: how a state's choices are judged (see `lockstep.Adapter`, which serves where there is none);
- `configs(most, window)`: a Hypothesis strategy of the config's keyword arguments, for drawn traces: `budget` from 1 to
  `most`, and whatever else there is but `scale` (default: the budget alone). `window`: the most tokens that anything
  observing a prompt should look at;
- `LONGEST`: the most tokens of a prompt, and the most steps, of a trace that is drawn on a GPU (default: 300 and 80);
- `SMALL`: keyword arguments that make the config take any budget from 2 on (default: none needed);
- `GROUPINGS`: options that change the shapes of a state, one dict each;
- `LAWS`: options, one dict each, under which a state must obey the laws too;
- `COMPILED`: options, one dict each, by which a state has other kernels, for `compile_only`;
- `arguments(device)`: values of required parameters that `tiny` does not know, by parameter name, sizes as there;
  "function.parameter" where functions mean different things by it;
- `ON_THE_HOST`: functions that give numbers to the host, so that nothing can compile them;
- `LOSSY`: True where a state does not keep keys and values as they came;
- `extras(state, query, key, value)`: what the state's `prefill` and `step` take besides these tokens, [B, H, T, D] and
  [B, H, D], by name; made from them, so that a trace of tokens is a whole trace (default: nothing);
- `most_held(state, tokens)`: the most tokens that a row (of a head) may hold after so many real ones (default: the
  budget); `poison(state)`: spoils whatever a state keeps where no token is (default: NaN and infinity in the free slots
  of `key` and `value`); `bytes_of(state)`: what it takes to hold its tokens (default: the memory of `key` and `value`);
- `CACHES`: of a method whose cache for transformers is derived, options of small budgets by name, for its tests; the
  first serves where one will do. `REFUSED`: options that its constructor refuses, each with the error and its message;
- `TRACE`: options of the golden trace's config besides the budget and the block size (default: none);
- `CASES` and `replay(case, module)`: the kinds of cases that are this pair's, and how a saved one is judged again,
  `module` being the pair's of the implementation under test; yields what was found right, raises AssertionError.

Beside these: the pair's error bounds, each with its derivation, and the comparators that its tests call.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import reduce
from types import ModuleType
from typing import Any

from ... import discovery


def of(name: str) -> ModuleType | None:
    """The judge of a pair, None if it has none."""
    qualified = f"{__name__}.{name}"
    return importlib.import_module(qualified) if importlib.util.find_spec(qualified) else None


def ask(name: str, attribute: str, default: Any) -> Any:
    """What the judge of a pair says, or the default."""
    return getattr(of(name), attribute, default)


def extras(state: Any, query: Any, key: Any, value: Any) -> dict[str, Any]:
    """Keyword arguments that a state's `prefill` and `step` take besides these tokens: see the module."""
    config = getattr(state, "config", None)
    for found in discovery.methods():
        if found.config is not None and isinstance(config, found.config):
            made: dict[str, Any] = ask(found.name, "extras", lambda *_: {})(state, query, key, value)
            return made
    return {}


def small_config(found: discovery.Pair, budget: int, options: dict[str, Any]) -> Any:
    """A method's config with a budget that its defaults may not allow (see SMALL)."""
    assert found.config is not None
    return found.config(**{ask(found.name, "BUDGET", "budget"): budget, **ask(found.name, "SMALL", {}), **options})


def every() -> dict[str, ModuleType]:
    """All judges, by the names of their pairs."""
    found = {pair.name: of(pair.name) for pair in discovery.pairs()}
    return {name: judge for name, judge in found.items() if judge is not None}


def module(side: Any, found: discovery.Pair) -> Any:
    """The module of a pair in `twins.reference` or `twins.optimized`."""
    return reduce(getattr, found.path.split("."), side)


def pair(name: str) -> discovery.Pair:
    """The pair of this name. Raises LookupError."""
    for found in discovery.pairs():
        if found.name == name:
            return found
    raise LookupError(f"no method or pair is called {name!r}; there are {', '.join(map(str, discovery.pairs()))}")
