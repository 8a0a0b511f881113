"""The order of the modules: imports point down only, and what must be known in one place is
imported in one place.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import re
from pathlib import Path

import pytest

from tests.support.rooms import KERNEL, WINGS

ROOT = Path(__file__).parents[2]

# Low to high, one folder or public module a layer. A module imports from layers below its own, and
# within its own as long as there is no cycle.
LAYERS = [
    *KERNEL,
    "modules",
    "factories",
    "experts",
    "optimizer",
    "readers",
    *(wing for wing in WINGS if wing not in ("integrations", "_pages", "cli")),
    "tensors",
    "__init__",
    "integrations",
    "cli",
    "__main__",
]
"""Names below `distckpt`; `__init__` is the package itself."""

# The only importers of libraries, so that each is known in one place.
SOLE_IMPORTERS = {
    "torch.distributed": {"_ranks.exchanges", "_ranks.groups"},
    # A file system of our own is made for it.
    "fsspec": {"_storage.fsspec_urls", "manager._tiers._tier_files"},
    "obstore": {"_storage.cloud"},
    "safetensors": {"_format.columns"},
}


def name_of(file: Path) -> str:
    parts = file.relative_to(ROOT / "distckpt").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {name_of(file): file for file in sorted((ROOT / "distckpt").rglob("*.py"))}


@functools.cache
def nodes_of(module: str) -> list[ast.AST]:
    """Return all nodes of the syntax tree of a module."""
    return list(ast.walk(ast.parse(MODULES[module].read_text())))


@pytest.fixture(scope="module", autouse=True)
def _forget_nodes():
    """Keep the many nodes no longer than these tests: they slow down garbage collection."""
    yield
    nodes_of.cache_clear()


def imports_of(module: str) -> list[tuple[str, int]]:
    """Return what a module imports, as absolute dotted names, with line numbers."""
    found = []
    for node in nodes_of(module):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"distckpt.{module} line {node.lineno}: relative import"
            found += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
    return found


def optional_imports_of(module: str) -> list[str]:
    """Return what a module imports when it is first used: libraries that need not be installed."""
    return [
        node.args[0].value
        for node in nodes_of(module)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "import_module"
        and isinstance(node.args[0], ast.Constant)
    ]


def own_imports(module: str) -> dict[str, int]:
    """Return which modules of the package a module imports, below `distckpt`, with line numbers."""
    found = {}
    for name, line in imports_of(module):
        head, _, below = name.partition(".")
        if head == "distckpt":
            # The last part may be a name in a module.
            found[below if below in MODULES else below.rpartition(".")[0] or "__init__"] = line
    return found


def layer_of(module: str) -> int:
    # Verbs write pages, and pages hold texts of verbs.
    name = module.split(".")[0].replace("_pages", "cli")
    assert name in LAYERS, f"distckpt.{name} is in no layer: give it its place in LAYERS"
    return LAYERS.index(name)


def is_private(module: str) -> bool:
    return any(part.startswith("_") for part in module.split("."))


def test_imports_point_down():
    upward = [
        f"distckpt.{module} line {line} imports {other}"
        for module in MODULES
        for other, line in own_imports(module).items()
        if layer_of(other) > layer_of(module)
    ]
    assert upward == []


def names_of(module: str) -> tuple[set[str], set[str]]:
    """Return the names that a module has at its top level: those that it defines, and those that
    it imports from others of the package.
    """
    defined, imported = set(), set()
    for node in nodes_of(module)[0].body:
        if isinstance(node, ast.ImportFrom) and node.module.startswith("distckpt"):
            imported |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        else:
            defined |= {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    return defined, imported


def test_names_come_from_the_private_modules_that_define_them():
    passed_on = [
        f"distckpt.{module}: {name} of distckpt.{other}"
        for module in MODULES
        for name, _ in imports_of(module)
        for other, _, name in [name.removeprefix("distckpt.").rpartition(".")]
        if is_private(other) and other in MODULES and f"{other}.{name}" not in MODULES
        for defined, imported in [names_of(other)]
        if name in imported - defined
    ]
    assert passed_on == []


def test_public_modules_alone_list_their_names():
    lists = {module for module in MODULES if "__all__" in names_of(module)[0]}
    assert {module for module in lists if is_private(module)} == {"__init__"}


def test_no_cycles():
    graph = {module: set(own_imports(module)) for module in MODULES}
    order = list(graphlib.TopologicalSorter(graph).static_order())
    assert set(order) == set(MODULES)


def functions_of(module: str) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return [node for node in nodes_of(module) if isinstance(node, kinds)]


def test_imports_inside_functions_are_of_the_package_and_come_first():
    """They are for what few calls need, and stand where a reader looks for imports."""
    foreign = [
        f"distckpt.{module} line {node.lineno}"
        for module in MODULES
        for function in functions_of(module)
        for node in ast.walk(function)
        if isinstance(node, ast.Import)
        or (isinstance(node, ast.ImportFrom) and node.module.split(".")[0] != "distckpt")
    ]
    assert foreign == []


IMPORTED_BY_A_STRING = {
    # Modules of the package.
    "__init__",
    "_base.wings",
    "cli._main",
    "megatron._forwarding",
    # Modules of other libraries.
    "_base.lazy",
    "dcp._names",
    "engines._receivers",
    "megatron.interop",
}


def test_few_modules_are_imported_by_a_string():
    """No editor, type checker or test here follows such imports."""
    computed = {
        module
        for module in MODULES
        for node in nodes_of(module)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module"
        if not isinstance(node.args[0], ast.Constant)
    }
    assert computed == IMPORTED_BY_A_STRING
    private = {f"distckpt.{module}" for module in MODULES if is_private(module)}
    named = {
        module: {node.value for node in nodes_of(module) if isinstance(node, ast.Constant)}
        for module in MODULES
    }
    tables = {module: names & private for module, names in named.items() if names & private}
    assert tables.keys() == {"_base.wings"}
    assert len(tables["_base.wings"]) == 9


def test_no_module_calls_import():
    called = {
        node.func.id
        for module in MODULES
        for node in nodes_of(module)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert "__import__" not in called


def all_imports_of(module: str) -> list[str]:
    return [*optional_imports_of(module), *(name for name, _ in imports_of(module))]


@pytest.mark.parametrize(("library", "sole_importers"), SOLE_IMPORTERS.items())
def test_what_is_known_in_one_place_only(library, sole_importers):
    importers = {
        module
        for module in MODULES
        if any(f"{name}.".startswith(f"{library}.") for name in all_imports_of(module))
    }
    assert importers == sole_importers


@pytest.mark.parametrize(
    "library", ["pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"]
)
def test_no_code_is_ever_loaded(library):
    importers = [
        module
        for module in MODULES
        if any(name.split(".")[0] == library for name in all_imports_of(module))
    ]
    assert importers == []


def test_torch_load_and_save_are_not_used():
    for module in MODULES:
        used = [
            node.lineno
            for node in nodes_of(module)
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and (node.value.id, node.attr)
            in {("torch", "load"), ("torch", "save"), ("torch", "package")}
        ]
        assert used == [], module


def test_the_byte_layout_of_safetensors_is_known_in_one_place():
    """Its length field is packed as a little-endian number of 64 bits."""
    users = {
        module
        for module in MODULES
        for node in nodes_of(module)
        if isinstance(node, ast.Constant) and node.value == "<Q"
    }
    assert users == {"_format.safetensors_file"}


def test_the_kernel_imports_no_wing():
    """It names some in one table, `_base.wings`."""
    assert {
        f"distckpt.{module} line {line} imports {other}"
        for module in MODULES
        for other, line in own_imports(module).items()
        if module.split(".")[0] in KERNEL and other.split(".")[0] not in KERNEL
    } == set()


def test_the_architecture_page_names_every_folder_and_only_files_that_exist():
    page = (ROOT / "docs/architecture.md").read_text()
    package = ROOT / "distckpt"
    folders = {folder.name for folder in package.iterdir() if (folder / "__init__.py").is_file()}
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.M)) == folders
    named = {
        name.removeprefix("distckpt/")
        for name in re.findall(r"`([\w/]+\.py)`", page)
        if "tests/" not in name
    }
    assert [
        name for name in named if not (package / name).is_file() and not list(package.rglob(name))
    ] == []
    picture = (ROOT / "docs/architecture.svg").read_text()
    assert {name for name in folders if name.startswith("_")} <= set(
        re.findall(r">(_\w+)<", picture)
    )


def test_no_test_module_imports_another():
    """What several of them need is in tests/support."""
    imported = {
        file.name: re.findall(r"^\s*(?:from|import) (tests\.\S*\btest_\w+)", file.read_text(), re.M)
        for file in (ROOT / "tests").rglob("test_*.py")
    }
    assert {name: found for name, found in imported.items() if found} == {}


def test_tests_of_one_process_need_no_servers_and_no_models_of_others():
    """What they cost, one does not want to wait for while working on the code: tests/integration
    has such tests.
    """
    heavy = (
        r"\b(tiny_models|megatron_(gpt|families|towers|mamba)|s3_server|cloud_servers|"
        r"compressed_tensors)\b"
    )
    fixtures = (
        r"\bdef \w+\(.*\b(server|bucket)\b|getfixturevalue\(.(server|bucket)|^import transformers"
    )
    files = {
        file: file.read_text()
        for file in (ROOT / "tests/unit").rglob("*.py")
        if file != Path(__file__)
    }
    found = [
        file.name for file, text in files.items() if re.search(f"{heavy}|{fixtures}", text, re.M)
    ]
    assert len(files) > 50
    assert found == []
