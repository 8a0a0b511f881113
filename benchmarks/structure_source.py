"""The source of a package in numbers: its lines, tokens, functions and expressions."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

MAX_COLUMNS = 100
MAX_LINES = 500
HIGH_COMPLEXITY = 10

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
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
STRING_STARTS = {"FSTRING_START", "TSTRING_START"}
STRING_ENDS = {"FSTRING_END", "TSTRING_END"}
"""Of strings that are several tokens since Python 3.12, and one before."""


class Module(NamedTuple):
    """A module of a package, parsed once."""

    name: str
    """Dotted, with that of the package."""
    place: str
    text: str
    nodes: list[ast.AST]
    """All of its syntax tree, the tree itself first."""
    tokens: list[tokenize.TokenInfo]

    @property
    def tree(self) -> ast.Module:
        """The syntax tree."""
        tree = self.nodes[0]
        assert isinstance(tree, ast.Module)
        return tree


class Finding(NamedTuple):
    """A place in a package, and the words to print for it."""

    place: str
    text: str


class Function(NamedTuple):
    """A function, where it is, and how complex it is."""

    complexity: int
    place: str
    name: str


class Line(NamedTuple):
    """A line of code, and where it is."""

    place: str
    text: str


def read_package(package: Path) -> list[Module]:
    """Read all modules of a package."""
    return [_read_module(path, package) for path in sorted(package.rglob("*.py"))]


def _read_module(path: Path, package: Path) -> Module:
    text = path.read_text(encoding="utf-8")
    place = path.relative_to(package.parent)
    parts = place.with_suffix("").parts
    if parts[-1] == "__init__":
        parts = parts[:-1]
    nodes = list(ast.walk(ast.parse(text)))
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    return Module(".".join(parts), str(place), text, nodes, tokens)


# --- Lines and tokens -----------------------------------------------------------------------------


def code_lines(module: Module) -> Iterator[Line]:
    """Yield the lines of a module that are not blank, a comment or part of a docstring."""
    lines = module.text.splitlines()
    for number in sorted(_lines_of_tokens(module) - _lines_of_docstrings(module)):
        yield Line(f"{module.place}:{number}", lines[number - 1])


def _lines_of_tokens(module: Module) -> set[int]:
    numbers: set[int] = set()
    for token in module.tokens:
        if token.type not in NOT_CODE:
            numbers.update(range(token.start[0], token.end[0] + 1))
    return numbers


def _lines_of_docstrings(module: Module) -> set[int]:
    numbers: set[int] = set()
    for node in docstrings(module):
        numbers.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return numbers


def docstrings(module: Module) -> Iterator[ast.Constant]:
    """Yield the strings that stand alone, below attributes, too."""
    for node in module.nodes:
        if isinstance(node, ast.Expr) and is_string(node.value):
            assert isinstance(node.value, ast.Constant)
            yield node.value


def is_string(node: ast.AST) -> bool:
    """Whether a node is a plain string."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def num_lines(module: Module) -> int:
    """Count all lines of a module."""
    return len(module.text.splitlines())


def num_statements(module: Module) -> int:
    """Count the lines of a module as if each statement, or head of one, stood on one line."""
    return sum(token.type == tokenize.NEWLINE for token in module.tokens)


def num_tokens(module: Module) -> int:
    """Count names, numbers and operators, and not those within an f-string."""
    count = 0
    depth = 0
    for token in module.tokens:
        kind = tokenize.tok_name[token.type]
        depth += kind in STRING_STARTS
        depth -= kind in STRING_ENDS
        is_string = kind == "STRING" or kind in STRING_ENDS
        count += depth == 0 and not is_string and token.type not in NOT_CODE
    return count


# --- Functions ------------------------------------------------------------------------------------


def functions_of(module: Module) -> Iterator[Function]:
    """Yield all functions of a module, methods and nested ones, too."""
    for node in module.nodes:
        if isinstance(node, FUNCTIONS):
            place = f"{module.place}:{node.lineno}"
            yield Function(complexity_of(node), place, node.name)


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


# --- Expressions and classes ----------------------------------------------------------------------


def is_comprehension(node: ast.AST) -> bool:
    """Whether a node is a comprehension or a generator expression."""
    return isinstance(node, COMPREHENSIONS)


def is_conditional(node: ast.AST) -> bool:
    """Whether a node is a conditional expression."""
    return isinstance(node, ast.IfExp)


def is_parallel(node: ast.AST) -> bool:
    """Whether a node assigns several values to as many names."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    return any(isinstance(target, ast.Tuple) for target in node.targets)


def is_class(node: ast.AST) -> bool:
    """Whether a node defines a class."""
    return isinstance(node, ast.ClassDef)


def is_class_of_plans(node: ast.AST) -> bool:
    """Whether a node defines a class with Plan in its name, which begins with no underscore."""
    return isinstance(node, ast.ClassDef) and re.match(r"[^_].*Plan|Plan", node.name) is not None


def find(modules: list[Module], matches: Callable[[ast.AST], bool]) -> list[Finding]:
    """Return the nodes that match, with the line that each begins in."""
    findings = []
    for module in modules:
        lines = module.text.splitlines()
        for node in module.nodes:
            if matches(node):
                number = getattr(node, "lineno", 1)
                findings.append(Finding(f"{module.place}:{number}", lines[number - 1].strip()))
    return findings
