"""The order of the modules: imports point down only, and what must be known in one place is imported in one place."""

from __future__ import annotations

import ast
import graphlib
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Low to high. A module imports from layers below its own, and within its own as long as there is no cycle.
LAYERS = [
    "_dtypes _names _region _roll _aio _object_requests _object_store _storage _columns _device _io _io_upload "
    "_open_files _memory _shard_file dict_utils",
    "core",
    "_background _sharded_base _sharded_tensor mapping _collectives _codec*",
    "utils tensors _manifest _matching _shards _io_write _mapped _hf_names",
    "_plan_* _read_parts _io_read _sparse_read _exchange _shared_read _io_export _records _report _shard_writer "
    "_staging _state_dict _foreign_shards _common_state _commit _object_commit _prune _stream_files _rule rules "
    "rule_sets _translate _stored_pieces _stored_values _hf_source _dcp_* _sources validation optimizer modules "
    "_dtensor _layer_shards _optimizer_* _fused factories experts",
    "strategies strategies.*",
    "_queries _saving _loading _async_save serialization _verify _diff _reshard",
    "hf streaming _steps _retention _preemption manager interop interop.* dcp",
    "__init__",
    "_bench _bench.*",
    "_cli _cli.*",
    "cli",
    "__main__",
]
"""Names below `distckpt`; `__init__` is the package itself."""

# What one module alone imports, so that it is known in one place.
SOLE_IMPORTERS = {
    "torch.distributed": "_collectives",
    "fsspec": "_object_requests",
    "safetensors": "_columns",
}


def name_of(file: Path) -> str:
    parts = file.relative_to(ROOT / "distckpt").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


TREES = {name_of(file): ast.parse(file.read_text()) for file in sorted((ROOT / "distckpt").rglob("*.py"))}


def imports_of(module: str) -> list[tuple[str, int]]:
    """Return what a module imports, as absolute dotted names, with line numbers."""
    found = []
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"distckpt.{module} line {node.lineno}: relative import"
            found += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
    return found


def own_imports(module: str) -> dict[str, int]:
    """Return which modules of the package a module imports, below `distckpt`, with line numbers."""
    found = {}
    for name, line in imports_of(module):
        head, _, below = name.partition(".")
        if head == "distckpt":
            # The last part may be a name in a module.
            found[below if below in TREES else below.rpartition(".")[0] or "__init__"] = line
    return found


def layer_of(module: str) -> int:
    layers = [number for number, names in enumerate(LAYERS) if any(fnmatch(module, name) for name in names.split())]
    assert len(layers) == 1, f"distckpt.{module} is in {len(layers)} layers: give it its place in LAYERS"
    return layers[0]


@pytest.mark.parametrize("module", TREES)
def test_imports_point_down(module):
    upward = [
        f"line {line} imports {other}"
        for other, line in own_imports(module).items()
        if layer_of(other) > layer_of(module)
    ]
    assert upward == []


def test_no_cycles():
    graph = {module: set(own_imports(module)) for module in TREES}
    order = list(graphlib.TopologicalSorter(graph).static_order())
    assert set(order) == set(TREES)


@pytest.mark.parametrize("module", TREES)
def test_imports_stand_at_the_top(module):
    functions = [
        node
        for node in ast.walk(TREES[module])
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    ]
    inside = [
        f"line {node.lineno}"
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert inside == []
    called = {
        node.func.id
        for node in ast.walk(TREES[module])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert "__import__" not in called


@pytest.mark.parametrize(("library", "sole_importer"), SOLE_IMPORTERS.items())
def test_what_is_known_in_one_place_only(library, sole_importer):
    importers = {
        module for module in TREES if any(f"{name}.".startswith(f"{library}.") for name, _ in imports_of(module))
    }
    # The benchmark measures these libraries beside distckpt; nothing imports it but the command line.
    assert {module for module in importers if not module.startswith("_bench.")} == {sole_importer}


@pytest.mark.parametrize("library", ["pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"])
def test_no_code_is_ever_loaded(library):
    importers = [module for module in TREES if any(name.split(".")[0] == library for name, _ in imports_of(module))]
    assert importers == []


def test_torch_load_and_save_are_not_used():
    for module, tree in TREES.items():
        used = [
            node.lineno
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and (node.value.id, node.attr) in {("torch", "load"), ("torch", "save"), ("torch", "package")}
        ]
        assert used == [], module


def test_the_byte_layout_of_safetensors_is_known_in_one_place():
    """Its length field is a little-endian 64-bit integer; who writes or reads such a number knows the layout."""
    users = {
        module
        for module, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch("<[a-zA-Z]+|little", node.value)
    }
    assert users == {"_shard_file"}
