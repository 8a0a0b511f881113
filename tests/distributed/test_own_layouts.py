"""Modules written for tensor, pipeline and data parallelism: nobody says which copy is the main
one.
"""

from __future__ import annotations

import torch

import distckpt
from distckpt import ShardedObject
from distckpt.modules import make_sharded_tensors_for_checkpoint, sharded_state_dict

WIDTH, FEATURES, NUM_LAYERS = 6, 8, 4


class ColumnParallel(torch.nn.Module):
    def __init__(self, full, tp):
        super().__init__()
        self.tp = tp
        self.weight = torch.nn.Parameter(full.chunk(tp[1])[tp[0]].clone())

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        state = self.state_dict(keep_vars=True)
        return make_sharded_tensors_for_checkpoint(
            state, prefix, {"weight": 0}, sharded_offsets, tp_group=self.tp
        )


class Layer(torch.nn.Module):
    def __init__(self, number, tp):
        super().__init__()
        self.number = number
        self.up = ColumnParallel(full(f"up{number}", FEATURES, WIDTH), tp)
        self.norm = torch.nn.LayerNorm(WIDTH)
        torch.nn.init.constant_(self.norm.weight, number)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        return sharded_state_dict(
            self, prefix, ((0, self.number, NUM_LAYERS), *sharded_offsets), metadata
        )


class Counter(torch.nn.Module):
    """Has no tensors, and calls that it counts."""

    calls = 3

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


class Stage(torch.nn.Module):
    """A pipeline stage: other modules on each, and on the outer two the embedding, to which the
    head is tied.
    """

    def __init__(self, tp, pp):
        super().__init__()
        rank, size = pp
        if rank in (0, size - 1):
            self.embedding = torch.nn.Embedding(5, WIDTH, _weight=full("embedding", 5, WIDTH))
        if rank == size - 1:
            self.head = torch.nn.Linear(WIDTH, 5, bias=False)
            self.head.weight = self.embedding.weight
            self.counter = Counter()
        count = NUM_LAYERS // size
        self.layers = [Layer(number, tp) for number in range(rank * count, (rank + 1) * count)]
        self.ordinary = torch.nn.ModuleDict({f"stage{rank}": torch.nn.Linear(3, 3)})

    def tensors(self):
        return [
            *self.parameters(),
            *(tensor for layer in self.layers for tensor in layer.parameters()),
        ]

    def describe(self):
        return [
            sharded_state_dict(self),
            [layer.sharded_state_dict("layers.") for layer in self.layers],
        ]


def full(name, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(map(ord, name))))


def make_stage(rank, tp, pp, dp):
    """Lay ranks out with tensor parallel ones next to one another, as Megatron does."""
    torch.manual_seed(rank // (tp * dp))
    return Stage((rank % tp, tp), (rank // (tp * dp), pp))


def save_and_load(rank, path, pairs):
    """Save under the first grid of each pair and load under the second; count what is wrong
    then.
    """
    wrong = 0
    for saved, grid in pairs:
        distckpt.save({"model": make_stage(rank, *saved).describe()}, f"{path}/{saved}")
        expected, target = make_stage(rank, *grid), make_stage(rank, *grid)
        with torch.no_grad():
            for tensor in target.tensors():
                tensor.zero_()
        distckpt.load({"model": target.describe()}, f"{path}/{saved}")
        wrong += sum(
            not torch.equal(*pair)
            for pair in zip(expected.tensors(), target.tensors(), strict=True)
        )
    return wrong


def test_modules_of_one_s_own_save_and_load_under_every_layout(tmp_path, run):
    pairs = [((2, 2, 1), (1, 2, 2)), ((2, 1, 2), (4, 1, 1))]
    assert run(save_and_load, 4, str(tmp_path), pairs) == [0] * 4
    for saved, _ in pairs:
        stored = distckpt.open(tmp_path / str(saved)).read_tensors()
        layers = {
            "layers.up.weight": (NUM_LAYERS, FEATURES, WIDTH),
            "layers.norm.weight": (NUM_LAYERS, WIDTH),
        }
        for name, shape in {
            **layers,
            "embedding.weight": (5, WIDTH),
            "head.weight": (5, WIDTH),
        }.items():
            assert tuple(stored[name].shape) == shape
        assert torch.equal(stored["layers.up.weight"][3], full("up3", FEATURES, WIDTH))
        assert {f"ordinary.stage{i}.weight" in stored for i in range(saved[1])} == {True}
        assert (
            "counter._extra_state/shard_0_1"
            in distckpt.megatron.serialization.load_sharded_metadata(tmp_path / str(saved))
        )


def save_objects(rank, path):
    """The whole module at once, in stages: `{"model": module}`."""
    stage = make_stage(rank, 1, 2, 2)
    stage.layers = None
    distckpt.save({"model": stage}, path)
    expected = [tensor.clone() for tensor in stage.parameters()]
    with torch.no_grad():
        for tensor in stage.parameters():
            tensor.zero_()
    distckpt.load({"model": stage}, path)
    return sum(not torch.equal(*pair) for pair in zip(expected, stage.parameters(), strict=True))


def test_stages_with_a_tied_weight_save_and_load_as_whole_modules(tmp_path, run):
    assert run(save_objects, 4, str(tmp_path / "c")) == [0] * 4


def said_by_some(rank, path):
    """Rank 1 says that its copy is the main one."""
    replica_id = 0 if rank == 1 else sharded_state_dict(torch.nn.Linear(2, 2))["weight"].replica_id
    distckpt.save({"o": ShardedObject("o", rank, (1,), (0,), replica_id)}, path)
    return distckpt.load({"o": ShardedObject("o", None, (1,), (0,), rank)}, path)["o"]


def test_who_says_to_have_the_main_replica_has_it(tmp_path, run):
    assert run(said_by_some, 2, str(tmp_path / "c")) == [1, 1]
