"""Reading the pickles of other programs as data: a machine that imports nothing and calls nothing it was not given.

A pickle is a program whose instructions name functions and say what to call them with. Here a name is only looked up
in a table that the caller gives; its entries are functions of this package that make plain values. What is not in the
table is refused by name before anything is made of it. Sizes are bounded by the pickle itself: no instruction
allocates more memory than it brings, what it brings is not copied again and again, and `check_size` finds small pickles
that amount to large objects.

Why this is no subclass of `pickle.Unpickler` with a `find_class` that looks names up in the table, a quarter as long:
`find_class` is the only hook of that machine. Whatever it returned, REDUCE, NEWOBJ and OBJ then call anything
callable that is on the stack, BUILD calls `__setstate__` or sets attributes of anything, SETITEMS and APPENDS call
methods of whatever is there, and LONG_BINPUT with a large number allocates gigabytes before any of our code runs. Here
a call needs a `Made`, which no pickle can make; items go to plain lists, dicts and sets; states are given by
`set_state` alone; and the arguments of a call are measured first.
"""

from __future__ import annotations

import struct
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

GlobalName = tuple[str, str]
"""Module and qualified name."""

_MARK = object()
_MAX_DEPTH = 256
_EXTRA_WORK = 100_000


class RefusedGlobalError(ValueError):
    """Report that a pickle names a function or class (`name`, with its module) that is not in the table."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the pickle names {name!r:.200}, which is not among the classes that such files hold")
        self.name = name


class Made(NamedTuple):
    """A function or class of the table as a pickle gets it: `make` is called in its place."""

    name: str
    make: Callable[..., Any]


class Record:
    """An object of a class that is not built: its class name, the arguments it was made with, and its state.

    `state` is what it was given afterwards, attributes by name in most cases.
    """

    __slots__ = ("args", "kind", "state")

    def __init__(self, kind: str, args: tuple[Any, ...] = ()) -> None:
        self.kind = kind
        self.args = args
        self.state: Any = {}

    def get(self, name: str, default: Any = None) -> Any:
        """Return an attribute."""
        return self.state.get(name, default) if isinstance(self.state, dict) else default


def record(name: str) -> Made:
    """Return a table entry for a class whose objects are read as records."""
    kind = name.rpartition(".")[2]
    return Made(name, lambda *args: Record(kind, args))


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
    """Run a pickle and return its object; raise ValueError where it is damaged or has unusual instructions.

    `table` has for each admitted global a `Made` or a plain value; RefusedGlobalError names any other. `persistent`
    makes a value of a persistent id (None to refuse those), `set_state` returns an object with the state it is given.
    """
    machine = _Machine(data, table, persistent, set_state)
    try:
        return machine.run()
    except (IndexError, TypeError, KeyError, AttributeError, struct.error, OverflowError) as error:
        raise ValueError(f"not a sound pickle ({type(error).__name__}: {error!s:.200})") from error


def check_size(obj: Any, limit: int) -> int:
    """Count the values of an object, of texts and byte strings the characters and bytes.

    Raises ValueError for objects that contain themselves, or parts so often that they amount to more than `limit`
    values.
    """
    stack, count = [(obj, 0)], 0
    while stack:
        node, depth = stack.pop()
        count += 1 + (len(node) if isinstance(node, bytes | bytearray | str) else 0)
        if count > limit or depth > _MAX_DEPTH:
            raise ValueError(f"it contains itself, or amounts to more than {limit} values or {_MAX_DEPTH} levels")
        if isinstance(node, dict):
            stack.extend((child, depth + 1) for pair in node.items() for child in pair)
        elif isinstance(node, list | tuple | set | frozenset):
            stack.extend((child, depth + 1) for child in node)
        elif hasattr(node, "__dict__") and not callable(node):
            stack.append((vars(node), depth + 1))
    return count


def hashable(key: Any) -> Any:
    """Return a key if it is simple, else raise ValueError: hashing deeply nested tuples would exhaust the C stack."""
    parts = key if isinstance(key, tuple) else (key,)
    for part in parts:
        if isinstance(part, tuple | frozenset | Made) or getattr(part, "__hash__", None) is None:
            raise ValueError(f"a key made of {type(part).__name__}")
    return key


class _Machine:
    """The state of one run: position, stack and memo."""

    def __init__(
        self,
        data: bytes,
        table: Mapping[GlobalName, Any],
        persistent: Callable[[Any], Any] | None,
        set_state: Callable[[Any, Any], Any],
    ) -> None:
        self.data = data
        self.position = 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.table = table
        self.persistent = persistent
        self.set_state = set_state
        # What functions may be given in all: each could copy, hash or print it.
        self.work = 4 * len(data) + _EXTRA_WORK

    def run(self) -> Any:
        data, size = self.data, len(self.data)
        while self.position < size:
            code = data[self.position]
            self.position += 1
            if code == _STOP:
                if len(self.stack) != 1 or self.stack[0] is _MARK:
                    raise ValueError("it ends with more or less than one object")
                return self.stack[0]
            action = _ACTIONS.get(code)
            if action is None:
                raise ValueError(f"instruction {bytes([code])!r} at byte {self.position - 1}")
            action(self)
        raise ValueError("it is cut off")

    # ---- operands

    def take(self, count: int) -> bytes:
        start = self.position
        self.position += count
        if count < 0 or self.position > len(self.data):
            raise ValueError("it is cut off")
        return self.data[start : self.position]

    def number(self, num_bytes: int, signed: bool = False) -> int:
        # Stored with the lowest byte first.
        return int.from_bytes(self.take(num_bytes)[::-1], "big", signed=signed)

    def line(self) -> str:
        end = self.data.index(b"\n", self.position)
        text = self.data[self.position : end].decode()
        self.position = end + 1
        return text

    def text(self, length_bytes: int) -> str:
        return self.take(self.number(length_bytes)).decode("utf-8", "surrogatepass")

    # ---- stack

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        value = self.stack.pop()
        if value is _MARK:
            raise ValueError("a mark where an object should be")
        return value

    def pop_to_mark(self) -> list[Any]:
        items: list[Any] = []
        while (item := self.stack.pop()) is not _MARK:
            items.append(item)
        items.reverse()
        return items

    def top(self, *types: type) -> Any:
        value = self.stack[-1]
        if type(value) not in types:
            raise ValueError(f"items for a {type(value).__name__}")
        return value

    def set_items(self, flat: list[Any]) -> None:
        if len(flat) % 2:
            raise ValueError("a key without a value")
        target = self.top(dict, OrderedDict, defaultdict)
        for key, value in zip(flat[::2], flat[1::2], strict=True):
            target[hashable(key)] = value

    # ---- names and calls

    def find(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise ValueError("a global whose name is no text")
        if (module, name) not in self.table:
            raise RefusedGlobalError(f"{module}.{name}")
        self.push(self.table[module, name])

    def call(self, function: Any, args: Any) -> None:
        if type(function) is not Made or type(args) is not tuple:
            raise ValueError(f"a call of a {type(function).__name__}")
        if args:
            self.work -= check_size(args, self.work)
        try:
            self.push(function.make(*args))
        except (TypeError, ValueError, LookupError, ArithmeticError, RuntimeError, AttributeError) as error:
            raise ValueError(f"{function.name} with arguments it does not take ({error!s:.200})") from error

    def reduce(self) -> None:
        args = self.pop()
        self.call(self.pop(), args)

    def new_with_keywords(self) -> None:
        keywords = self.pop()
        if keywords != {}:
            raise ValueError("an object made with keywords")
        self.reduce()

    def build(self) -> None:
        state = self.pop()
        # The content of an array, of which a copy is made.
        self.work -= sum(len(item) for item in state if type(item) is bytes) if type(state) is tuple else 0
        if self.work < 0:
            raise ValueError("it uses its own parts too often")
        self.push(self.set_state(self.pop(), state))

    def load_persistent(self) -> None:
        if self.persistent is None:
            raise ValueError("a persistent id")
        self.push(self.persistent(self.pop()))

    def memoize(self, number: int) -> None:
        if self.stack[-1] is _MARK:
            raise ValueError("a mark where an object should be")
        self.memo[number] = self.stack[-1]

    def add_to_set(self) -> None:
        items = [hashable(item) for item in self.pop_to_mark()]
        self.top(set).update(items)

    def global_of_stack(self) -> None:
        name = self.pop()
        self.find(self.pop(), name)

    def extend_list(self, items: list[Any]) -> None:
        self.top(list).extend(items)


_STOP = ord(".")

_Action = Callable[[_Machine], None]


def _tuple_of(count: int) -> _Action:
    def action(m: _Machine) -> None:
        items = [m.pop() for _ in range(count)]
        m.push(tuple(reversed(items)))

    return action


def _discard(m: _Machine) -> None:
    m.stack.pop()


_BY_BYTE: dict[bytes, _Action] = {
    # Frames and versions say nothing about the object.
    b"\x80": lambda m: _ignore(m.take(1)),
    b"\x95": lambda m: _ignore(m.take(8)),
    b"(": lambda m: m.push(_MARK),
    b"0": _discard,
    b"1": lambda m: _ignore(m.pop_to_mark()),
    b"2": lambda m: m.push(m.stack[-1]),
    b"N": lambda m: m.push(None),
    b"\x88": lambda m: m.push(True),
    b"\x89": lambda m: m.push(False),
    b"J": lambda m: m.push(m.number(4, signed=True)),
    b"K": lambda m: m.push(m.number(1)),
    b"M": lambda m: m.push(m.number(2)),
    b"\x8a": lambda m: m.push(m.number(m.number(1), signed=True)),
    b"\x8b": lambda m: m.push(m.number(m.number(4), signed=True)),
    b"G": lambda m: m.push(struct.unpack(">d", m.take(8))[0]),
    b"X": lambda m: m.push(m.text(4)),
    b"\x8c": lambda m: m.push(m.text(1)),
    b"\x8d": lambda m: m.push(m.text(8)),
    b"B": lambda m: m.push(m.take(m.number(4))),
    b"C": lambda m: m.push(m.take(m.number(1))),
    b"\x8e": lambda m: m.push(m.take(m.number(8))),
    b"\x96": lambda m: m.push(bytearray(m.take(m.number(8)))),
    b"]": lambda m: m.push([]),
    b"a": lambda m: m.extend_list([m.pop()]),
    b"e": lambda m: m.extend_list(m.pop_to_mark()),
    b"l": lambda m: m.push(m.pop_to_mark()),
    b")": lambda m: m.push(()),
    b"t": lambda m: m.push(tuple(m.pop_to_mark())),
    b"\x85": _tuple_of(1),
    b"\x86": _tuple_of(2),
    b"\x87": _tuple_of(3),
    b"}": lambda m: m.push({}),
    b"s": lambda m: m.set_items([m.pop(), m.pop()][::-1]),
    b"u": lambda m: m.set_items(m.pop_to_mark()),
    b"\x8f": lambda m: m.push(set()),
    b"\x90": _Machine.add_to_set,
    b"\x91": lambda m: m.push(frozenset(hashable(item) for item in m.pop_to_mark())),
    b"h": lambda m: m.push(m.memo[m.number(1)]),
    b"j": lambda m: m.push(m.memo[m.number(4)]),
    b"q": lambda m: m.memoize(m.number(1)),
    b"r": lambda m: m.memoize(m.number(4)),
    b"\x94": lambda m: m.memoize(len(m.memo)),
    b"c": lambda m: m.find(m.line(), m.line()),
    b"\x93": _Machine.global_of_stack,
    b"R": _Machine.reduce,
    b"\x81": _Machine.reduce,
    b"\x92": _Machine.new_with_keywords,
    b"b": _Machine.build,
    b"Q": _Machine.load_persistent,
}
"""The action of each instruction, without those of protocols 0 and 1, extension codes and out-of-band buffers."""

_ACTIONS = {code[0]: action for code, action in _BY_BYTE.items()}


def _ignore(value: object) -> None:
    del value
