"""What the source of a package asks a reader to hold in mind: its lines and its functions."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MAX_COLUMNS = 100

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BRANCHES = (
    ast.If,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.ExceptHandler,
    ast.Assert,
    ast.IfExp,
    ast.match_case,
)
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


class Function(NamedTuple):
    """A function, where it is, and how complex it is."""

    complexity: int
    place: str
    name: str


class Line(NamedTuple):
    """A line of code, and where it is."""

    place: str
    text: str


class Source(NamedTuple):
    """The lines of code and the functions of a package."""

    lines: list[Line]
    functions: list[Function]

    @property
    def wide_lines(self) -> list[Line]:
        """The lines that are wider than `MAX_COLUMNS`."""
        return [line for line in self.lines if len(line.text) > MAX_COLUMNS]

    def functions_over(self, complexity: int) -> list[Function]:
        """Return the functions over a complexity, the most complex one first."""
        over = [function for function in self.functions if function.complexity > complexity]
        return sorted(over, reverse=True)


def read_source(package: Path) -> Source:
    """Read all modules of a package."""
    source = Source([], [])
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        place = str(path.relative_to(package.parent))
        source.lines.extend(code_lines(text, tree, place))
        source.functions.extend(functions_of(tree, place))
    return source


# --- Lines ----------------------------------------------------------------------------------------


def code_lines(text: str, tree: ast.Module, place: str) -> Iterator[Line]:
    """Yield the lines of a module that are not blank, a comment or part of a docstring."""
    numbers = _lines_of_tokens(text) - _lines_of_docstrings(tree)
    lines = text.splitlines()
    for number in sorted(numbers):
        yield Line(f"{place}:{number}", lines[number - 1])


def _lines_of_tokens(text: str) -> set[int]:
    numbers: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NOT_CODE:
            numbers.update(range(token.start[0], token.end[0] + 1))
    return numbers


def _lines_of_docstrings(tree: ast.Module) -> set[int]:
    """Return the lines of strings that stand alone, below attributes, too."""
    numbers: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and _is_string(node.value):
            numbers.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return numbers


def _is_string(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


# --- Functions ------------------------------------------------------------------------------------


def functions_of(tree: ast.Module, place: str) -> Iterator[Function]:
    """Yield all functions of a module, methods and nested ones, too."""
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS):
            yield Function(complexity_of(node), f"{place}:{node.lineno}", node.name)


def complexity_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return one more than the decisions in a function, without those of functions in it."""
    return 1 + sum(_decisions(node) for node in _own_nodes(function))


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, FUNCTIONS):
            yield child
            yield from _own_nodes(child)


def _decisions(node: ast.AST) -> int:
    if isinstance(node, ast.BoolOp):
        return len(node.values) - 1
    if isinstance(node, ast.comprehension):
        return 1 + len(node.ifs)
    return int(isinstance(node, BRANCHES))
