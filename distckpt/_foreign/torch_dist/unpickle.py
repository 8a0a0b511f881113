"""Reading the pickles of other programs as data.

The machine imports nothing and calls only given functions.

A pickle is a program whose instructions name functions and the arguments to call them with. Here,
names are only looked up in a table of the caller, which has functions of this package that make
plain values. A name that is not in the table is refused before anything is made of it. The pickle
itself bounds all sizes: no instruction allocates more memory than it has bytes, nothing is copied
again and again, and `check_size` finds small pickles that amount to large objects.

A subclass of `pickle.Unpickler`, with a `find_class` that looks names up in the table, would be a
quarter as long, but `find_class` is the only hook of that machine. Whatever it returns, REDUCE,
NEWOBJ and OBJ then call anything callable that is on the stack, BUILD calls `__setstate__` or sets
attributes of anything, SETITEMS and APPENDS call methods of whatever is there, and LONG_BINPUT with
a large number allocates gigabytes before any of our code runs. Here, only a `Made` can be called,
which no pickle can make; items go to plain lists, dicts and sets; only `set_state` gives states;
and the arguments of a call are measured first.
"""

from __future__ import annotations

import io
import itertools
import pickletools
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

GlobalName = tuple[str, str]
"""Module and qualified name."""

_MARK = object()
_MAX_DEPTH = 256
_EXTRA_WORK = 100_000


class RefusedGlobalError(ValueError):
    """A pickle names a global outside the table; `name` includes the module."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"the pickle names {name!r:.200}, which is not among the classes that such files hold"
        )
        self.name = name


class Made(NamedTuple):
    """A function or class in the table: where a pickle calls it, `make` is called instead."""

    name: str
    make: Callable[..., Any]


def made(functions: Mapping[GlobalName, Callable[..., Any]]) -> dict[GlobalName, Made]:
    """Return the table entries of functions by their names in pickles."""
    return {name: Made(".".join(name), function) for name, function in functions.items()}


class Record:
    """Stands for an object that is not built.

    It has the name of its class, and its state, which is mostly attributes by name.
    """

    __slots__ = ("kind", "state")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.state: Any = {}

    def get(self, name: str, default: Any = None) -> Any:
        """Return an attribute."""
        if isinstance(self.state, dict):
            return self.state.get(name, default)
        return default


def record(name: str) -> Made:
    """Return a table entry for a class read as records."""
    kind = name.rpartition(".")[2]
    return Made(name, lambda *args: Record(kind))


def _keep_state(obj: Any, state: Any) -> Any:
    if type(obj) is not Record:
        raise ValueError(f"a state for a {type(obj).__name__}")
    # The pair is (attributes, slots).
    if type(state) is tuple and len(state) == 2 and state[0] is None and type(state[1]) is dict:
        state = state[1]
    obj.state = state
    return obj


def read_pickle(
    data: bytes,
    table: Mapping[GlobalName, Any],
    *,
    persistent: Callable[[Any], Any] | None = None,
    set_state: Callable[[Any, Any], Any] = _keep_state,
) -> Any:
    """Run a pickle and return its object.

    Args:
        data: the pickle.
        table: a `Made` or a plain value for each global that is admitted.
        persistent: makes a value of a persistent id; None refuses persistent ids.
        set_state: returns an object with the state it is given.

    Raises:
        RefusedGlobalError: the pickle names another global.
        ValueError: it is damaged, or has unusual instructions.
    """
    # Limits the arguments of functions in total, as each could copy, hash or print them.
    machine = _Machine(table, persistent, set_state, work=4 * len(data) + _EXTRA_WORK)
    try:
        return machine.run(data)
    except (IndexError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise ValueError(f"not a sound pickle ({type(error).__name__}: {error!s:.200})") from error


def check_size(obj: Any, limit: int) -> int:
    """Count the values in an object.

    Texts, byte strings, arrays and tensors count by characters or bytes.

    Raises:
        ValueError: it contains itself, or the same parts so often that it amounts to more than
            `limit` values.
    """
    stack = [(obj, 0)]
    count = 0
    while stack:
        node, depth = stack.pop()
        count += 1 + _extent(node)
        if count > limit or depth > _MAX_DEPTH:
            raise ValueError(
                f"it contains itself, or amounts to more than {limit} values or {_MAX_DEPTH} levels"
            )
        for child in _children(node):
            stack.append((child, depth + 1))
    return count


def _extent(node: Any) -> int:
    if isinstance(node, (bytes, bytearray, str)):
        return len(node)
    if isinstance(node, io.BytesIO):
        return node.getbuffer().nbytes
    return int(getattr(node, "nbytes", 0))


def _children(node: Any) -> Iterable[Any]:
    if isinstance(node, dict):
        return itertools.chain(node, node.values())
    if isinstance(node, (list, tuple, set, frozenset)):
        return node
    if hasattr(node, "__dict__") and not callable(node):
        return (vars(node),)
    return ()


def hashable(key: Any) -> Any:
    """Return a key, or raise ValueError unless it is simple.

    Hashing deeply nested tuples would exhaust the C stack.
    """
    parts = key if isinstance(key, tuple) else (key,)
    for part in parts:
        if isinstance(part, tuple | frozenset | Made) or getattr(part, "__hash__", None) is None:
            raise ValueError(f"a key made of {type(part).__name__}")
    return key


@dataclass
class _Machine:
    """The state of one run; `work` is the number of values that calls may still be given."""

    table: Mapping[GlobalName, Any]
    persistent: Callable[[Any], Any] | None
    set_state: Callable[[Any, Any], Any]
    work: int
    stack: list[Any] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)
    places: dict[int, int] = field(default_factory=dict)
    """Memo places of the objects that a state may replace, by id."""

    def run(self, data: bytes) -> Any:
        for instruction, operand, position in pickletools.genops(data):
            name = instruction.name
            if name == "STOP":
                break
            action = _ACTIONS.get(name)
            if action is None:
                raise ValueError(f"instruction {name} at byte {position}")
            action(self, operand)
        if len(self.stack) != 1:
            raise ValueError("it ends with more or less than one object")
        return self.pop()

    # ---- memo

    def memorize(self, place: Any) -> None:
        if place is None:
            place = len(self.memo)
        value = self.memo[place] = self.top()
        if type(value) not in _KEPT:
            self.places[id(value)] = place

    # ---- stack

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def top(self, *types: type) -> Any:
        value = self.stack[-1]
        if value is _MARK:
            raise ValueError("a mark where an object should be")
        if types and type(value) not in types:
            raise ValueError(f"items for a {type(value).__name__}")
        return value

    def pop(self) -> Any:
        value = self.top()
        self.stack.pop()
        return value

    def pop_to_mark(self) -> list[Any]:
        items: list[Any] = []
        while (item := self.stack.pop()) is not _MARK:
            items.append(item)
        items.reverse()
        return items

    def push_tuple(self, size: int) -> None:
        items = [self.pop() for _ in range(size)]
        self.push(tuple(reversed(items)))

    def set_items(self, flat: list[Any]) -> None:
        if len(flat) % 2:
            raise ValueError("a key without a value")
        target = self.top(dict, OrderedDict, defaultdict)
        for key, value in zip(flat[::2], flat[1::2], strict=True):
            target[hashable(key)] = value

    def add_to_set(self) -> None:
        items = list(map(hashable, self.pop_to_mark()))
        self.top(set).update(items)

    def extend_list(self, items: list[Any]) -> None:
        self.top(list).extend(items)

    # ---- names and calls

    def find(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise ValueError("a global whose name is not a string")
        try:
            value = self.table[module, name]
        except KeyError:
            raise RefusedGlobalError(f"{module}.{name}") from None
        self.push(value)

    def reduce(self) -> None:
        args = self.pop()
        function = self.pop()
        if type(function) is not Made or type(args) is not tuple:
            raise ValueError(f"a call of a {type(function).__name__}")
        if args:
            self.work -= check_size(args, self.work)
        try:
            self.push(function.make(*args))
        except (
            TypeError,
            ValueError,
            LookupError,
            ArithmeticError,
            RuntimeError,
            AttributeError,
        ) as error:
            raise ValueError(
                f"{function.name} with arguments it does not take ({error!s:.200})"
            ) from error

    def new_with_keywords(self) -> None:
        if self.pop() != {}:
            raise ValueError("an object made with keywords")
        self.reduce()

    def build(self) -> None:
        state = self.pop()
        obj = self.pop()
        if type(state) is tuple:
            # The content of an array is copied.
            self.work -= sum(len(item) for item in state if isinstance(item, (bytes, bytearray)))
        if self.work < 0:
            raise ValueError("it uses its own parts too often")
        made = self.set_state(obj, state)
        if made is not obj and self.memo.get(self.places.get(id(obj), -1)) is obj:
            self.memo[self.places[id(obj)]] = made
        self.push(made)

    def load_persistent(self) -> None:
        if self.persistent is None:
            raise ValueError("a persistent id")
        self.push(self.persistent(self.pop()))


_KEPT = {Record, Made, str, bytes, int, tuple, list, dict}
"""Types of objects that a state changes in place."""

# All instructions except the ones of protocols 0 and 1, extension codes and out-of-band buffers.
_VALUES = (
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT",
    "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
    "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8",
)  # fmt: skip
"""Instructions that push their operand."""
_ACTIONS: dict[str, Callable[[_Machine, Any], object]] = {
    **dict.fromkeys(_VALUES, _Machine.push),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda m, place: m.push(m.memo[place])),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT", "MEMOIZE"), _Machine.memorize),
    **dict.fromkeys(("PROTO", "FRAME"), lambda m, _: None),  # They say nothing about the object.
    "MARK": lambda m, _: m.push(_MARK),
    "POP": lambda m, _: m.stack.pop(),
    "POP_MARK": lambda m, _: m.pop_to_mark(),
    "DUP": lambda m, _: m.push(m.top()),
    "NONE": lambda m, _: m.push(None),
    "NEWTRUE": lambda m, _: m.push(True),
    "NEWFALSE": lambda m, _: m.push(False),
    "EMPTY_LIST": lambda m, _: m.push([]),
    "LIST": lambda m, _: m.push(m.pop_to_mark()),
    "APPEND": lambda m, _: m.extend_list([m.pop()]),
    "APPENDS": lambda m, _: m.extend_list(m.pop_to_mark()),
    "EMPTY_TUPLE": lambda m, _: m.push(()),
    "TUPLE": lambda m, _: m.push(tuple(m.pop_to_mark())),
    "TUPLE1": lambda m, _: m.push_tuple(1),
    "TUPLE2": lambda m, _: m.push_tuple(2),
    "TUPLE3": lambda m, _: m.push_tuple(3),
    "EMPTY_DICT": lambda m, _: m.push({}),
    "SETITEM": lambda m, _: m.set_items([m.pop(), m.pop()][::-1]),
    "SETITEMS": lambda m, _: m.set_items(m.pop_to_mark()),
    "EMPTY_SET": lambda m, _: m.push(set()),
    "ADDITEMS": lambda m, _: m.add_to_set(),
    "FROZENSET": lambda m, _: m.push(frozenset(hashable(item) for item in m.pop_to_mark())),
    "GLOBAL": lambda m, name: m.find(*name.split(" ", 1)),
    "STACK_GLOBAL": lambda m, _: m.find(*[m.pop(), m.pop()][::-1]),
    "REDUCE": lambda m, _: m.reduce(),
    "NEWOBJ": lambda m, _: m.reduce(),
    "NEWOBJ_EX": lambda m, _: m.new_with_keywords(),
    "BUILD": lambda m, _: m.build(),
    "BINPERSID": lambda m, _: m.load_persistent(),
}
