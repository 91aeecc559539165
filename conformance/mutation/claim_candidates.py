"""Small changes of the code that a test runs: operators, comparisons, constants, and names such as max and min.

See claim_search.py. An `Edit` changes a part of one line, so that line numbers stay the same.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

OPERATORS: dict[type[ast.AST], tuple[str, ...]] = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"), ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"), ast.Add: ("+", "-", "*"), ast.Sub: ("-", "+", "*"),
    ast.Mult: ("*", "/", "-"), ast.Div: ("/", "*", "-"),
    ast.FloorDiv: ("//", "*"), ast.Mod: ("%", "//"), ast.Pow: ("**", "*"), ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"), ast.And: ("and", "or"), ast.Or: ("or", "and"), ast.RShift: (">>", "<<"),
    ast.LShift: ("<<", ">>"), ast.MatMult: ("@", "+"),
}  # fmt: skip
_PAIRS = (
    ("max", "min"), ("amax", "amin"), ("argmax", "argmin"), ("any", "all"), ("floor", "ceil"), ("sum", "mean"),
    ("maximum", "minimum"), ("exp", "expm1"), ("log", "log1p"), ("log2", "log"), ("sin", "cos"), ("pairwise", "zip"),
    ("softmax", "log_softmax"), ("ge", "gt"), ("le", "lt"), ("sqrt", "exp"), ("median", "mean"),
)  # fmt: skip
NAMES = {old: new for pair in _PAIRS for old, new in (pair, pair[::-1])} | {
    "logsumexp": "amax", "round": "int", "tanh": "sin", "cumsum": "cumprod", "sorted": "list", "topk": "sort",
}  # fmt: skip
FIGURE = re.compile(r"(?<![\w.])\d+(\.\d+)?(?!\w)")


@dataclass(frozen=True)
class Edit:
    """Line `line` (from 1) of a file has `new` instead of its bytes from `start` to `end`."""

    line: int
    start: int
    end: int
    new: str

    def applied_to(self, source: str) -> str:
        lines = source.splitlines(keepends=True)
        text = lines[self.line - 1].encode()
        lines[self.line - 1] = (text[:self.start] + self.new.encode() + text[self.end:]).decode()
        return "".join(lines)

    def replacement(self, source: str) -> tuple[str, str]:
        """The old and the new text: the line, with as many lines before it as make it unique in the file."""
        before, after = source.splitlines(), self.applied_to(source).splitlines()
        for first in range(self.line - 1, -1, -1):
            old, new = ("\n".join(lines[first:self.line]) for lines in (before, after))
            old, new = (text.strip() if first == self.line - 1 else text for text in (old, new))
            if source.count(old) == 1 and old != new:
                return old, new
        raise ValueError(f"line {self.line} cannot be told apart")


def of_functions(source: str, lines: Collection[int]) -> list[tuple[int, Edit]]:
    """Changes in functions on the given lines, not in tests and fixtures, each with a rank: operators come first."""
    found: list[tuple[int, Edit]] = []
    for function, inside in _functions(ast.parse(source)):
        if not (inside or is_of_tests(function)):
            for statement in function.body:
                found += [one for one in _edits(statement, source) if one[1].line in lines]
    return list(dict.fromkeys(found))


def of_data(source: str, names: Collection[str]) -> list[Edit]:
    """Changes of numbers in the assignments of a module to these names, and to the names that those read."""
    assigned = {
        name.id: node for node in ast.parse(source).body if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in ([node.target] if isinstance(node, ast.AnnAssign) else node.targets)
        for name in ast.walk(target) if isinstance(name, ast.Name)
    }
    wanted, todo = set[str](), [name for name in names if name in assigned]
    while todo:
        name = todo.pop()
        if name not in wanted:
            wanted.add(name)
            todo += [one.id for one in ast.walk(assigned[name]) if isinstance(one, ast.Name) and one.id in assigned]
    nodes = dict.fromkeys(assigned[name].value for name in assigned if name in wanted)
    return [edit for node in nodes if node is not None for edit in (*_of_texts(node, source), *_plain(node, source))]


def is_of_tests(node: ast.AST) -> bool:
    """Whether a function is a test, a fixture, or draws cases."""
    if not isinstance(node, ast.FunctionDef):
        return False
    decorated = " ".join(map(ast.unparse, node.decorator_list))
    return node.name.startswith(("test_", "assert_", "check")) or "fixture" in decorated or "composite" in decorated \
        or "torch.Generator(" in ast.unparse(node)


def names_in(source: str, functions: Collection[str]) -> set[str]:
    """The names that functions of a module read."""
    return {
        name.id for function, _ in _functions(ast.parse(source)) if function.name in functions
        for name in ast.walk(function) if isinstance(name, ast.Name)
    }


def _functions(tree: ast.AST, inside: bool = False) -> Iterator[tuple[ast.FunctionDef, bool]]:
    """Functions, and whether each is inside of a test."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield node, inside
        yield from _functions(node, inside or is_of_tests(node))


def _plain(node: ast.AST, source: str) -> list[Edit]:
    return [edit for _, edit in _edits(node, source)]


def _of_texts(tree: ast.AST, source: str) -> Iterator[Edit]:
    """Each number in a text, with another first digit."""
    lines = source.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for number in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                line = lines[number - 1]
                low = node.col_offset if number == node.lineno else 0
                high = node.end_col_offset if number == node.end_lineno else len(line)
                for match in FIGURE.finditer(line):
                    if line.isascii() and low <= match.start() and match.end() <= (high or 0):
                        figure = match.group()
                        yield Edit(number, match.start(), match.start() + 1, str((int(figure[0]) + 1) % 10 or 1))


def _edits(tree: ast.AST, source: str) -> Iterator[tuple[int, Edit]]:
    """Changes inside of a statement, each with a rank: lower ones come first."""
    lines = [line.encode() for line in source.splitlines()]
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp):
            yield from _between(lines, node.left, node.op, node.right)
            yield from _instead(lines, node, node.left)
            yield from _instead(lines, node, node.right)
        elif isinstance(node, ast.Compare):
            sides = (node.left, *node.comparators)
            for left, op, right in zip(sides, node.ops, sides[1:], strict=False):
                yield from _between(lines, left, op, right)
        elif isinstance(node, ast.BoolOp):
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield from _between(lines, left, node.op, right)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not | ast.Invert):
            size = len("not ") if isinstance(node.op, ast.Not) else 1
            yield 0, Edit(node.lineno, node.col_offset, node.col_offset + size, "")
        elif isinstance(node, ast.Call):
            yield from _named(lines, node)
            if isinstance(node.func, ast.Attribute):
                yield from _instead(lines, node, node.func.value)
            elif len(node.args) == 1:
                yield from _instead(lines, node, node.args[0])
        elif isinstance(node, ast.Constant) and node.lineno == node.end_lineno and node.end_col_offset:
            place = node.lineno, node.col_offset, node.end_col_offset
            if isinstance(node.value, bool):
                yield 2, Edit(*place, str(not node.value))
            elif isinstance(node.value, float):
                yield 1, Edit(*place, repr(2 * node.value or 1.0))
            elif isinstance(node.value, int):
                yield from ((3, Edit(*place, str(node.value + step))) for step in (1, -1))


def _between(lines: list[bytes], left: ast.expr, op: ast.AST, right: ast.expr) -> Iterator[tuple[int, Edit]]:
    if type(op) in OPERATORS and left.end_lineno == right.lineno and left.end_col_offset is not None:
        old, *others = OPERATORS[type(op)]
        gap = lines[right.lineno - 1][left.end_col_offset:right.col_offset].decode()
        if old in gap:
            start = left.end_col_offset + gap.index(old)
            for rank, new in enumerate(others):
                yield rank, Edit(right.lineno, start, start + len(old), new)


def _instead(lines: list[bytes], node: ast.expr, part: ast.expr) -> Iterator[tuple[int, Edit]]:
    """A part of an expression instead of the whole."""
    if node.lineno == node.end_lineno and node.end_col_offset and part.lineno == part.end_lineno:
        text = lines[node.lineno - 1][part.col_offset:part.end_col_offset].decode()
        yield 2, Edit(node.lineno, node.col_offset, node.end_col_offset, f"({text})" if " " in text else text)


def _named(lines: list[bytes], call: ast.Call) -> Iterator[tuple[int, Edit]]:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    end = call.func.end_col_offset
    if name in NAMES and end is not None and call.func.end_lineno:
        start = end - len(name)
        if lines[call.func.end_lineno - 1][start:end].decode() == name:
            yield 1, Edit(call.func.end_lineno, start, end, NAMES[name])
