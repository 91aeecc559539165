"""The options of a cache, from the constructors of its class and the fields of its method's config.

Errors name the class that was called, and `inspect.signature` shows all options.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import MISSING, fields
from difflib import get_close_matches
from inspect import Parameter, Signature
from typing import Any, ClassVar

import torch
from transformers.cache_utils import Cache

from ..contract.arguments import check_integer
from . import cache_adapter_contents as contents

#: Before the first tokens, a compression_ratio stands for this budget.
PROVISIONAL = 32768


#: Fields of configs that the model determines.
FROM_MODEL = ("scale", "softcap")


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """": did you mean 'budget'? There are: ..." for a name that is none of the known ones."""
    listed = sorted(known)
    near = get_close_matches(str(name), listed, n=1)
    return (f": did you mean {near[0]!r}? There" if near else "; there") + f" are: {', '.join(listed)}"


class Checked(type):
    """The type of the cache classes: compares arguments with the signature before a constructor gets them."""

    @property
    def __signature__(cls) -> Signature:
        return signature_of(cls)

    def __call__(cls, *args: Any, **options: Any) -> Any:
        """TypeError, which names this class, for options that it has not, and for missing or further arguments."""
        refused: tuple[str, ...] = getattr(cls, "refused", ())      # the constructors say why
        expected = signature_of(cls)
        known = {name: value for name, value in options.items() if name not in refused}
        names = [name for name, one in expected.parameters.items() if one.kind is Parameter.KEYWORD_ONLY]
        for name in known:
            if name not in expected.parameters:
                raise TypeError(f"{cls.__name__} has no option {name!r}{did_you_mean(name, names)}")
        try:
            expected.bind(*args, **known)
        except TypeError as error:
            raise TypeError(f"{cls.__name__}: {error} (options are passed by name, such as budget=1024)") from None
        return super().__call__(*args, **options)


def signature_of(cls: Any) -> Signature:
    """The parameters of the constructors of our classes, which hand on what they do not name, and the fields of the
    config. An option whose default depends on others has the default None."""
    found: dict[str, Parameter] = {}
    for base in cls.__mro__[:cls.__mro__.index(Cache)]:
        if "__init__" in vars(base):
            _, first, *named = inspect.signature(vars(base)["__init__"]).parameters.values()
            for one in named if found else (first, *named):
                if one.kind is not Parameter.VAR_KEYWORD:
                    found.setdefault(one.name, one)
    for field in fields(cls.Config) if hasattr(cls, "Config") else ():
        if field.name not in found and field.name not in cls.refused:
            several = field.name in getattr(cls, "by_layer", ())
            default = None if field.default is MISSING else field.default
            found[field.name] = Parameter(
                field.name, Parameter.KEYWORD_ONLY, annotation=f"{field.type} | Sequence[{field.type}]" if several
                else field.type, default=default if field.default_factory is MISSING else field.default_factory(),
            )
    first_of_all = ("budget", "k", "compression_ratio")
    return Signature(sorted(found.values(), key=lambda one: (one.kind, one.name not in first_of_all)))


def check_budget(name: str, budget: int | None, ratio: float | None) -> None:
    """TypeError or ValueError unless there is either a budget or a share of tokens to leave out, from 0 to below 1."""
    if (budget is None) == (ratio is None):
        given = "neither" if budget is None else "both"
        raise TypeError(f"{name} needs a budget, such as budget=1024, or a compression_ratio, got {given}")
    if budget is not None:
        check_integer("budget", budget, minimum=1)
    elif isinstance(ratio, bool) or not isinstance(ratio, (int, float)):
        raise TypeError(f"compression_ratio must be a number, got {type(ratio).__name__}: {ratio!r}")
    elif not 0 <= ratio < 1:
        raise ValueError(f"compression_ratio must be at least 0 and below 1, got {ratio}")


class Configured(Cache, metaclass=Checked):
    """A cache whose config follows from its options and, with a compression_ratio, from its first forward pass."""

    Config: ClassVar[type[Any]]
    #: Fields of the Config that are no options: a constructor says why.
    refused: ClassVar[tuple[str, ...]] = FROM_MODEL

    def _configure(self, budget: int | None, ratio: float | None, given: dict[str, Any]) -> None:
        """Set `config`. With a ratio, its budget is a provisional one until the first tokens."""
        check_budget(type(self).__name__, budget, ratio)
        self.compression_ratio, self._given, self._waits = ratio, given, ratio is not None
        self._budget = PROVISIONAL if budget is None else budget
        self.config = self._config_for(self._budget)

    def _config_for(self, budget: int, tokens: int | None = None) -> Any:
        """The method's config with this budget. tokens: those of the first forward pass, None if it is not known."""
        defaults: dict[str, Any] = getattr(self.Config, "defaults_for", lambda budget, given: {})(budget, self._given)
        return self._method_config(budget, {**defaults, **self._given})

    def _method_config(self, budget: int, options: dict[str, Any]) -> Any:
        return self.Config(budget=budget, **options)

    def _config_of(self, number: int) -> Any:
        """The config of layer `number`."""
        return self.config

    def _begin(self, tokens: int) -> None:
        """Set the configs for a first forward pass of so many tokens."""
        if torch.compiler.is_compiling():
            raise NotImplementedError("the first forward pass must not be compiled: its length determines the config")
        ratio = self.compression_ratio
        # As kvpress rounds.
        budget = self._budget if ratio is None else max(1, int(tokens * (1 - ratio)))
        self.config = self._config_for(budget, tokens)
        for number, layer in enumerate(self.layers):
            if hasattr(layer, "configure"):
                layer.configure(self._config_of(number))

    @property
    def nbytes(self) -> int:
        """The bytes allocated for tokens and all that belongs to them, on all devices."""
        held = (getattr(layer, "state", layer) for layer in self.layers)
        return contents.nbytes(one for one in held if one is not None)

    @property
    def full_nbytes(self) -> int:
        """The bytes that all tokens seen so far, padding included, take in transformers' cache."""
        return sum(
            layer.full_nbytes if hasattr(layer, "full_nbytes") else contents.nbytes([layer]) for layer in self.layers
        )

    def __repr__(self) -> str:
        return contents.description(self)
