"""The imports within a package, and what they lead to."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from importlib.util import resolve_name
from typing import NamedTuple

from structure_source import FUNCTIONS, Finding, Module, docstrings, is_string


class Import(NamedTuple):
    """An `import` statement for one name."""

    module: str
    name: str
    """As the statement has it; empty where it imports the module alone."""
    in_function: bool


class Imports:
    """The imports of the modules of a package, in the order of how well they can be seen."""

    def __init__(self, modules: list[Module]) -> None:
        self._modules = {module.name: module for module in modules}
        self._package = min(self._modules, key=len, default="")
        self._imports = {
            module.name: list(_imports_of(module, with_types=False)) for module in modules
        }

    def kernel(self, verbs: Iterable[str]) -> set[str]:
        """Return the modules that are imported with the modules of these functions.

        The package itself is left out, and so are packages on the way that import nothing.

        Raises:
            LookupError: If the package has no such function.
        """
        return self._closure(verbs, self._at_once)

    def kernel_on_demand(self, verbs: Iterable[str]) -> set[str]:
        """Return these and those that `import` statements within functions lead to."""
        return self._closure(verbs, self._in_statements)

    def kernel_by_string(self, verbs: Iterable[str]) -> set[str]:
        """Return these and those that a string of one of them names."""
        return self._closure(verbs, self._in_strings_too)

    def _closure(self, verbs: Iterable[str], edges: Callable[[str], set[str]]) -> set[str]:
        reached: set[str] = set()
        homes = {self._home_of(verb) for verb in verbs}
        waiting = homes.union(*map(self._filled_packages, homes))
        while waiting:
            name = waiting.pop()
            reached.add(name)
            waiting |= edges(name) - reached
        return reached

    def _home_of(self, verb: str) -> str:
        """Return the module that defines a public function of the package."""
        name = self._package
        while not self._defines(name, verb):
            following = [
                found.module for found in _imports_of(self._modules[name]) if found.name == verb
            ]
            if not following or following[0] not in self._modules:
                raise LookupError(f"{self._package} has no function {verb}")
            name = following[0]
        return name

    def _defines(self, name: str, verb: str) -> bool:
        statements = self._modules[name].tree.body
        return any(isinstance(one, FUNCTIONS) and one.name == verb for one in statements)

    # --- Edges ------------------------------------------------------------------------------------

    def _at_once(self, name: str) -> set[str]:
        return self._imported(name, in_functions=False)

    def _in_statements(self, name: str) -> set[str]:
        return self._imported(name, in_functions=True)

    def _in_strings_too(self, name: str) -> set[str]:
        named = set(self._named_in(self._modules[name]).values())
        return self._imported(name, in_functions=True) | named - {self._package}

    def _imported(self, name: str, in_functions: bool) -> set[str]:
        names: set[str] = set()
        for one in self._imports[name]:
            if in_functions or not one.in_function:
                names |= self._loaded_for(one)
        return names

    def _loaded_for(self, one: Import) -> set[str]:
        """Return the modules that one import loads: the packages on the way, too."""
        full_name = f"{one.module}.{one.name}"
        if full_name not in self._modules:
            full_name = one.module
        if full_name not in self._modules or full_name == self._package:
            return set()
        return {full_name, *self._filled_packages(full_name)}

    def _filled_packages(self, name: str) -> Iterator[str]:
        """Yield the packages around a module that import something."""
        parent = name.rpartition(".")[0]
        while parent and parent != self._package:
            if self._imports[parent]:
                yield parent
            parent = parent.rpartition(".")[0]

    # --- Strings ----------------------------------------------------------------------------------

    def calls_with_strings(self) -> list[Finding]:
        """Return the calls that import a module of the package by a string.

        They call `import_module`, or a function that gives it the string or looks it up.
        """
        importers = {"import_module"}
        for module in self._modules.values():
            importers |= _importers(module)
        findings = []
        for module in self._modules.values():
            for call in _calls(module):
                if _called(call) in importers and self._has_own_name(call):
                    findings.append(_finding(module, call))
        return findings

    def names_in_tables(self) -> list[Finding]:
        """Return the strings that name a module of the package, but in calls and its `__init__`."""
        findings = []
        for module in self._modules.values():
            in_calls = {id(call.args[0]) for call in _calls(module) if call.args}
            if module.name == self._package:
                continue
            for node in self._named_in(module):
                if id(node) not in in_calls:
                    findings.append(_finding(module, node))
        return findings

    def _named_in(self, module: Module) -> dict[ast.Constant, str]:
        """Return the strings that name a module of the package, with or without that of it."""
        described = {id(node) for node in docstrings(module)}
        named = {}
        for node in module.nodes:
            if not isinstance(node, ast.Constant) or not is_string(node) or id(node) in described:
                continue
            text = str(node.value)
            for full_name in (text, f"{self._package}.{text}"):
                if full_name in self._modules and "." in text:
                    named[node] = full_name
        return named

    def _has_own_name(self, call: ast.Call) -> bool:
        """Whether a call is given a module of the package, in a string or a key of a table."""
        if not call.args:
            return False
        if _called(call) != "import_module":
            return is_string(call.args[0])
        beginning = _beginning(call.args[0])
        return beginning is not None and beginning.partition(".")[0] == self._package


def _imports_of(module: Module, with_types: bool = True) -> Iterator[Import]:
    """Yield the imports of a module, with or without those for type checkers alone."""
    package = module.name
    if not module.place.endswith("__init__.py"):
        package = package.rpartition(".")[0]
    for node, in_function in _import_statements(module.tree, with_types, False):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, "", in_function)
        else:
            source = resolve_name("." * node.level + (node.module or ""), package)
            for alias in node.names:
                yield Import(source, alias.name, in_function)


def _import_statements(
    node: ast.AST, with_types: bool, in_function: bool
) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    children = ast.iter_child_nodes(node)
    if not with_types and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        children = iter(node.orelse)
    for child in children:
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, in_function
        elif not isinstance(child, ast.expr):
            inside = in_function or isinstance(child, FUNCTIONS)
            yield from _import_statements(child, with_types, inside)


def _importers(module: Module) -> set[str]:
    """Return the functions of a module that import what they are given, or look up."""
    names = set()
    for function in module.tree.body:
        if not isinstance(function, FUNCTIONS):
            continue
        for node in ast.walk(function):
            if not isinstance(node, ast.Call) or _called(node) != "import_module":
                continue
            if node.args and _beginning(node.args[0]) is None:
                names.add(function.name)
    return names - {"__getattr__"}


def _beginning(node: ast.expr) -> str | None:
    """Return the beginning of a string as far as it is written out."""
    if isinstance(node, ast.JoinedStr) and node.values:
        node = node.values[0]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return None


def _calls(module: Module) -> Iterator[ast.Call]:
    return (node for node in module.nodes if isinstance(node, ast.Call))


def _called(call: ast.Call) -> str:
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _finding(module: Module, node: ast.expr) -> Finding:
    return Finding(f"{module.place}:{node.lineno}", ast.unparse(node))
