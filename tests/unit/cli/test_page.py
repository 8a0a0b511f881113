"""The file that `inspect --html` writes: what is in it. It is looked at in
tests/processes/cli/test_page.py.
"""

from __future__ import annotations

import base64
import gzip
import json
import re

import numpy as np
import safetensors.numpy
import torch

import distckpt
from distckpt import ShardedTensor
from tests.support.cli_command import call, call_error, call_json


def content_of(path):
    (data,) = re.findall(
        r'<script type="application/octet-stream" id="data">([A-Za-z0-9+/=]+)</script>',
        path.read_text(),
    )
    return json.loads(gzip.decompress(base64.b64decode(data)))


def test_the_data_are_those_of_the_checkpoint(tmp_path, capsys):
    values = {"a.weight": torch.ones(8, 4), "</script>": torch.ones(3), "b": torch.tensor(1.0)}
    state = {key: ShardedTensor.from_rank_offsets(key, value) for key, value in values.items()}
    distckpt.save({**state, "step": 3, "big": float("nan")}, tmp_path / "one")
    distckpt.reshard(tmp_path / "one", tmp_path / "c", num_ranks=2, grids={"a.weight": (2, 1)})
    assert call(capsys, "inspect", tmp_path / "c", "--html", tmp_path / "c.html") == ""
    content, facts = content_of(tmp_path / "c.html"), call_json(capsys, "inspect", tmp_path / "c")
    assert (content["files"], content["writers"], content["chunks"]) == (
        facts["files"],
        facts["writers"],
        facts["num_chunks"],
    )
    assert (content["title"], content["lines"][0]) == ("c", ["", facts["location"]])
    assert json.loads(content["common"]) == {"step": 3, "big": "NaN"}
    tensors = {key: rest for key, *rest in content["tensors"]}
    assert tensors.keys() == values.keys()
    for key, (dtype, shape, size, chunks, tied, change) in tensors.items():
        assert (dtype, shape, size, tied, change) == (
            "F32",
            list(values[key].shape),
            values[key].nbytes,
            None,
            None,
        )
        listed = call_json(capsys, "inspect", tmp_path / "c", "--key", key)["chunks"]
        assert [[content["owners"][owner], *rest] for owner, *rest in chunks] == [
            [chunk["owner"], chunk["offset"], chunk["shape"], chunk["num_bytes"]]
            for chunk in listed
        ]
    page = (tmp_path / "c.html").read_text()
    assert (
        re.findall(r"""(?:src|href)="(?!data:)|https?://(?!www\.w3\.org/2000/svg")|@import""", page)
        == []
    )


def test_a_page_begins_with_what_is_wrong(tmp_path, capsys):
    distckpt.save({"rank": {"objects": [1]}}, tmp_path / "c")
    (file,) = (tmp_path / "c").glob("*/*.safetensors")
    file.unlink()
    call(capsys, "inspect", tmp_path / "c", "--html", tmp_path / "c.html", code=1)
    content = content_of(tmp_path / "c.html")
    assert content["problems"] == [f"{file}: the file is missing"]


def test_a_page_of_many_tensors_is_small(tmp_path, capsys):
    """Each of 2,000 tensors has chunks of two ranks."""
    keys = [f"model.layers.{i // 100}.mlp.experts.{i % 100}.down_proj.weight" for i in range(2_000)]
    (tmp_path / "shards").mkdir()
    for rank in range(2):
        info = json.dumps({key: {"saved_offsets": [rank, 0]} for key in keys})
        name = f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
        arrays = {key: np.zeros((1, 4), np.float32) for key in keys}
        safetensors.numpy.save_file(arrays, tmp_path / "shards" / name, {"DCP_SHARDING_INFO": info})
    call(capsys, "inspect", tmp_path / "shards", "--html", tmp_path / "c.html")
    assert len(content_of(tmp_path / "c.html")["tensors"]) == 2_000
    assert (tmp_path / "c.html").stat().st_size < 200_000


def test_a_page_of_differences(tmp_path, capsys):
    for step, (name, factor) in enumerate((("a", 1.0), ("b", 1.5))):
        values = {"x.same": torch.ones(4), "x.other": torch.full((4,), factor), "y": torch.ones(1)}
        values[f"x.only_{name}"] = torch.ones(2)
        state = {key: ShardedTensor.from_rank_offsets(key, v) for key, v in values.items()}
        distckpt.save({**state, "step": step}, tmp_path / name)
    call(capsys, "diff", tmp_path / "a", tmp_path / "b", "--html", tmp_path / "d.html", code=1)
    content = content_of(tmp_path / "d.html")
    assert content["title"] == "1 of 3 tensors differs, 1 only in A, 1 only in B"
    assert content["objects"] == [["common state: step", "0", "1"]]
    call(
        capsys,
        "diff",
        tmp_path / "a",
        tmp_path / "b",
        "--keys",
        "x.",
        "--html",
        tmp_path / "d.html",
        code=1,
    )
    content = content_of(tmp_path / "d.html")
    assert (content["objects"], content["lines"][-1]) == (
        [],
        ["", "Objects and common state were not compared."],
    )
    found = {key: change for key, *_, change in content["tensors"]}
    assert found.keys() == {"x.same", "x.other", "x.only_a", "x.only_b"}
    assert found["x.same"] is None
    assert (found["x.other"]["max"], found["x.other"]["text"]) == (0.5, "4 of 4")
    assert abs(found["x.other"]["rate"] - 1 / 3) < 1e-12
    assert (found["x.only_a"]["text"], found["x.only_b"]["text"]) == ("only in A", "only in B")


def test_a_page_that_cannot_be_written_is_named(tmp_path, capsys):
    distckpt.save({"step": 1}, tmp_path / "c")
    for path in (tmp_path, tmp_path / "nothing" / "c.html"):
        assert f"The page cannot be written to '{path}': " in call_error(
            capsys, "inspect", tmp_path / "c", "--html", path
        )
