"""Count the optimizers of the package pytorch_optimizer whose training goes on exactly after a save
and a load.

    pip install pytorch_optimizer
    python benchmarks/optimizers.py [NAME ...]

Each is trained for some steps, saved, and loaded into a new model and a new optimizer: by distckpt,
as a dict of objects, and by its own `state_dict` and `load_state_dict`. What trains on as if
nothing had happened, to the last bit, counts as exact. The rest is named with what happened.
"""

from __future__ import annotations

import copy
import inspect
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
from report import Report, parser_of

import distckpt

ARGUMENTS = {
    "num_iterations": 100,
    "num_training_steps": 100,
    "rank": 0,
    "world_size": 1,
    "lr": 1e-2,
}
STEPS, MORE_STEPS = 12, 4
WRAPPERS = (
    "Lookahead",
    "OrthoGrad",
    "ScheduleFreeWrapper",
    "SAM",
    "WSAM",
    "GSAM",
    "LookSAM",
    "TRAC",
    "BSAM",
    "CPSGD",
)


def make_model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))


def make(cls: type, model: torch.nn.Module, wrapper: type | None = None) -> Any:
    """Make an optimizer with its defaults, and what it insists on."""
    if wrapper is not None:
        parameters = inspect.signature(wrapper).parameters
        if "base_optimizer" in parameters:
            return wrapper(model.parameters(), base_optimizer=torch.optim.AdamW, lr=1e-2)
        return wrapper(torch.optim.AdamW(model.parameters(), lr=1e-2))
    first, *others = inspect.signature(cls).parameters.values()
    given = {
        p.name: ARGUMENTS[p.name] for p in others if p.name in ARGUMENTS and p.default is p.empty
    }
    takes_model = "model" in first.name
    takes_groups = "use_muon" in inspect.getsource(cls)
    params: Any = model if takes_model else model.parameters()
    if takes_groups and not takes_model:
        matrices = [p for p in model.parameters() if p.ndim > 1]
        rest = [p for p in model.parameters() if p.ndim < 2]
        params = [{"params": matrices, "use_muon": True}, {"params": rest, "use_muon": False}]
    return cls(params, **given)


def train(model: torch.nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        x = torch.randn(16, 8)

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(x) - x[:, :4]).square().mean()
            loss.backward(create_graph=True)
            return loss

        if hasattr(optimizer, "train"):
            optimizer.train()
        closure()
        for p in model.parameters():
            if p.grad is not None and not getattr(optimizer, "_needs_graph", False):
                p.grad = p.grad.detach() if needs_no_graph(optimizer) else p.grad
        optimizer.step(closure) if needs_closure(optimizer) else optimizer.step()


def needs_no_graph(optimizer: Any) -> bool:
    return "create_graph" not in inspect.getsource(type(optimizer))


def needs_closure(optimizer: Any) -> bool:
    source = inspect.getsource(type(optimizer).step)
    return (
        "NoClosureError" in source
        or "closure is None" in source
        or "closure()" in source.split("loss = None")[0]
    )


def by_distckpt(
    model: torch.nn.Module, optimizer: Any, new_model: torch.nn.Module, new: Any
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        distckpt.save({"model": model, "optimizer": optimizer}, f"{folder}/saved", durable=False)
        distckpt.load({"model": new_model, "optimizer": new}, f"{folder}/saved")


def by_state_dict(
    model: torch.nn.Module, optimizer: Any, new_model: torch.nn.Module, new: Any
) -> None:
    with tempfile.TemporaryFile() as file:
        torch.save((model.state_dict(), optimizer.state_dict()), file)
        file.seek(0)
        model_state, state = torch.load(file, weights_only=False)
    new_model.load_state_dict(model_state)
    new.load_state_dict(state)


def outcome(make_one: Callable[[torch.nn.Module], Any], resume: Callable[..., None]) -> str:
    """Return "exact", or what is wrong."""
    model = make_model(1)
    optimizer = make_one(model)
    train(model, optimizer, range(STEPS))
    new_model = make_model(2)
    new = make_one(new_model)
    before = copy.deepcopy(model.state_dict())
    try:
        resume(model, optimizer, new_model, new)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:150]}"
    if not all(map(torch.equal, before.values(), model.state_dict().values())):
        return "saving changed the model"
    train(model, optimizer, range(STEPS, STEPS + MORE_STEPS))
    try:
        train(new_model, new, range(STEPS, STEPS + MORE_STEPS))
    except Exception as error:
        return f"step after it: {type(error).__name__}: {str(error)[:150]}"
    pairs = list(zip(model.state_dict().values(), new_model.state_dict().values(), strict=True))
    if all(torch.equal(*pair) for pair in pairs):
        return "exact"
    return (
        "exact but for rounding"
        if all(torch.allclose(*pair, rtol=1e-4) for pair in pairs)
        else "goes on otherwise"
    )


def main() -> None:
    import pytorch_optimizer as package

    parser = parser_of(__doc__, runs=None, has_files=False)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of classes; default: all")
    arguments = parser.parse_args()
    report = Report(arguments)
    candidates: dict[str, Callable[[torch.nn.Module], Any]] = {}
    for name in package.get_supported_optimizers():
        cls = package.load_optimizer(name)
        candidates[cls.__name__] = lambda model, cls=cls: make(cls, model)
    for name in WRAPPERS:
        if hasattr(package, name) and name not in candidates:
            candidates[name] = lambda model, name=name: make(object, model, getattr(package, name))
    ways = {"distckpt": by_distckpt, "state_dict": by_state_dict}
    candidates = {
        name: make_one
        for name, make_one in candidates.items()
        if name in (arguments.names or candidates)
    }
    num_exact = dict.fromkeys(ways, 0)
    unusable, rest = {}, {}
    for name, make_one in candidates.items():
        try:
            model = make_model(1)
            train(model, make_one(model), range(STEPS))
        except Exception as error:
            unusable[name] = f"{type(error).__name__}: {str(error)[:150]}"
            continue
        found = {way: outcome(make_one, resume) for way, resume in ways.items()}
        print(f"{name}: {found}", file=sys.stderr, flush=True)
        for way, text in found.items():
            num_exact[way] += text == "exact"
        if found["distckpt"] != "exact" or found["state_dict"] != "exact":
            rest[name] = found
    num = len(candidates) - len(unusable)
    exact = ", ".join(f"{way} {n}" for way, n in num_exact.items())
    report.about = f"{num} of {len(candidates)} train here; exact: {exact}."
    if rest:
        report.add(["not exact", *ways], [[name, *found.values()] for name, found in rest.items()])
    report.notes += [f"{name} does not train here: {text}" for name, text in unusable.items()]
    report.finish()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    main()
