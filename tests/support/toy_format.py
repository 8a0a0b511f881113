"""A format that a program brings itself, registered in a few lines: an index, and raw files."""

from __future__ import annotations

import json
import os

import torch

from distckpt import ShardedObject
from distckpt.readers import OBJECT, Reader, Region, StoredPiece, build_manifest, read_chunks

WEIGHT = torch.arange(32.0).view(4, 8)
BIAS = torch.arange(8, dtype=torch.bfloat16)
SAMPLER = {"epoch": 3, "seen": [1, 2]}


class ToyReader(Reader):
    """Reads a directory with `index.toy.json`, which lists pieces of tensors and objects in `.bin`
    files.
    """

    name = "toy"

    def detect(self, location, marker):
        return os.path.exists(f"{location}/index.toy.json")

    def manifest(self, location):
        with open(f"{location}/index.toy.json") as file:
            index = json.load(file)
        pieces = [
            StoredPiece(
                p["key"],
                p["dtype"],
                Region(tuple(p["offset"]), tuple(p["shape"])),
                None,
                p["file"],
                *p["bytes"],
            )
            for p in index["pieces"]
        ]
        return build_manifest(self.name, location, pieces, fields={"step": index["step"]})

    def load_objects(self, stored, chunks):
        return [json.loads(content) for content in read_chunks(stored, chunks)]

    def load_common_state(self, stored):
        return {"step": stored.manifest.origin["step"]}


def write_toy(path, sampler=SAMPLER):
    path.mkdir()
    left, right, bias = WEIGHT[:, :3].numpy(), WEIGHT[:, 3:].numpy(), BIAS.view(torch.int16).numpy()
    text = json.dumps(sampler).encode()
    (path / "a.bin").write_bytes(left.tobytes() + bias.tobytes())
    (path / "b.bin").write_bytes(text + right.tobytes())
    pieces = [
        ("w", "F32", [0, 0], [4, 3], "a.bin", [0, 48]),
        ("w", "F32", [0, 3], [4, 5], "b.bin", [len(text), 80]),
        ("bias", "BF16", [0], [8], "a.bin", [48, 16]),
        ("sampler", OBJECT, [0], [1], "b.bin", [0, len(text)]),
    ]
    fields = ("key", "dtype", "offset", "shape", "file", "bytes")
    index = {"step": 7, "pieces": [dict(zip(fields, piece, strict=True)) for piece in pieces]}
    (path / "index.toy.json").write_text(json.dumps(index))
    return path


def sampler_shard(rank=0):
    return ShardedObject("sampler", None, (1,), (0,), replica_id=rank)
