"""Loading the state dicts that PyTorch's `dcp.save` stored into modules and optimizers."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import distckpt
import distckpt.torch_dist

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def flattened(model, optimizer):
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    return get_optimizer_state_dict(model, optimizer, options=options)


FORMS = {
    "by name": get_optimizer_state_dict,
    "flattened": flattened,
    "by number": lambda model, optimizer: optimizer.state_dict(),
}
LAYOUTS = {
    "entries": lambda model, optimizer: {"model": model, "optim": optimizer},
    "Lightning": lambda model, optimizer: {"state_dict": model, "optimizer_0": optimizer},
    "application": lambda model, optimizer: {"app": {"model": model, "optim": optimizer}},
    "list": lambda model, optimizer: {"model": model, "optims": [optimizer]},
}


class Preconditioned(torch.optim.Optimizer):
    """Keeps states in lists and dicts, as SOAP and Shampoo do, and counts in plain numbers."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    def step(self):
        for param in [param for group in self.param_groups for param in group["params"]]:
            state = self.state[param]
            if not state:
                factors = [torch.zeros(size, size) for size in param.shape]
                state.update(step=0, factors=factors, scales=[None, torch.tensor(1.0)], notes=[])
                state["norms"] = {"kind": "rms", "largest": torch.zeros(2)}
            state["step"] += 1
            state["scales"][1] *= 2
            state["norms"]["largest"] += param.grad.abs().max()
            for factor in state["factors"]:
                factor += param.grad.sum()


class Counting(torch.optim.Optimizer):
    """Keeps values of no parameter, and tensors among its options, as Prodigy and EmoNavi do."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "extra": {}})
        self.total = 0

    def step(self):
        self.total += 1
        self.state["ema"] = {"short": 0.5, "long": torch.tensor([self.total, 2.0])}
        self.state["steps"] = self.total
        for group in self.param_groups:
            group["d_numerator"] = torch.tensor([7.0 * self.total])
            group["d_lists"] = [torch.tensor(self.total), None, torch.ones(2)]
            for param in group["params"]:
                self.state[param].setdefault("factor", torch.zeros(0))
                self.state[param]["seen"] = param.detach().flatten()[:2] * 2

    def state_dict(self):
        return {**super().state_dict(), "total": self.total, "last": torch.ones(self.total)}

    def load_state_dict(self, state):
        own = dict(state)
        self.total, self.last = own.pop("total"), own.pop("last")
        super().load_state_dict(own)


OPTIMIZERS = {
    "Counting": Counting,
    "Preconditioned": Preconditioned,
    "AdamW": lambda groups: torch.optim.AdamW(groups, amsgrad=True),
    "SGD": torch.optim.SGD,
    "Adafactor": torch.optim.Adafactor,
    "tensor": lambda groups: torch.optim.NAdam(groups, lr=torch.tensor(0.5), foreach=False),
}


def make(kind="AdamW"):
    """A model with a parameter without axes, and an optimizer with groups in another order."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))
    model.register_parameter("scale", nn.Parameter(torch.tensor(2.0)))
    params = list(model.parameters())
    vectors = [param for param in params if param.ndim < 2]
    matrices = [param for param in params if param.ndim > 1]
    return model, OPTIMIZERS[kind]([{"params": vectors, "weight_decay": 0.5}, {"params": matrices}])


def train(model, optimizer):
    for _ in range(2):
        (model(torch.rand(2, 4)) * model.scale).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert type(found[key]) is type(value)
        if isinstance(value, dict):
            assert_same(found[key], value)
        elif isinstance(value, list):
            assert len(found[key]) == len(value)
            assert_same(dict(enumerate(found[key])), dict(enumerate(value)))
        elif isinstance(value, torch.Tensor):
            assert torch.equal(found[key], value)
            assert found[key].dtype == value.dtype
        else:
            assert found[key] == value


def assert_same_training(found, expected):
    for own, other in zip(found, expected, strict=True):
        assert_same(own.state_dict(), other.state_dict())


CASES = [
    ("by name", "entries", "AdamW"),
    ("by name", "Lightning", "SGD"),
    ("by number", "application", "tensor"),
    ("by number", "entries", "AdamW"),
    ("flattened", "list", "tensor"),
    ("flattened", "Lightning", "Adafactor"),
    ("by name", "entries", "Preconditioned"),
    ("by number", "list", "Preconditioned"),
    ("by number", "entries", "Counting"),
    ("by number", "Lightning", "Counting"),
]


@pytest.mark.parametrize(("form", "layout", "kind"), CASES)
def test_objects_are_filled_from_state_dicts(tmp_path, form, layout, kind):
    trained = train(*make(kind))
    state = LAYOUTS[layout](trained[0].state_dict(), FORMS[form](*trained))
    torch_dcp.save(copy.deepcopy({**state, "step": 3}), checkpoint_id=tmp_path / "saved")
    distckpt.reshard(tmp_path / "saved", tmp_path / "converted")
    pairs = (make(kind), "saved"), (train(*make(kind)), "converted")
    for fresh, name in pairs:
        request = {**LAYOUTS[layout](*fresh), "step": 0}
        loaded = distckpt.load(request, tmp_path / name)
        assert (request["step"], loaded["step"]) == (3, 3)
        assert_same_training(fresh, trained)


class Nested(torch.optim.Optimizer):
    """Keeps numbers and tensors in dicts of states, as Shampoo does."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                factors = {"rank": 2, "left": {"count": 7, "matrix": param.grad.clone()}}
                self.state[param] = {"factors": factors, "numbers": {"of": {"steps": 5}}, "seen": 3}


def test_numbers_in_dicts_of_flattened_states_are_filled(tmp_path):
    model = nn.Linear(3, 2)
    optimizer = Nested(model.parameters())
    model(torch.rand(2, 3)).sum().backward()
    optimizer.step()
    try:
        flat = flattened(model, optimizer)
    except NotImplementedError:
        pytest.skip("this release of PyTorch does not flatten dicts of states")
    torch_dcp.save({"model": model.state_dict(), "optim": flat}, checkpoint_id=tmp_path / "saved")
    fresh_model = nn.Linear(3, 2)
    fresh = Nested(fresh_model.parameters())
    distckpt.load({"model": fresh_model, "optim": fresh}, tmp_path / "saved")
    assert_same(fresh.state_dict()["state"], optimizer.state_dict()["state"])


def test_lbfgs_by_number(tmp_path):
    def make_lbfgs():
        model = nn.Linear(4, 2)
        return model, torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = (model(torch.arange(4.0)) - 1).square().sum()
        loss.backward()
        return loss

    model, optimizer = make_lbfgs()
    optimizer.step(closure)
    state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    torch_dcp.save(copy.deepcopy(state), checkpoint_id=tmp_path / "saved")
    fresh = make_lbfgs()
    distckpt.load({"model": fresh[0], "optim": fresh[1]}, tmp_path / "saved")
    assert_same(fresh[1].state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("form", FORMS)
def test_states_of_an_optimizer_that_keeps_others_are_refused(tmp_path, form):
    model, optimizer = train(*make("AdamW"))
    state = {"model": model.state_dict(), "optim": FORMS[form](model, optimizer)}
    torch_dcp.save(copy.deepcopy(state), checkpoint_id=tmp_path / "saved")
    other = torch.optim.Adamax(optimizer.param_groups)
    with pytest.raises(distckpt.LoadMismatchError, match="at 'optim' has no 'exp_inf': Adamax"):
        distckpt.load({"model": model, "optim": other}, tmp_path / "saved")


def trained_by_name(order, prefix=""):
    """An optimizer that knows the names of its parameters, each with a moment of its own."""
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3)))
    named = [(f"{prefix}{number}.weight", model[number].weight) for number in order]
    optimizer = torch.optim.AdamW(named, lr=0.5)
    for number, layer in enumerate(model):
        layer.weight.grad = torch.full((2, 2), number + 1.0)
    optimizer.step()
    return model, optimizer


def with_factors(keys):
    """A model and an optimizer that keeps tensors in a dict with these keys."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for param in model.parameters():
        optimizer.state[param]["factors"] = {key: torch.ones(2) for key in keys}
    return model, optimizer


@pytest.mark.parametrize("keys", [(0.0, 0.9, 0.99), (3, 5)])
@pytest.mark.parametrize("form", ["by name", "by number"])
def test_keys_that_names_do_not_tell_are_refused(tmp_path, form, keys):
    model, optimizer = with_factors(keys)
    state = {"model": model.state_dict(), "optim": FORMS[form](model, optimizer)}
    torch_dcp.save(copy.deepcopy(state), checkpoint_id=tmp_path / "saved")
    with pytest.raises(distckpt.LoadMismatchError, match="in a dict whose keys are no text"):
        distckpt.load({"model": model, "optim": optimizer}, tmp_path / "saved")


def test_a_state_whose_name_is_the_beginning_of_another_is_refused(tmp_path):
    model, optimizer = with_factors("ab")
    for param in model.parameters():
        optimizer.state[param] = {"m.0": torch.ones(2), "m": torch.zeros(2)}
    state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    torch_dcp.save(copy.deepcopy(state), checkpoint_id=tmp_path / "saved")
    with pytest.raises(distckpt.LoadMismatchError, match=r"entry 'm\.0' has tensors in a dict"):
        distckpt.load({"model": model, "optim": optimizer}, tmp_path / "saved")


def test_lists_that_names_alone_tell_are_warned_of(tmp_path, caplog):
    trained = train(*make("Preconditioned"))
    state = {"model": trained[0].state_dict(), "optim": get_optimizer_state_dict(*trained)}
    torch_dcp.save(copy.deepcopy(state), checkpoint_id=tmp_path / "saved")
    fresh = make("Preconditioned")
    distckpt.load({"model": fresh[0], "optim": fresh[1]}, tmp_path / "saved")
    (warning,) = [line.getMessage() for line in caplog.records if line.name.startswith("distckpt")]
    assert "the states 'factors' of the optimizer at 'optim' are loaded as lists" in warning


def test_another_optimizers_states_of_other_shapes_are_warned_of(tmp_path, caplog):
    class LowRank(torch.optim.SGD):
        """As GaLore, whose moments are smaller than its parameters."""

    model = nn.Linear(3, 2)
    optimizer = LowRank(model.parameters(), lr=0.5)
    for param in model.parameters():
        optimizer.state[param]["exp_avg"] = torch.ones(1, 5)
    state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    torch_dcp.save(copy.deepcopy(state), checkpoint_id=tmp_path / "saved")
    fresh = LowRank(model.parameters(), lr=0.1)
    distckpt.load({"model": model, "optim": fresh}, tmp_path / "saved")
    assert_same(fresh.state_dict(), optimizer.state_dict())
    (warning,) = [line.getMessage() for line in caplog.records if line.name.startswith("distckpt")]
    assert "'exp_avg' of parameter 0" in warning
    assert "Unless this optimizer keeps states of other shapes" in warning


@pytest.mark.parametrize(
    ("names_itself", "prefix"), [(True, ""), (True, "net."), (False, ""), (False, "module.")]
)
def test_numbers_with_names_are_those_of_the_names(tmp_path, names_itself, prefix):
    saved = trained_by_name([0, 1, 2], prefix)
    torch_dcp.save(
        {"model": saved[0].state_dict(), "optim": saved[1].state_dict()},
        checkpoint_id=tmp_path / "saved",
    )
    model, optimizer = trained_by_name([2, 0, 1], prefix)
    if not names_itself:
        optimizer = torch.optim.AdamW([model[number].weight for number in (2, 0, 1)])
    distckpt.load({"model": model, "optim": optimizer}, tmp_path / "saved")
    for own, other in zip(model, saved[0], strict=True):
        assert_same(optimizer.state[own.weight], saved[1].state[other.weight])
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_parameter_without_a_stored_name_starts_anew(tmp_path, caplog):
    saved = trained_by_name([0, 1])
    torch_dcp.save(
        {"model": saved[0].state_dict(), "optim": saved[1].state_dict()},
        checkpoint_id=tmp_path / "saved",
    )
    model = trained_by_name([0])[0]
    optimizer = torch.optim.AdamW([("1.weight", model[1].weight), ("2.weight", model[2].weight)])
    distckpt.load({"model": model, "optim": optimizer}, tmp_path / "saved")
    assert_same(optimizer.state[model[1].weight], saved[1].state[saved[0][1].weight])
    assert not optimizer.state[model[2].weight]
    assert "no state of the optimizer for '2.weight'" in caplog.text
    assert "'optim.state.0.exp_avg'" in caplog.text


def test_names_that_are_not_here_are_warned_of(tmp_path, caplog):
    saved = trained_by_name([0, 1, 2], "net.")
    torch_dcp.save(
        {"model": saved[0].state_dict(), "optim": saved[1].state_dict()},
        checkpoint_id=tmp_path / "saved",
    )
    model, optimizer = trained_by_name([0, 1, 2])
    distckpt.load({"model": model, "optim": optimizer}, tmp_path / "saved")
    assert_same(optimizer.state[model[1].weight], saved[1].state[saved[0][1].weight])
    assert "names its parameters 'net.{0..2}.weight'" in caplog.text


def test_parameters_of_a_model_at_the_top(tmp_path):
    trained = train(*make())
    state = {**trained[0].state_dict(), "optimizer": flattened(*trained)}
    torch_dcp.save(copy.deepcopy(state), checkpoint_id=tmp_path / "saved")
    fresh = make()
    distckpt.load({"model": fresh[0], "optimizer": fresh[1]}, tmp_path / "saved")
    assert_same_training(fresh, trained)


def test_several_modules_with_equal_names(tmp_path):
    pairs = {"gen": train(*make()), "disc": train(*make("SGD"))}
    state = {name: model.state_dict() for name, (model, _) in pairs.items()}
    state |= {f"opt_{name}": get_optimizer_state_dict(*pair) for name, pair in pairs.items()}
    torch_dcp.save(copy.deepcopy(state), checkpoint_id=tmp_path / "saved")
    fresh = {"gen": make(), "disc": make("SGD")}
    request = {name: model for name, (model, _) in fresh.items()}
    request |= {f"opt_{name}": optimizer for name, (_, optimizer) in fresh.items()}
    distckpt.load(request, tmp_path / "saved")
    for name, pair in fresh.items():
        assert_same_training(pair, pairs[name])


def test_a_model_alone(tmp_path, caplog):
    trained = train(*make())
    state = {"model": trained[0].state_dict(), "o": get_optimizer_state_dict(*trained)}
    torch_dcp.save(copy.deepcopy(state), checkpoint_id=tmp_path / "saved")
    model, _ = make()
    distckpt.load({"model": model}, tmp_path / "saved")
    assert_same(model.state_dict(), trained[0].state_dict())
    assert [each for each in caplog.records if each.levelno >= logging.WARNING] == []


def test_an_optimizer_at_another_place_is_named(tmp_path):
    trained = train(*make())
    state = {"model": trained[0].state_dict(), "optim": get_optimizer_state_dict(*trained)}
    torch_dcp.save(copy.deepcopy(state), checkpoint_id=tmp_path / "saved")
    model, optimizer = make()
    with pytest.raises(distckpt.LoadMismatchError, match=r"at 'optim'") as raised:
        distckpt.load({"model": model, "optimizer": optimizer}, tmp_path / "saved")
    assert "No state of an optimizer" not in str(raised.value)


@pytest.mark.parametrize(("form", "layout", "kind"), CASES)
def test_objects_are_filled_from_exports_of_state_dicts(tmp_path, form, layout, kind):
    trained = train(*make(kind))
    state = LAYOUTS[layout](trained[0].state_dict(), FORMS[form](*trained))
    torch_dcp.save(copy.deepcopy(state), checkpoint_id=tmp_path / "saved")
    distckpt.torch_dist.export(tmp_path / "saved", tmp_path / "exported")
    fresh = make(kind)
    distckpt.load(LAYOUTS[layout](*fresh), tmp_path / "exported")
    assert_same_training(fresh, trained)


def test_states_without_their_parameter_groups_are_called_that(tmp_path):
    trained = train(*make())
    states = {"state": get_optimizer_state_dict(*trained)["state"]}
    saved = {"model": trained[0].state_dict(), "optim": states}
    torch_dcp.save(copy.deepcopy(saved), checkpoint_id=tmp_path / "saved")
    model, optimizer = make()
    with pytest.raises(distckpt.LoadMismatchError, match="at 'optim' without the parameter groups"):
        distckpt.load({"model": model, "optim": optimizer}, tmp_path / "saved")


def test_numbers_of_other_parameters_are_refused(tmp_path):
    model, optimizer = train(*make())
    state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    torch_dcp.save(copy.deepcopy(state), checkpoint_id=tmp_path / "saved")
    model, _ = make()
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    with pytest.raises(distckpt.LoadMismatchError, match="in the order in which it was saved"):
        distckpt.load({"model": model, "optim": optimizer}, tmp_path / "saved")
    optimizer = torch.optim.AdamW([model.scale], amsgrad=True)
    with pytest.raises(distckpt.LoadMismatchError, match="numbers of 5 parameters"):
        distckpt.load({"model": model, "optim": optimizer}, tmp_path / "saved")


class Unknown:
    pass


def test_numbers_of_other_groups_are_refused(tmp_path):
    def grouped(*which):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 4))
        groups = [{"params": [p for p in model.parameters() if p.ndim == n]} for n in which]
        return model, torch.optim.AdamW(groups)

    model, optimizer = grouped(2, 1)
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    torch_dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path / "saved")
    model, other = grouped(1, 2)
    with pytest.raises(distckpt.LoadMismatchError, match="in the order in which it was saved"):
        distckpt.load({"model": model, "optimizer": other}, tmp_path / "saved")
    model, same = grouped(2, 1)
    distckpt.load({"model": model, "optimizer": same}, tmp_path / "saved")
    assert_same(same.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("is_known", [True, False])
def test_values_that_lightning_stores_beside(tmp_path, caplog, is_known):
    """As Fabric's strategies do: state dicts with `dcp.save`, all else with `torch.save`."""
    trained = train(*make())
    state = {"model": trained[0].state_dict(), "optimizer": get_optimizer_state_dict(*trained)}
    torch_dcp.save(copy.deepcopy(state), checkpoint_id=tmp_path / "saved")
    extra = {"step": 7, "hparams": {"lr": 0.5, "dims": (1, 2)}, "rng": torch.arange(3)}
    torch.save(extra if is_known else {"step": Unknown()}, tmp_path / "saved/meta.pt")
    model, optimizer = make()
    request = {"model": model, "optimizer": optimizer}
    loaded = distckpt.load(request, tmp_path / "saved")
    assert_same_training((model, optimizer), trained)
    if is_known:
        assert (loaded["step"], loaded["hparams"]) == (7, extra["hparams"])
        assert torch.equal(loaded["rng"], extra["rng"])
    else:
        assert "Unknown" in caplog.text
        assert "nothing of it was run" in caplog.text


@pytest.mark.parametrize("form", FORMS)
def test_the_options_of_a_group_without_parameters(form, tmp_path):
    def make_with_empty_group(lr):
        model = nn.Linear(4, 4)
        groups = [{"params": [], "lr": 2 * lr}, {"params": list(model.parameters()), "lr": lr}]
        return model, torch.optim.AdamW(groups)

    model, optimizer = make_with_empty_group(0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    saved = {"model": model.state_dict(), "optim": FORMS[form](model, optimizer)}
    torch_dcp.save(saved, checkpoint_id=tmp_path)
    model, optimizer = make_with_empty_group(9.0)
    distckpt.load({"model": model, "optim": optimizer}, tmp_path)
    # Flattened state dicts have options by parameter.
    empty = 18.0 if form == "flattened" else 0.2
    assert [group["lr"] for group in optimizer.param_groups] == [empty, 0.1]


@pytest.mark.parametrize("flat", [False, True])
def test_optimizers_whose_states_were_made_one(flat, tmp_path):
    def make_two(lr):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        sgd = torch.optim.SGD(model[1].parameters(), lr=lr, momentum=0.9)
        return model, [torch.optim.AdamW(model[0].parameters()), sgd]

    model, optimizers = make_two(0.3)
    model(torch.ones(2, 4)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    merged = get_optimizer_state_dict(model, optimizers, options=options)
    torch_dcp.save({"model": model.state_dict(), "optim": merged}, checkpoint_id=tmp_path)
    expected = [optimizer.state_dict() for optimizer in optimizers]
    model, loaded = make_two(0.1)
    distckpt.load({"model": model, "optim": loaded}, tmp_path)
    assert loaded[1].param_groups[0]["lr"] == 0.3
    for optimizer, state_dict in zip(loaded, expected, strict=True):
        assert_same(optimizer.state_dict()["state"], state_dict["state"])


def test_a_checkpoint_without_optimizers_for_several(tmp_path):
    model, optimizer = make("SGD")
    distckpt.save({"model": model}, tmp_path / "saved")
    others = [optimizer, torch.optim.SGD(model.parameters(), lr=0.1)]
    with pytest.raises(distckpt.LoadMismatchError, match="No state of an optimizer is read"):
        distckpt.load({"model": model, "optim": others}, tmp_path / "saved")


def test_where_trainers_keep_the_state_of_an_optimizer(tmp_path):
    model, optimizer = make("SGD")
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.bin")
    with pytest.raises(distckpt.LoadMismatchError, match=r"optimizer\.bin of accelerate"):
        distckpt.load({"model": model, "optimizer": optimizer}, tmp_path)
    distckpt.load({"model": model}, tmp_path)
