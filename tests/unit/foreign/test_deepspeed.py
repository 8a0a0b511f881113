"""DeepSpeed's directories: those in `tests/data/deepspeed_0_19.zip` were written by DeepSpeed
itself.
"""

from __future__ import annotations

import os
import pathlib
import pickle
import random
import shutil
import types
import zipfile
from collections import OrderedDict

import pytest
import torch
from safetensors.torch import load_file

import distckpt
from distckpt import torch_dist
from distckpt.megatron.core import CheckpointingException
from tests.data.make_deepspeed import make_model
from tests.support.cli_command import call
from tests.support.read_counts import counted_reads

GOLDEN = pathlib.Path(__file__).parents[2] / "data" / "deepspeed_0_19.zip"
RUNS = ["zero1", "zero2", "zero3", "zero2_universal", "zero3_universal"]
ZERO_1, ZERO_2, ZERO_3 = "zero1/global_step3", "zero2/global_step3", "zero3/global_step3"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    directory = tmp_path_factory.mktemp("deepspeed")
    with zipfile.ZipFile(GOLDEN) as archive:
        archive.extractall(directory)
    return directory


@pytest.fixture
def copied(made, tmp_path):
    return shutil.copytree(made, tmp_path / "copied")


def expected_of(path):
    """What DeepSpeed makes of a checkpoint: its tensors by our keys."""
    return load_file(path.with_name(f"{path.name.removesuffix('_universal')}.safetensors"))


def same(found, expected):
    """DeepSpeed gives all weights in 32 bits, also those it keeps in 16."""
    weights = all(
        torch.equal(found[key].float(), tensor.float()) for key, tensor in expected.items()
    )
    return weights and not set(expected) - set(found)


@pytest.mark.parametrize("name", RUNS)
def test_tensors_are_those_that_deepspeed_finds(made, name):
    found = distckpt.open(made / name).read_tensors()
    assert same(found, expected_of(made / name))
    # DeepSpeed's own tool loses the frozen parameters of ZeRO-1.
    assert set(found) - set(expected_of(made / name)) == (
        {"frozen.weight", "frozen.bias"} if name == "zero1" else set()
    )
    assert (found["count"].dtype, found["up.weight"].dtype) == (torch.int64, torch.float32)


@pytest.mark.parametrize("name", RUNS)
def test_training_goes_on_in_pytorch(made, name):
    model, optimizer = make_model()
    for group in optimizer.param_groups:
        group["weight_decay"] = group["lr"] = 1
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7)
    for param in model.parameters():
        torch.nn.init.zeros_(param)
    request = {"model": model, "optimizer": optimizer, "lr_scheduler": scheduler}
    loaded = distckpt.load(request, made / name, allow_dtype_cast=True)
    expected = expected_of(made / name)
    assert all(
        torch.equal(param, expected[key])
        for key, param in model.named_parameters()
        if key in expected
    )
    assert model.head.weight is model.embed.weight
    assert model.frozen.weight.any()
    for key, param in model.named_parameters():
        for state in ("exp_avg", "exp_avg_sq") if param.requires_grad else ():
            assert torch.equal(
                optimizer.state[param][state], expected[f"optimizer.state.{state}.{key}"]
            )
        assert not param.requires_grad or optimizer.state[param]["step"] == 3
    assert [(group["weight_decay"], group["lr"]) for group in optimizer.param_groups] == [
        (0.1, 0.001),
        (0.0, 0.001),
    ]
    assert (scheduler.last_epoch, scheduler.step_size) == (3, 2)
    assert model.count == loaded["iteration"] == loaded["global_steps"] == 3
    assert torch.equal(loaded["rng"], torch.arange(4).byte())
    model(torch.tensor([[1, 2]])).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("name", RUNS)
def test_weights_become_a_hugging_face_checkpoint(made, tmp_path, name):
    distckpt.consolidate(made / name, tmp_path / "export", keys="!optimizer.", dtype=torch.bfloat16)
    weights = load_file(tmp_path / "export/model.safetensors")
    expected = expected_of(made / name)
    assert "head.weight" not in weights  # Tied.
    assert all(
        torch.equal(weights[k].float(), expected[k].bfloat16().float())
        for k in weights
        if k in expected
    )
    assert {"up.weight", "scale", "count"} <= weights.keys()


def test_verbs(made, tmp_path, capsys):
    converted = tmp_path / "converted"
    call(capsys, "convert", made / "zero3", converted)
    assert distckpt.diff(made / "zero3", converted).is_same
    assert not distckpt.diff(made / "zero3", made / "zero2").is_same
    assert distckpt.diff(made / ZERO_3, made / "zero3_universal").is_same
    call(capsys, "verify", made / "zero3")
    assert "head.weight is tied to embed.weight" in call(capsys, "inspect", made / "zero3")
    assert '"iteration": 3' in call(capsys, "cat", made / "zero3")
    assert "up.weight" in call(capsys, "cat", made / "zero3", "up.weight")
    torch_dist.export(made / "zero1", tmp_path / "exported")
    assert same(distckpt.open(tmp_path / "exported").read_tensors(), expected_of(made / "zero1"))


def test_urls(made, memory):
    import fsspec

    fsspec.filesystem("memory").put(str(made / "zero2"), "/bucket/zero2", recursive=True)
    assert same(distckpt.open(f"{memory}/zero2").read_tensors(), expected_of(made / "zero2"))


# ---- refusals


class Unknown:
    """Stands for the classes of DeepSpeed, which is not installed."""

    def __init__(self, *args):
        pass


class Unpickler(pickle.Unpickler):
    def find_class(self, module, name):
        return Unknown if module.startswith("deepspeed") else super().find_class(module, name)


def edit(path, change):
    """Change what a file holds."""
    reading = types.SimpleNamespace(Unpickler=Unpickler, load=pickle.load, __name__="pickle")
    content = torch.load(path, weights_only=False, pickle_module=reading)
    change(content)
    torch.save(content, path)


def remove(pattern):
    return lambda root: [path.unlink() for path in root.glob(pattern)]


def copy(name, to):
    return lambda root: shutil.copy(root / name, root / to)


def write(name, text):
    return lambda root: (root / name).write_text(text)


def cut(name):
    return lambda root: (root / name).write_bytes((root / name).read_bytes()[:-300])


def of_other_step(root):
    def change(content):
        content["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["step"] += 1

    edit(root / ZERO_2 / "zero_pp_rank_1_mp_rank_00_optim_states.pt", change)


def of_two_ranks(root):
    def change(content):
        content["optimizer_state_dict"]["partition_count"] = [2, 2]

    edit(root / ZERO_2 / "zero_pp_rank_1_mp_rank_00_optim_states.pt", change)


def of_an_elastic_save(root):
    def change(content):
        base = content["optimizer_state_dict"]["base_optimizer_state"]
        content["optimizer_state_dict"]["base_optimizer_state"] = list(base["state"].values())

    edit(root / ZERO_2 / "zero_pp_rank_1_mp_rank_00_optim_states.pt", change)


def with_a_longer_parameter(root):
    def change(content):
        content["param_shapes"][0]["up.weight"] = torch.Size([9, 7])

    edit(root / ZERO_2 / "mp_rank_00_model_states.pt", change)


def changed(name, **fields):
    """Return a damage that changes fields of one file."""
    return lambda root: edit(root / name, lambda content: content.update(fields))


def with_field(name, field, change):
    return lambda root: edit(root / name, lambda content: change(content[field]))


def swap(name, other):
    def apply(root):
        content = (root / name).read_bytes()
        (root / other).replace(root / name)
        (root / other).write_bytes(content)

    return apply


def reverse(groups):
    for group in groups:
        for name in reversed(list(group)):
            group.move_to_end(name)


def transpose(groups):
    groups[0].update({name: shape[::-1] for name, shape in groups[0].items()})


def of_16_bits_on_one_rank(root):
    def change(content):
        flat = content["optimizer_state_dict"]["fp32_flat_groups"]
        flat[0] = flat[0].half()

    edit(root / ZERO_3 / f"bf16_{RANK_1}", change)


RANK_0 = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
RANK_1, MODEL = "zero_pp_rank_1_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"
MODEL_1 = f"zero_pp_rank_1_{MODEL}"
UNIVERSAL = "zero2_universal/global_step3_universal"
DAMAGES = {
    "rank missing": (
        "zero2",
        remove(f"{ZERO_2}/{RANK_1}"),
        "saved by 3 ranks, but .*zero_pp_rank_2.*restore",
    ),
    "last rank missing": ("zero3", remove(f"{ZERO_3}/bf16_{RANK_1}"), "saved by 2 ranks"),
    "all ranks missing": ("zero2", remove(f"{ZERO_2}/*optim*"), r"no \*_optim_states.pt"),
    "model missing": ("zero2", remove(f"{ZERO_2}/{MODEL}"), "no mp_rank_00_model_states.pt"),
    "model of a rank missing": (
        "zero3",
        remove(f"{ZERO_3}/zero_pp_rank_1_{MODEL}"),
        "saved by 2 ranks",
    ),
    "rank too many": (
        "zero2",
        copy(f"{ZERO_2}/{RANK_1}", f"{ZERO_2}/{RANK_1}".replace("_1_", "_3_")),
        "by 3 ranks",
    ),
    "other number of ranks": ("zero2", of_two_ranks, "rank_1.*was saved by 2 ranks"),
    "other step": ("zero2", of_other_step, "different saves"),
    "of two saves": (
        "zero2",
        copy(f"{ZERO_2}/{RANK_1}", f"{ZERO_2}/bf16_{RANK_1}"),
        "of different saves: remove",
    ),
    "elastic": ("zero2", of_an_elastic_save, "elastic"),
    "other shapes": (
        "zero2",
        with_a_longer_parameter,
        "group 0 has 125 elements, its parameters 143",
    ),
    "cut off": ("zero2", cut(f"{ZERO_2}/{RANK_1}"), f"{RANK_1}' is damaged"),
    "no such folder": (
        "zero2",
        write("zero2/latest", "global_step9"),
        "latest' names 'global_step9'",
    ),
    "folder elsewhere": (
        "zero2",
        write("zero2/latest", "../zero1/global_step3"),
        "there is no such folder",
    ),
    "tensor parallel": (
        "zero2",
        copy(f"{ZERO_2}/{MODEL}", f"{ZERO_2}/mp_rank_01_model_states.pt"),
        "ds_to_universal",
    ),
    "pipeline": (
        "zero2",
        copy(f"{ZERO_2}/{MODEL}", f"{ZERO_2}/layer_01-{MODEL}"),
        "layer_01.*pipeline",
    ),
    "experts": (
        "zero2",
        copy(f"{ZERO_2}/{MODEL}", f"{ZERO_2}/layer_0_expert_1_{MODEL}"),
        "experts are not read",
    ),
    "no weights": (
        "zero2_universal",
        remove(f"{UNIVERSAL}/zero/up.weight/fp32.pt"),
        "up.weight/fp32.pt' is missing",
    ),
    "no state": (
        "zero2_universal",
        remove(f"{UNIVERSAL}/zero/up.weight/exp_avg.pt"),
        "up.weight.*other states",
    ),
    "a tensor parallel rank": (
        "zero2",
        changed(f"{ZERO_2}/{MODEL}", mp_world_size=2),
        "among 2 .*copy",
    ),
    "one of two stages": (
        "zero3",
        changed(f"{ZERO_3}/{MODEL_1}", checkpoint_parallel_dimensions={"pp_degree": 2}),
        "among 2 ",
    ),
    "universal of one of two": (
        "zero2_universal",
        changed(f"{UNIVERSAL}/{MODEL}", mp_world_size=2),
        "among 2 ",
    ),
    "weights of another": (
        "zero2_universal",
        copy(f"{UNIVERSAL}/zero/up.bias/fp32.pt", f"{UNIVERSAL}/zero/up.weight/fp32.pt"),
        r"up.weight/fp32.pt.*'up.weight' has shape \(9,\) there, elsewhere \(9, 5\)",
    ),
    "copied rank": (
        "zero2",
        copy(f"{ZERO_2}/{RANK_0}", f"{ZERO_2}/{RANK_1}"),
        f"{RANK_1}' is not the file of its",
    ),
    "swapped ranks": (
        "zero1",
        swap(f"{ZERO_1}/bf16_{RANK_0}", f"{ZERO_1}/bf16_{RANK_1}"),
        "not the file of its rank",
    ),
    "other order": (
        "zero2",
        with_field(f"{ZERO_2}/{MODEL}", "param_shapes", reverse),
        "not the file of its rank",
    ),
    "other model step": (
        "zero3",
        changed(f"{ZERO_3}/{MODEL_1}", global_steps=2),
        "saves .*global_steps is 2 and 3",
    ),
    "other version": (
        "zero3",
        changed(f"{ZERO_3}/bf16_{RANK_1}", ds_version="0.3"),
        "ds_version is '0.3'",
    ),
    "transposed": (
        "zero1",
        with_field(f"{ZERO_1}/{MODEL}", "param_shapes", transpose),
        r"'embed.weight' has .*\(7, 5\) in the mod",
    ),
    "no buffer": (
        "zero1",
        with_field(f"{ZERO_1}/{MODEL}", "module", lambda m: m.pop("scale")),
        "lacks 'scale'",
    ),
    "tied to nothing": (
        "zero2",
        changed(f"{ZERO_2}/{MODEL}", shared_params={"head.weight": "no"}),
        "ties 'head.wei",
    ),
    "no fragment": (
        "zero3",
        changed(f"{ZERO_3}/{MODEL_1}", frozen_param_fragments={}),
        "rank_1.* lacks .*frozen.weig",
    ),
    "parameter missing": (
        "zero2",
        with_field(f"{ZERO_2}/{MODEL}", "param_shapes", lambda s: s[0].popitem()),
        "has 3 parameters, .* 2",
    ),
    "16 bits on a rank": (
        "zero3",
        of_16_bits_on_one_rank,
        "rank_1.*'embed.weight' as torch.float16",
    ),
    "no state of the only one": (
        "zero3_universal",
        remove("zero3_universal/*/zero/down.weight/exp_avg.pt"),
        "down.weight' has other states",
    ),
    "no step": (
        "zero2_universal",
        copy(f"{UNIVERSAL}/zero/up.bias/fp32.pt", f"{UNIVERSAL}/zero/up.bias/step.pt"),
        r"up.bias/step.pt' is damaged or of an unknown form \(no step",
    ),
    "model of two ranks": (
        "zero2",
        changed(f"{ZERO_2}/{MODEL}", dp_world_size=2),
        f"{MODEL}' was saved by 2 ranks",
    ),
    "no options": (
        "zero2_universal",
        remove(f"{UNIVERSAL}/zero/optimizer_state.pt"),
        "optimizer_state.pt' is missing",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named(copied, damage):
    name, apply, text = DAMAGES[damage]
    apply(copied)
    with pytest.raises(CheckpointingException, match=text):
        distckpt.open(copied / name).read_tensors()


def test_classes_of_others_are_refused_where_they_are_asked_for(copied):
    edit(
        copied / ZERO_2 / MODEL,
        lambda content: content.update(sampler=random.Random(1), call=Call(copied / "ran")),
    )
    # Tensors are there.
    assert same(distckpt.open(copied / "zero2").read_tensors(), expected_of(copied / "zero2"))
    with pytest.raises(distckpt.UnsupportedObjectError, match=r"'sampler' in .*random\.Random"):
        distckpt.load({}, copied / "zero2")
    assert not (copied / "ran").exists()


class Call:
    """Makes a directory when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize(
    "seeds", [range(20), pytest.param(range(20, 2000), marks=pytest.mark.slow)]
)
def test_flipped_bytes_are_errors_of_ours_or_change_values_only(copied, seeds):
    for seed in seeds:
        generator = random.Random(seed)
        name = generator.choice(RUNS)
        path = generator.choice(sorted((copied / name).rglob("*.pt")))
        original = path.read_bytes()
        content = bytearray(original)
        for _ in range(generator.randrange(1, 4)):
            content[generator.randrange(len(content))] = generator.randrange(256)
        path.write_bytes(content)
        try:
            distckpt.open(copied / name).read_tensors()
            distckpt.load({}, copied / name)
        except CheckpointingException:
            pass
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        path.write_bytes(original)


# ---- forms that the runs do not have


def save_zero(path, module, groups, flat, states, options, **fields):
    """Write a ZeRO-2 directory as DeepSpeed does, given each rank's part of each group."""
    path.mkdir(parents=True)
    shapes = [OrderedDict((name, module[name].shape) for name in names) for names in groups]
    model = {
        "module": module,
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": shapes,
        "shared_params": {},
    }
    torch.save(model, path / MODEL)
    for rank, (weights, state) in enumerate(zip(flat, states, strict=True)):
        numbered = [{**given, "params": [i]} for i, given in enumerate(options)]
        base = {"state": dict(enumerate(state)), "param_groups": numbered}
        zero = {
            "base_optimizer_state": base,
            "single_partition_of_fp32_groups": weights,
            "partition_count": [len(flat)],
        }
        zero |= {"group_paddings": [0] * len(groups), **fields}
        torch.save(
            {"optimizer_state_dict": zero}, path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        )


def test_the_optimizer_of_deepspeed(tmp_path):
    """FusedAdam counts steps in its groups; paddings stand between parameters and at the end;
    tensors are views.
    """
    wide = torch.arange(60.0).view(6, 10)
    module = OrderedDict(
        w=torch.zeros(3, 5), b=torch.zeros(()), frozen=wide.T, view=wide[1:, 2:4], _extra_state=3
    )
    flat = torch.arange(20.0)
    options = [
        {
            "lr": 0.5,
            "bias_correction": True,
            "betas": (0.9, 0.95),
            "eps": 1e-6,
            "weight_decay": 0.0,
            "step": 7,
        }
    ]
    states = [
        [{"exp_avg": flat[:10] + 1, "exp_avg_sq": flat[:10] + 2}],
        [{"exp_avg": flat[10:] + 1, "exp_avg_sq": flat[10:] + 2}],
    ]
    weights = [[flat[:10]], [flat[10:]]]
    save_zero(
        tmp_path / "c",
        module,
        [["w", "b"]],
        weights,
        states,
        options,
        param_alignment_paddings=[[2, 2]],
    )
    found = distckpt.open(tmp_path / "c").read_tensors()
    expected = {"w": flat[:15].view(3, 5), "b": flat[17], "frozen": wide.T, "view": wide[1:, 2:4]}
    assert [key for key, tensor in expected.items() if not torch.equal(found[key], tensor)] == []
    model = torch.nn.ParameterDict({"w": torch.zeros(3, 5), "b": torch.zeros(())})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1, amsgrad=False)
    request = {"model": model, "optimizer": optimizer}
    distckpt.megatron.load(request, tmp_path / "c", strict="raise_unexpected")
    assert torch.equal(optimizer.state[model["w"]]["exp_avg_sq"], flat[:15].view(3, 5) + 2)
    assert (optimizer.state[model["b"]]["step"], optimizer.param_groups[0]["betas"]) == (
        7,
        (0.9, 0.95),
    )


def test_numbers_besides_the_step_are_kept(tmp_path):
    flat = torch.arange(6.0)
    trained = torch.nn.Linear(3, 2, bias=False)
    theirs = torch.optim.NAdam(trained.parameters(), lr=0.1)
    trained(torch.ones(3)).sum().backward()
    theirs.step()
    [state] = theirs.state.values()
    state = {name: value.flatten() if value.ndim else value for name, value in state.items()}
    options = [{name: value for name, value in theirs.param_groups[0].items() if name != "params"}]
    save_zero(
        tmp_path / "c",
        OrderedDict(weight=trained.weight.data),
        [["weight"]],
        [[flat]],
        [[state]],
        options,
    )
    model = torch.nn.Linear(3, 2, bias=False)
    optimizer = torch.optim.NAdam(model.parameters(), lr=0.5)
    distckpt.load({"model": model, "optimizer": optimizer}, tmp_path / "c")
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert optimizer.state[model.weight]["mu_product"] == state["mu_product"]
    assert torch.equal(optimizer.state[model.weight]["exp_avg"].flatten(), state["exp_avg"])


def save_without_zero(path, weights, optimizer, **fields):
    """Write the one file that DeepSpeed writes without ZeRO."""
    path.mkdir(parents=True)
    module = {"count": torch.tensor([3.0]), **{k: v.bfloat16() for k, v in weights.items()}}
    module["tied"] = module["w"]
    state = {"module": module, "buffer_names": ["count"], "param_shapes": None, **fields}
    torch.save({**state, "optimizer": optimizer, "global_steps": 2}, path / MODEL)


def with_groups(weights, groups):
    """Weights of 32 bits and the state of Adam, for groups of names."""
    made = {name: {"exp_avg": w + 1, "exp_avg_sq": w + 2} for name, w in weights.items()}
    names = [name for group in groups for name in group]
    numbers = {name: number for number, name in enumerate(names)}
    options = [
        {"lr": float(i + 1), "params": [numbers[name] for name in group]}
        for i, group in enumerate(groups)
    ]
    step = {"step": torch.tensor(5.0)}
    states = {number: {**made[name], **step} for name, number in numbers.items()}
    return {
        "cur_scale": 1.0,
        "fp32_groups": [[weights[name].clone() for name in group] for group in groups],
        "optimizer_state_dict": {"state": states, "param_groups": options},
    }


def flat(optimizer):
    """The same as DeepSpeed's FusedAdam has it: one vector for each group."""
    inner = optimizer["optimizer_state_dict"]
    states, options = {}, []
    for number, group in enumerate(inner["param_groups"]):
        parts = [inner["state"][param] for param in group["params"]]
        joined = {k: torch.cat([p[k].flatten() for p in parts]) for k in ("exp_avg", "exp_avg_sq")}
        states[number] = {**joined, "step": torch.tensor(5.0)}
        options.append({**group, "params": [number]})
    vectors = [torch.cat([w.flatten() for w in group]) for group in optimizer["fp32_groups"]]
    inner = {"state": states, "param_groups": options}
    return {"cur_scale": 1.0, "fp32_groups_flat": vectors, "optimizer_state_dict": inner}


WEIGHTS = {"w": (300, 2), "norm": (7,), "v": (300, 2), "b": (7,), "norm2": (7,)}


def random_weights():
    torch.manual_seed(0)
    weights = {name: torch.randn(shape) for name, shape in WEIGHTS.items()}
    # Layers that have not been trained yet.
    return {**weights, "norm": torch.ones(7), "norm2": torch.ones(7)}


@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.parametrize(
    "groups", [[["w", "norm", "v", "b", "norm2"]], [["w", "v"], ["norm", "b", "norm2"]]]
)
def test_without_zero_the_optimizer_has_the_weights(tmp_path, groups, is_flat):
    weights = random_weights()
    optimizer = with_groups(weights, groups)
    save_without_zero(tmp_path / "c", weights, flat(optimizer) if is_flat else optimizer)
    model = torch.nn.ParameterDict({name: torch.zeros(shape) for name, shape in WEIGHTS.items()})
    model["tied"] = model["w"]
    model.register_buffer("count", torch.zeros(1))
    theirs = torch.optim.AdamW([{"params": [model[name] for name in group]} for group in groups])
    distckpt.load({"model": model, "optimizer": theirs}, tmp_path / "c")
    assert model.count == 3
    for name, weight in weights.items():
        assert torch.equal(model[name], weight)
        state = theirs.state[model[name]]
        assert torch.equal(state["exp_avg"], weight + 1)
        assert torch.equal(state["exp_avg_sq"], weight + 2)
        assert state["step"] == 5
    assert [group["lr"] for group in theirs.param_groups] == [1.0, 2.0][: len(groups)]


@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.parametrize("change", ["equal ones in two groups", "other values"])
def test_without_zero_rounded_weights_are_warned_of(tmp_path, caplog, change, is_flat):
    weights = random_weights()
    optimizer = with_groups(weights, [["w", "v", "norm"], ["b", "norm2"]])
    if change == "other values":
        optimizer["fp32_groups"][0][0] += 1
        optimizer["fp32_groups"][1][1] += 1
    save_without_zero(tmp_path / "c", weights, flat(optimizer) if is_flat else optimizer)
    found = distckpt.open(tmp_path / "c").read_tensors()
    assert torch.equal(found["w"], weights["w"].bfloat16())
    assert "rounded to 16 bits" in caplog.text
    model = torch.nn.ParameterDict({name: torch.zeros(shape) for name, shape in WEIGHTS.items()})
    request = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    with pytest.raises(distckpt.LoadMismatchError, match="is read from there"):
        distckpt.load(request, tmp_path / "c")


@pytest.mark.parametrize(
    ("sizes", "held"),
    [
        ((9, 3), (["p", "q", "r"], ["r"])),
        ((6, 6), (["p", "q"], ["q", "r"])),
        ((12, 0), (["p", "q", "r"], [])),
    ],
)
def test_muon_has_whole_parameters_on_each_rank(tmp_path, sizes, held):
    """Ranks have the momentum of all parameters that meet their parts of the flat vector."""
    torch.manual_seed(0)
    names = {"p": (1, 5), "q": (1, 3), "r": (2, 2)}
    weights = OrderedDict((name, torch.randn(shape)) for name, shape in names.items())
    momenta = {name: torch.randn(shape) for name, shape in names.items()}
    vector = torch.cat([weight.flatten() for weight in weights.values()])
    buffers = [[momenta[name].flatten() for name in own] for own in held]
    states = [[{"momentum_buffer": torch.cat(own)} if own else {}] for own in buffers]
    parts = [[part] for part in vector.split(list(sizes))]
    options = [{"lr": 0.5, "use_muon": True}]
    save_zero(tmp_path / "c", weights, [list(names)], parts, states, options)
    found = distckpt.open(tmp_path / "c").read_tensors()
    for name in names:
        assert torch.equal(found[name], weights[name])
        assert torch.equal(found[f"optimizer.state.momentum_buffer.{name}"], momenta[name])


def test_a_state_of_another_form_is_left_out(tmp_path, caplog):
    vector = torch.arange(6.0)
    state = {"momentum_buffer": vector + 1, "row": torch.ones(2)}
    module = OrderedDict(weight=torch.zeros(2, 3))
    save_zero(tmp_path / "c", module, [["weight"]], [[vector]], [[state]], [{"lr": 0.5}])
    model = torch.nn.Linear(3, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    distckpt.load({"model": model, "optimizer": optimizer}, tmp_path / "c")
    assert torch.equal(optimizer.state[model.weight]["momentum_buffer"].flatten(), vector + 1)
    assert "'row' is not read" in caplog.text


def test_a_slice_of_a_large_parameter_reads_that_slice(tmp_path):
    size = 1 << 20
    flat = torch.arange(float(size))
    module = OrderedDict(w=torch.zeros(1024, 1024, dtype=torch.bfloat16))
    save_zero(
        tmp_path / "c",
        module,
        [["w"]],
        [[flat[: size // 2]], [flat[size // 2 :]]],
        [[{}], [{}]],
        [{"lr": 1.0}],
    )
    row = distckpt.ShardedTensor.from_rank_offsets("w", torch.zeros(4, 1024), (0, 200, 256))
    with counted_reads() as counts:
        distckpt.load({"w": row}, tmp_path / "c")
    assert torch.equal(row.data, flat[800 * 1024 : 804 * 1024].view(4, 1024))
    assert counts.num_bytes < 300_000


def test_a_universal_checkpoint_of_tensor_parallel_ranks(copied, caplog):
    """Its weights are whole, of which each of the model's files has the shapes of slices."""
    folder = copied / UNIVERSAL
    shutil.copy(folder / MODEL, folder / "mp_rank_01_model_states.pt")
    for rank, rows in enumerate((5, 4)):
        edit(
            folder / f"mp_rank_0{rank}_model_states.pt",
            lambda c, n=rows: c["param_shapes"][0].update({"up.weight": (n, 5)}),
        )
    found, expected = distckpt.open(folder).read_tensors(), expected_of(copied / "zero2_universal")
    left = {"frozen.weight", "frozen.bias", "scale", "count", "head.weight"}
    assert same(found, {key: tensor for key, tensor in expected.items() if key not in left})
    assert not left & found.keys()
    assert all(name in caplog.text for name in left - {"frozen.weight", "frozen.bias"})


@pytest.fixture(scope="module")
def more(tmp_path_factory):
    directory = tmp_path_factory.mktemp("more")
    with zipfile.ZipFile(GOLDEN.with_name("deepspeed_0_19_more.zip")) as archive:
        archive.extractall(directory)
    return directory


def test_weights_in_another_order_than_the_modules(more):
    found = distckpt.open(more / "round_robin").read_tensors()
    assert same(found, expected_of(more / "round_robin"))


def test_a_conversion_that_mixes_up_parameters_is_refused(more, tmp_path):
    """DeepSpeed takes the order of the module for that of `round_robin_gradients`."""
    message = r"'down\.weight' as it is in .*round_robin_gradients: give the directory that"
    with pytest.raises(distckpt.CorruptCheckpointError, match=message):
        distckpt.open(more / "round_robin_universal")
    folder = pathlib.Path("round_robin_universal/global_step3_universal")
    shutil.copytree(more / folder, tmp_path / folder)
    expected = expected_of(more / "round_robin")
    for file in (tmp_path / folder / "zero").glob("*/fp32.pt"):
        torch.save({"param": expected[file.parent.name]}, file)
    assert same(distckpt.open(tmp_path / folder).read_tensors(), expected)


def test_a_mixed_up_conversion_of_tensor_parallel_ranks_is_warned_of(more, tmp_path, caplog):
    folder = pathlib.Path("round_robin_universal/global_step3_universal")
    shutil.copytree(more / folder, tmp_path / folder)
    shutil.copy(tmp_path / folder / MODEL, tmp_path / folder / "mp_rank_01_model_states.pt")
    distckpt.open(tmp_path / folder)
    assert "tensors may have the values of others" in caplog.text


def test_without_zero_and_with_32_bits_parameters_go_by_number(more, tmp_path):
    model, optimizer = make_model()
    for group in optimizer.param_groups:
        group["weight_decay"] = group["lr"] = 1
    distckpt.load({"model": model, "optimizer": optimizer}, more / "plain")
    expected = expected_of(more / "plain")
    found = dict(model.named_parameters())
    for key, param in list(found.items()):
        for state, value in optimizer.state.get(param, {}).items():
            found[f"optimizer.state.{state}.{key}"] = value
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    distckpt.consolidate(more / "plain", tmp_path / "export")
    weights = load_file(tmp_path / "export/model.safetensors")
    assert {"up.weight", "scale"} <= weights.keys() < {*found, "head.weight", "scale", "count"}


def test_numbers_of_another_optimizer_are_refused(more):
    model, _ = make_model()
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained[::-1])
    with pytest.raises(distckpt.LoadMismatchError, match="in the order in which it was saved"):
        distckpt.load({"model": model, "optimizer": optimizer}, more / "plain")


@pytest.mark.slow
def test_what_deepspeed_writes_now(tmp_path):
    pytest.importorskip("deepspeed", reason="needs the package deepspeed")
    from tests.data import make_deepspeed

    make_deepspeed.make(tmp_path)
    for name in {*RUNS, *make_deepspeed.RUNS}:
        found = distckpt.open(tmp_path / name).read_tensors()
        if name == "plain":
            found = {key: tensor for key, tensor in found.items() if ".state." not in key}
        expected = expected_of(tmp_path / name)
        assert same(found, {key: expected[key] for key in expected.keys() & found.keys()})
        assert {"up.weight", "down.bias", "scale"} <= found.keys()
