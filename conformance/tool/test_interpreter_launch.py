"""A launch looks up constant data only once, and restores everything that it changes."""

from __future__ import annotations

import inspect
from types import ModuleType

import pytest
import torch

from kvtwin.conformance.interpreter.launch import Members, copy_nothing, remember_parameters


def module_of(**attributes):
    made = ModuleType("somewhere")
    vars(made).update(attributes)
    return made


class Parent:
    def method(self, a, b, c=4):
        """A method with one more argument."""


@pytest.mark.parametrize("names", [("a",), ("a", "b")])
@pytest.mark.parametrize(
    "owner", [lambda: module_of(a=1, b=2, c=3), lambda: type("Own", (Parent,), {"a": 1, "b": 2, "c": 3})]
)
def test_members_are_set_and_put_back_at_once(owner, names):
    owner = owner()
    members = Members(owner, names)
    before = members.values
    assert before == (1, 2)[: len(names)]
    members.values = [name * 2 for name in names]
    assert [getattr(owner, name) for name in names] == [name * 2 for name in names]
    assert owner.c == 3
    members.values = before
    assert (owner.a, owner.b, owner.c) == (1, 2, 3)
    with pytest.raises(ValueError, match="argument 2"):
        members.values = [1, 2, 3]


def plain(a, b, c=3):
    """A signature that a kernel can have."""


def with_more(a, *rest, b=2, **named):
    """A signature that a kernel cannot have."""


@pytest.mark.parametrize("function", [plain, with_more, Parent().method])
def test_arguments_are_named_as_inspect_names_them(function):
    interpreter = module_of(inspect=inspect)
    remember_parameters(interpreter)
    for arguments, named in (((1, 2, 4), {}), ((1,), {"c": 5, "b": 6}), ((1, 2), {}), ((), {"b": 1, "a": 2, "c": 3})):
        expected = inspect.getcallargs(function, *arguments, **named)
        assert interpreter.inspect.getcallargs(function, *arguments, **named) == expected


@pytest.mark.parametrize(
    ("arguments", "named"), [((), {}), ((1,), {}), ((1, 2), {"a": 1}), ((1, 2, 3, 4), {}), ((1, 2), {"other": 3})]
)
def test_wrong_arguments_raise_what_inspect_raises(arguments, named):
    interpreter = module_of(inspect=inspect)
    remember_parameters(interpreter)
    with pytest.raises(TypeError) as expected:
        inspect.getcallargs(plain, *arguments, **named)
    with pytest.raises(TypeError) as caught:
        interpreter.inspect.getcallargs(plain, *arguments, **named)
    assert str(caught.value) == str(expected.value)


def test_a_function_is_looked_at_once(monkeypatch):
    interpreter, asked = module_of(inspect=inspect), []
    original = inspect.getfullargspec
    monkeypatch.setattr(inspect, "getfullargspec", lambda function: asked.append(function) or original(function))
    remember_parameters(interpreter)
    ours = interpreter.inspect
    assert [ours.getfullargspec(plain).args for _ in range(2)] == [["a", "b", "c"]] * 2
    assert asked == [plain]
    assert ours.getmembers is inspect.getmembers


class Executor:
    """Stands in for the interpreter's executor."""

    def _init_args_hst(self, args_dev, kwargs):
        return [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args_dev], dict(kwargs)

    def _restore_args_dev(self, args_dev, args_hst, kwargs, kwargs_hst):
        self.restored = True


def executor():
    made = type("Executor", (Executor,), {**vars(Executor), "restored": False})
    copy_nothing(module_of(GridExecutor=made))
    return made


def test_tensors_that_are_there_are_not_copied():
    given, named = (torch.ones(3), 4, None, 2.5, True), {"SIZE": 8, "out": torch.zeros(2)}
    ours = executor()()
    args, kwargs = ours._init_args_hst(given, named)
    assert all(left is right for left, right in zip(args, given, strict=True))
    assert kwargs is named
    ours._restore_args_dev(given, args, named, kwargs)
    assert not ours.restored


@pytest.mark.parametrize("other", [torch.nn.Parameter(torch.ones(2)), (torch.ones(2),), torch.ones(2, device="meta")])
@pytest.mark.parametrize("by_name", [False, True])
def test_other_arguments_are_left_to_the_interpreter(other, by_name):
    given, named = ((), {"x": other}) if by_name else ((other,), {})
    ours = executor()()
    args, kwargs = ours._init_args_hst(given, named)
    assert kwargs is not named
    ours._restore_args_dev(given, args, named, kwargs)
    assert ours.restored
