"""Pickles and archives made by somebody who means harm."""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile


class Call:
    """Pickles as a call."""

    def __init__(self, *reduced):
        self.reduced = reduced

    def __reduce__(self):
        return self.reduced


def tuples(depth):
    """Return the instructions for a tuple of 2**depth items."""
    return b")" + b"2\x86" * depth


PICKLES = {
    "os.system": b"cos\nsystem\n(S'touch harm'\ntR.",
    "os.system in protocol 4": pickle.dumps(Call(os.system, ("touch harm",)), 4),
    "exec": pickle.dumps(Call(exec, ("open('harm', 'w')",)), 2),
    "import of a module": b"\x80\x02chostile_module\nf\n.",
    "dots in a name": b"\x80\x04\x8c\x08builtins\x8c\x09exec.copy\x93.",
    "torch.load": b"\x80\x02ctorch\nload\nX\x04\0\0\0harm\x85R.",
    "class of PyTorch with a state": b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n"
    b")\x81}X\x0c\0\0\0__setstate__cos\nsystem\nsb.",
    "instance": b"(S'touch harm'\nios\nsystem\n.",
    "object": b"(cos\nsystem\nS'touch harm'\no.",
    "extension code": b"\x80\x02\x82\x01.",
    "persistent id": b"\x80\x02X\x01\0\0\0aQ.",
    "memo of two billion": b"\x80\x02]r\xff\xff\xff\x7f.",
    "bytes of 2**63": b"\x80\x04\x8e" + struct.pack("<Q", 2**63) + b".",
    "frame of 2**63": b"\x80\x04\x95" + struct.pack("<Q", 2**63) + b"N.",
    "number of two billion bytes": b"\x80\x02\x8b" + struct.pack("<i", 2**31 - 1) + b"1.",
    "number of 100000 digits": b"\x80\x02\x8b"
    + struct.pack("<i", 50_000)
    + b"\x7f" * 50_000
    + b".",
    "tuples in tuples": b"\x80\x02" + tuples(60) + b".",
    "tuples in tuples as a key": b"\x80\x02}" + tuples(60) + b"Ns.",
    "tuples in tuples as sizes": b"\x80\x02ctorch\nSize\n" + tuples(60) + b"\x85R.",
    "tuples in tuples as a name": b"\x80\x02" + tuples(60) + tuples(60) + b"\x93.",
    "list in itself": b"\x80\x02]q\0h\0a.",
    "deep nesting": b"\x80\x02)" + b"\x85" * 10**5 + b".",
    "marks": b"\x80\x02" + b"(" * 10**5 + b".",
    "no end": b"\x80\x02]",
    "nothing": b"",
}


def zip_of(entries, compression=zipfile.ZIP_STORED):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    return file.getvalue()


def array_calls(count):
    """Return a pickle that makes very many arrays of the same bytes."""
    raw = bytes(2**20)
    begin = (
        b"\x80\x04\x8c\x08builtins\x8c\x09bytearray\x93\x94B"
        + struct.pack("<I", len(raw))
        + raw
        + b"\x94]"
    )
    return begin + b"h\0h\1\x85Ra" * count + b"."
