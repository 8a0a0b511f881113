"""Objects as bytes, without pickle, in one safetensors blob.

The objects are all that a state dict holds in addition to global tensors.

The blob's `__metadata__` holds `codec_version` and `tree`, a JSON text. Its U8 entries hold the raw
bytes of tensors, numpy arrays and large byte strings, in the order in which the tree refers to
them. `orders`, if it is there, has by the numbers of such entries the order in which the axes of
transposed tensors lay in memory; their bytes are row-major like all others. In the tree, None,
bool, int, finite floats, str, list and dict with str keys are themselves; anything else is
`{"$<kind>": <payload>}`. Integers that need more than 64 bits are tagged; JSON readers other than
Python's may round those beyond 2**53.

Properties:

- Supported: None, bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, OrderedDict,
  Counter, deque, defaultdict with a builtin type as its factory, set, frozenset, slice, range,
  Namespace, SimpleNamespace, date, datetime (naive, or with a `datetime.timezone`), timedelta,
  paths of pathlib, dense tensors, torch.dtype, torch.device, torch.Size, numpy arrays and scalars
  of numbers, dates or text, and registered classes, but no subclasses of these.
- The same values of the same types in the same order give the same bytes; the order of a set does
  not matter.
- A value that is referred to twice is written twice; a cycle is an error.
- Tensors come back as plain CPU tensors that do not require a gradient, Parameters too. Attributes
  set on a tensor or on an OrderedDict are not stored. The axes of transposed tensors keep their
  order in memory; arrays come back in C order.
- Reading builds only the types listed in this module and those that the program registered itself.
"""

from __future__ import annotations

import logging
import re
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
import xxhash

from distckpt._base.errors import (
    CheckpointingException,
    CorruptCheckpointError,
    UnsupportedObjectError,
)
from distckpt._base.tree import (
    CONTAINERS,
    Position,
    children_of,
    dotted,
    is_plain_container,
    map_nodes,
    rebuilt,
)
from distckpt._format import safetensors_file
from distckpt._format.codec.decode import Entries, decode_node, require
from distckpt._format.codec.encode import (
    KEY,
    UnknownObject,
    Writer,
    encode_inline,
    encode_node,
    encoders,
    how_to_register,
    unknown_objects,
)
from distckpt._format.codec.tree import (
    ITEM,
    MAX_DEPTH,
    NOT_STORED,
    REGISTERED,
    REGISTERED_NAMES,
    Json,
    Raw,
    Registration,
    default_functions,
    entry_name,
    error_about_classes,
    to_text,
    type_name,
)

logger = logging.getLogger(__name__)

CODEC_VERSION = "1"

_MAX_TREE_CHARS = 1 << 24
"""Length from which a tree becomes an entry. The header then stays well under the size that
safetensors readers accept.
"""
_TREE_ENTRY = "tree"

_Class = TypeVar("_Class", bound=type)


def encode(obj: object, *, refuses_left_out: bool = False) -> bytes:
    """Encode an object as a complete safetensors file.

    Raises:
        UnsupportedObjectError: it holds a value that cannot be stored; the message names it. With
            `refuses_left_out`, also the place of a value that an earlier save has left out.
    """
    writer = Writer()
    writer.refuses_left_out = refuses_left_out
    writer.unregistered = {}
    try:
        tree = to_text(encode_node(obj, writer))
    except RecursionError as error:
        raise writer.unsupported(
            obj, "the call stack is too deep here", "Nest containers less deeply."
        ) from error
    if writer.unregistered:
        raise error_about_classes(writer.unregistered)
    try:
        return _join_blob(tree, writer)
    except ValueError as error:
        raise writer.unsupported(
            obj, str(error), "Keep large numbers of tensors outside of objects."
        ) from error


def without_unsupported(tree: object) -> tuple[object, list[str]]:
    """Return a tree with placeholders for values that cannot be encoded.

    An `UnknownObject` replaces each leaf that cannot be, and each entry of a dict whose key cannot
    be. Their problems are returned, too.
    """
    problems: list[str] = []

    def noted(position: Position, node: object, fault: str) -> UnknownObject:
        if not isinstance(node, UnknownObject):
            node = _left_out(node, fault)
        why: object = fault
        if node.name.startswith(NOT_STORED):
            why = node.state
        problems.append(f"{dotted(position)!r}: {why}")
        return node

    def storable(position: Position, node: object) -> object:
        if type(node) is dict:
            faults = [_fault_of({key: None}) for key in node]
            if faults and all(faults):
                return noted(position, node, faults[0])
            numbered = enumerate(zip(faults, node.items(), strict=True))
            # The replacement of an entry is noted when its turn comes.
            return dict(_entry(number, *item, fault) for number, (fault, item) in numbered)
        if is_plain_container(node):
            return node
        fault = _fault_of(node)
        if not fault:
            return node
        return noted(position, node, fault)

    return map_nodes(storable, without_cycles(tree), is_plain_container), problems


def _fault_of(value: object) -> str:
    """Return why a value cannot be stored; "" if it can."""
    try:
        encode(value, refuses_left_out=True)
    except UnsupportedObjectError as error:
        return str(error)
    return ""


def _entry(number: int, key: object, value: object, fault: str) -> tuple[object, object]:
    """Return an entry of a dict, or its replacement.

    It is replaced where its key has a fault.
    """
    if not fault:
        return key, value
    return f"<key {number} of type {type_name(type(key))}>", _left_out(key, fault)


def _left_out(value: object, fault: str) -> UnknownObject:
    return UnknownObject(NOT_STORED + type_name(type(value)), fault)


def without_cycles(tree: object) -> object:
    """Return a tree with placeholders for cyclic or too deep containers.

    An `UnknownObject` replaces each.
    """
    enclosing: list[int] = []

    def copied(node: Any) -> Any:
        if not isinstance(node, CONTAINERS):
            return node
        if id(node) in enclosing:
            return _left_out(node, "it contains itself")
        if len(enclosing) >= MAX_DEPTH:
            return _left_out(node, f"it lies in more than {MAX_DEPTH} containers")
        enclosing.append(id(node))
        children = [copied(child) for _, child in children_of(node)]
        enclosing.pop()
        return rebuilt(node, children)

    return copied(tree)


def decode(blob: bytes | bytearray | memoryview, *, placeholders: bool = False) -> object:
    """Decode a result of `encode`.

    Tensors and arrays are copies, which may be written to. Objects of classes that are not
    registered are an error; with `placeholders`, they become `UnknownObject`s.
    """
    view = memoryview(blob).cast("B")
    try:
        tree, entries = _split_blob(view)
        obj = decode_node(safetensors_file.parse_json(tree), entries, 0)
        require(not entries, f"nothing refers to the entries {sorted(entries)[:3]}")
    except (CheckpointingException, MemoryError):
        # Sizes are checked against the blob, so a lack of memory is no sign of damage.
        raise
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        raise CorruptCheckpointError(
            f"An encoded object of {len(view)} bytes is damaged ({problem[:500]}). "
            "Load another checkpoint, or restore the file that holds it from a copy."
        ) from error
    if entries.has_unknown and not placeholders:
        refuse_unknown(obj)
    return obj


def refuse_unknown(
    obj: object, is_wanted: Callable[[tuple[object, ...]], bool] = lambda path: True
) -> None:
    """Refuse a decoded object that holds a requested unknown object.

    An object of an unknown class in a place that is not requested is fine. The error is an
    UnsupportedObjectError.
    """
    for path, unknown in unknown_objects(obj):
        if is_wanted(path):
            where = "".join(f"[{step!r:.60}]" for step in path)
            raise UnsupportedObjectError(
                f"The object{where and ' at '}{where}: {how_to_register(unknown)}"
            )


def fingerprints(obj: object) -> dict[str, str]:
    """Hash every leaf, to find the differing entries of two objects.

    A leaf is anything but a non-empty dict or list. Returns path -> xxh3-64 of the encoded leaf, as
    16 hex digits. Paths read `rng[2]` for items of lists, `args.lr` or `state.0` (int key) for
    those of dicts; other keys are encoded: `args["a.b"]`, `args[null]`. Different places have
    different paths, the same on every rank. The path of `obj` itself is `""`.
    """
    return {path: digest for path, (digest, _) in leaves(obj).items()}


def leaves(obj: object) -> dict[str, tuple[str, object]]:
    """Return path -> hash and value of each leaf, see `fingerprints`."""
    hashes: dict[str, tuple[str, object]] = {}
    writer = Writer()
    try:
        _collect_leaves(obj, "", writer, hashes)
    except RecursionError as error:
        raise writer.unsupported(
            obj, "the call stack is too deep here", "Nest containers less deeply."
        ) from error
    return hashes


def _collect_leaves(
    obj: object, name: str, writer: Writer, found: dict[str, tuple[str, object]]
) -> None:
    """Add the leaves of `obj` and their hashes to a dict.

    The dict is by path; `name` is the path of `obj`.
    """
    if type(obj) not in (dict, list) or not obj:
        writer.entries.clear()
        digest = xxhash.xxh3_64(to_text(encode_node(obj, writer)).encode())
        for raw in writer.entries:
            digest.update(raw)
        found[name] = (digest.hexdigest(), obj)
        return
    items: list[tuple[object, object]]
    if isinstance(obj, dict):
        items = list(obj.items())
        suffixes = [_key_suffix(node) for node in encode_inline(obj, KEY, writer)]
    else:
        items = list(enumerate(cast("list[object]", obj)))
        suffixes = [f"[{i}]" for i, _ in items]
    writer.enter(obj)
    for (key, child), suffix in zip(items, suffixes, strict=True):
        writer.path[-1] = (ITEM, key)
        path = name + suffix if name else suffix.removeprefix(".")
        _collect_leaves(child, path, writer, found)
    writer.leave(obj)


def _key_suffix(node: Json) -> str:
    # From the encoded key, which is the same on all ranks, unlike the repr of a set.
    readable = type(node) is int or (type(node) is str and re.fullmatch(r"[^\W\d][\w-]*", node))
    return f".{node}" if readable else f"[{to_text(node)}]"


def register_object_type(
    cls: _Class,
    name: str | None = None,
    *,
    to_state: Callable[[Any], object] | None = None,
    from_state: Callable[[Any], object] | None = None,
) -> _Class:
    """Register a class, so that its objects can be saved and loaded.

        @distckpt.register_object_type
        @dataclasses.dataclass
        class Schedule: ...

    Enum classes, dataclasses and namedtuple classes need no functions. Members of an Enum are
    stored by name (flags by value), other objects by their fields, from which they are rebuilt
    without calling `__init__`; a field that an older checkpoint lacks gets its default. Subclasses
    must be registered themselves.

    Args:
        cls: the class. Register it before saving and before loading, on every rank.
        name: identifies the class in checkpoints; by default `<module>.<qualified name>`. Give one
            that stays the same when the class moves.
        to_state: turns an object into one that can be stored: dicts, lists, tensors and so on.
        from_state: turns such a state back into an object.

    Returns:
        `cls`, so that this can be used as a decorator.

    Raises:
        TypeError: `cls` is not a class, or it needs both functions and they are not given.
        ValueError: `name` belongs to another class, `cls` has another name already, or its objects
            are stored without being registered.
    """
    _check_is_registrable(cls, to_state, from_state)
    if to_state is None or from_state is None:
        to_state, from_state = default_functions(cls)
    if name is None and cls.__module__ in ("__main__", "__mp_main__"):
        logger.warning(
            "%s is registered as %r, which another program does not find or takes for a class of "
            "its own: give name=, such as register_object_type(%s, %r).",
            cls.__qualname__, type_name(cls), cls.__qualname__, f"my_project.{cls.__qualname__}",
        )  # fmt: skip
    if name is None:
        name = type_name(cls)
    _check_is_free(cls, name)
    _register(Registration(cls, name, to_state, from_state))
    return cls


def _register(registration: Registration) -> None:
    REGISTERED[registration.cls] = REGISTERED_NAMES[registration.name] = registration


def _check_is_registrable(cls: type, to_state: object, from_state: object) -> None:
    if not isinstance(cls, type):
        raise TypeError(f"register_object_type takes a class, not {cls!r}")
    if (to_state is None) != (from_state is None):
        raise TypeError(f"{type_name(cls)}: give both to_state and from_state, or neither")
    if cls in encoders() or issubclass(cls, np.generic):
        raise ValueError(f"{type_name(cls)} is stored without being registered")


def _check_is_free(cls: type, name: str) -> None:
    """Check that neither the name nor the class is registered otherwise."""
    by_name = REGISTERED_NAMES.get(name)
    by_class = REGISTERED.get(cls)
    if by_name is not None and by_name.cls is not cls:
        raise ValueError(
            f"the name {name!r} is registered for another class, {by_name.cls!r}; give another "
            "name="
        )
    if by_class is not None and by_class.name != name:
        raise ValueError(
            f"{type_name(cls)} is registered under the name {by_class.name!r} already, not {name!r}"
        )


# By name, as classes of programs: an earlier release that reads them names the missing class.
_register(Registration(Counter, "collections.Counter", dict, Counter))
_register(
    Registration(
        deque,
        "collections.deque",
        lambda items: [items.maxlen, *items],
        lambda state: deque(state[1:], state[0]),
    )
)


def _join_blob(tree: str, writer: Writer) -> bytes:
    named: dict[str, Raw] = {entry_name(i): raw for i, raw in enumerate(writer.entries)}
    metadata = {"codec_version": CODEC_VERSION, "tree": tree}
    # A lone surrogate, in the name of a registered class, is an error even in a short tree.
    encoded = tree.encode()
    if len(tree) > _MAX_TREE_CHARS:
        named[_TREE_ENTRY] = encoded
        metadata = {"codec_version": CODEC_VERSION, "tree_entry": _TREE_ENTRY}
    if writer.orders:
        metadata["orders"] = to_text(writer.orders)
    return safetensors_file.join_file(named, metadata)


def _split_blob(blob: memoryview) -> tuple[str, Entries]:
    header_bytes = safetensors_file.header_length(blob[:8], len(blob))
    metadata, layout = safetensors_file.parse_header(blob[:header_bytes], len(blob))
    version = metadata.get("codec_version")
    if version != CODEC_VERSION and str(version).isdecimal():
        raise CorruptCheckpointError(
            f"An encoded object is of codec version {version:.50}; this release of distckpt reads "
            f"version {CODEC_VERSION}. Install a newer release: pip install --upgrade distckpt"
        )
    if version != CODEC_VERSION:
        raise ValueError(f"codec version {version!r:.50}, this distckpt reads {CODEC_VERSION!r}")
    entries = Entries()
    for entry in layout:
        require(entry.dtype == "U8" and len(entry.shape) == 1, "an entry is not of bytes")
        entries[entry.name] = blob[entry.first_byte : entry.first_byte + entry.num_bytes]
    entries.orders = safetensors_file.parse_json(metadata.get("orders", "{}"))
    if "tree_entry" in metadata:
        return str(entries.pop(_TREE_ENTRY), "utf-8"), entries
    return metadata["tree"], entries
