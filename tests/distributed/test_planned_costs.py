"""`distckpt plan` says what ranks then read and write.

Real models are divided by PyTorch itself over four ranks, and each call that reads, each request
and each file is counted.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import distckpt
from distckpt.modules import sharded_state_dict
from tests.support.calls import recorded
from tests.support.cli_command import call_json
from tests.support.harness import run
from tests.support.hooked_store import hooked_reads

NUM_RANKS = 4
LAYERS, EXPERTS = 4, 4
HIDDEN, INNER, VOCABULARY = 256, 6144, 8192
ATTENTION = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.v_proj": (HIDDEN // 2, HIDDEN),
    # Rows far apart, and rows so far apart that the gaps between their halves stay unread.
    "self_attn.o_proj": (HIDDEN, 40_000),
    "mlp.gate": (EXPERTS, HIDDEN),
    "input_layernorm": (HIDDEN,),
}
EXPERT = {
    "gate_proj": (INNER, HIDDEN),
    "up_proj": (INNER, HIDDEN),
    "down_proj": (HIDDEN, INNER),
}


def shapes_of(layers=range(LAYERS), experts=range(EXPERTS), first=True, last=True):
    """Return the shapes of the parameters in some layers, with some experts, by module."""
    shapes = {}
    if first:
        shapes["model.embed_tokens"] = (VOCABULARY, HIDDEN)
    for layer in layers:
        own = f"model.layers.{layer}"
        shapes |= {f"{own}.{name}": shape for name, shape in ATTENTION.items()}
        for expert in experts:
            shapes |= {f"{own}.mlp.experts.{expert}.{name}": s for name, s in EXPERT.items()}
    if last:
        shapes |= {"model.norm": (HIDDEN,), "lm_head": (VOCABULARY, HIDDEN)}
    return shapes


class Norm(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(size, dtype=torch.bfloat16))


def module_of(shape, name):
    if len(shape) == 1:
        return Norm(shape[0])
    rows, columns = shape
    if name == "embed_tokens":
        return torch.nn.Embedding(rows, columns, dtype=torch.bfloat16)
    return torch.nn.Linear(columns, rows, bias=False, dtype=torch.bfloat16)


def model_of(shapes):
    """Make a module on the meta device."""
    model = torch.nn.Module()
    with torch.device("meta"):
        for key, shape in shapes.items():
            *path, name = key.split(".")
            parent = model
            for part in path:
                if not hasattr(parent, part):
                    parent.add_module(part, torch.nn.Module())
                parent = getattr(parent, part)
            parent.add_module(name, module_of(shape, name))
    return model


def modules_named(model, *names):
    return {key: part for key, part in model.named_modules() if key.rpartition(".")[2] in names}


def apply_tp(model, mesh):
    plan = dict.fromkeys(
        modules_named(model, "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head"),
        ColwiseParallel(),
    )
    plan |= dict.fromkeys(modules_named(model, "o_proj", "down_proj"), RowwiseParallel())
    plan |= dict.fromkeys(
        modules_named(model, "embed_tokens"), RowwiseParallel(output_layouts=Shard(1))
    )
    parallelize_module(model, mesh, plan)


# --- Layouts: what a rank has, as a program of PyTorch's users divides it -------------------------


def replicas(rank):
    return model_of(shapes_of())


def fsdp(rank):
    model = model_of(shapes_of())
    fully_shard(model)
    return model


def tensor_parallel(rank):
    model = model_of(shapes_of())
    apply_tp(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"])
    return model


def pipeline(rank):
    stage = rank // 2
    layers = range(2 * stage, 2 * stage + 2)
    model = model_of(shapes_of(layers, first=stage == 0, last=stage == 1))
    apply_tp(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))["tp"])
    return model


def fsdp_of_tp(rank):
    model = model_of(shapes_of())
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    apply_tp(model, mesh["tp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def experts(rank):
    return model_of(shapes_of(experts=[rank]))


def fsdp_of_experts(rank):
    first = 2 * (rank % 2)
    model = model_of(shapes_of(experts=[first, first + 1]))
    # Ranks of the same experts shard them.
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "ep"))
    for part in modules_named(model, "experts").values():
        fully_shard(part, mesh=mesh["shard"])
    fully_shard(model, mesh=init_device_mesh("cpu", (NUM_RANKS,)))
    return model


LAYOUTS = {
    "tp=1": replicas,
    "fsdp": fsdp,
    "tp=2": tensor_parallel,
    "tp=2,pp=2": pipeline,
    "fsdp,tp=2": fsdp_of_tp,
    "ep=4": experts,
    "fsdp,ep=2": fsdp_of_experts,
}


# --- Loads ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A model directory in two files, as other programs write it."""
    folder = tmp_path_factory.mktemp("plan") / "model"
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"{key}.weight": torch.randn(shape, generator=generator).bfloat16()
        for key, shape in shapes_of().items()
    }
    weight_map = {}
    for number, part in enumerate(np.array_split(list(tensors), 2), 1):
        name = f"model-{number:05d}-of-00002.safetensors"
        save_file({key: tensors[key] for key in part.tolist()}, folder / name)
        weight_map |= dict.fromkeys(part.tolist(), name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return str(folder)


@pytest.fixture(scope="module")
def checkpoint(directory, tmp_path_factory):
    """The same as a checkpoint with checksums, which four ranks wrote."""
    path = str(tmp_path_factory.mktemp("plan") / "checkpoint")
    distckpt.reshard(directory, path, num_ranks=NUM_RANKS)
    return path


def load_and_save_counting(rank, divide, path, saved):
    """Load in both ways and save; return the bytes and numbers of the reads of both loads."""
    model = divide(rank)
    counts = []
    for share_reads in ("off", "on"):
        with reads_of_content(path) as lengths:
            distckpt.load(
                {"model": model}, path, strict="report", share_reads=share_reads, materialize="cpu"
            )
        counts.append((sum(lengths), len(lengths)))
    shards = sharded_state_dict(model)
    # Where several ranks hold a tensor, the order decides where their shares are cut.
    distckpt.save({key: shards[key] for key in distckpt.open(path).tensors if key in shards}, saved)
    return counts


@contextmanager
def reads_of_content(path):
    """Yield a list that gets the length of each read of tensors and objects, headers apart."""
    lengths, lock = [], threading.Lock()

    def note(file, start, stop):
        if file.endswith(".safetensors") and start and start > 8:
            with lock:
                lengths.append(stop - start)

    if path.startswith("hooked://"):
        with hooked_reads(note):
            yield lengths
        return
    with recorded(path) as calls:
        yield lengths
    lengths += [call.length for call in calls if call.name == "preadv"]


def plan(capsys, path, layout):
    """Plan for ranks that are each on a node of their own, so that each has figures."""
    words = ("plan", path, "--ranks", NUM_RANKS, "--nodes", NUM_RANKS, "--layout", layout)
    return call_json(capsys, *words)


CASES = [
    *(("directory", layout) for layout in LAYOUTS),
    ("checkpoint", "tp=2"),
    ("checkpoint", "fsdp,ep=2"),
    ("store", "tp=2"),
    ("store", "fsdp,tp=2"),
]


@pytest.mark.parametrize(("source", "layout"), CASES)
def test_reads_and_writes_are_those_of_real_ranks(capsys, request, tmp_path, source, layout):
    path = request.getfixturevalue("checkpoint" if source == "checkpoint" else "directory")
    if source == "store":
        path = f"hooked://{path}"
    saved = tmp_path / "saved"
    counts = run(load_and_save_counting, NUM_RANKS, LAYOUTS[layout], path, str(saved))
    facts = plan(capsys, path, layout)
    for name, of_ranks in zip(("off", "on"), zip(*counts, strict=True), strict=True):
        nodes = facts[f"load_share_reads_{name}"]["nodes"]
        assert [num_bytes for num_bytes, _ in of_ranks] == [node["read_bytes"] for node in nodes]
        requests = [node["requests"] for node in nodes]
        num_reads = [num_reads for _, num_reads in of_ranks]
        if source == "directory" and "tp=2" in layout:
            # Short rows are read one by one out of the cache, into which one request brings many.
            num_reads = list(map(min, num_reads, requests))
        assert num_reads == requests
    sizes = Counter()
    files = Counter()
    for file in (saved / "tensors").iterdir():
        rank = int(file.name.split("-")[1]) - 1
        sizes[rank] += file.stat().st_size
        files[rank] += 1
    assert [node["bytes"] for node in facts["save"]["nodes"]] == [sizes[r] for r in range(4)]
    assert [node["files"] for node in facts["save"]["nodes"]] == [files[r] for r in range(4)]
