"""The Trainer to import in the place of that of transformers, which is the oracle: a run that is
not interrupted, and what its own checkpoints bring back.
"""

from __future__ import annotations

import shutil

import pytest
import torch
import transformers
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments

import distckpt
from distckpt.integrations.transformers import Trainer

pytestmark = pytest.mark.filterwarnings("ignore")

SIZES = {
    "vocab_size": 32,
    "max_position_embeddings": 8,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "attention_dropout": 0.1,
}
EVERY_4 = {"save_strategy": "steps", "save_steps": 4}
BEST = {
    "eval_strategy": "steps",
    "eval_steps": 4,
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_far_loss",
    "greater_is_better": False,
}


class Counting(Dataset):
    """Rows of numbers that go up by a stride."""

    def __init__(self, stride=1):
        self.stride = stride

    def __len__(self):
        return 40

    def __getitem__(self, index):
        row = (index + self.stride * torch.arange(8)) % 32
        return {"input_ids": row, "labels": row}


def make(base, directory, **settings):
    """Make a Trainer with a warm-up, and evaluation sets of two kinds."""
    torch.manual_seed(0)
    arguments = {
        "output_dir": str(directory),
        "max_steps": 12,
        "per_device_train_batch_size": 8,
        "learning_rate": 0.05,
        "warmup_steps": 6,
        "lr_scheduler_type": "cosine",
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return base(
        LlamaForCausalLM(LlamaConfig(**SIZES)),
        TrainingArguments(**{**arguments, **EVERY_4, **settings}),
        train_dataset=Counting(),
        eval_dataset={"near": Counting(1), "far": Counting(3)},
    )


def trained(base, directory, resume=None, **settings):
    trainer = make(base, directory, **settings)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def figures(trainer):
    """Return the loss and the learning rate of each step."""
    history = trainer.state.log_history
    return {
        each["step"]: (each["loss"], each["learning_rate"]) for each in history if "loss" in each
    }


def assert_same_weights(found, expected):
    for name, value in expected.model.state_dict().items():
        assert torch.equal(found.model.state_dict()[name], value), name


RUNS = {
    "middle_of_an_epoch": {},
    "gradient_accumulation": {"gradient_accumulation_steps": 2},
    "another_optimizer": {"optim": "adafactor", "lr_scheduler_type": "linear"},
    "two_evaluation_sets_and_the_best": BEST,
}


@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_is_the_one_that_was_not_interrupted(name, tmp_path):
    expected = trained(transformers.Trainer, tmp_path / "own", **RUNS[name])
    whole = trained(Trainer, tmp_path / "ours", **RUNS[name])
    assert figures(whole) == figures(expected)
    shutil.rmtree(tmp_path / "ours/checkpoint-12")  # as if the run had been killed
    resumed = trained(Trainer, tmp_path / "ours", resume=True, **RUNS[name])
    assert figures(resumed) == figures(expected)
    assert_same_weights(resumed, expected)
    assert resumed.state.best_metric == expected.state.best_metric
    assert resumed.predict(Counting(5)).metrics["test_loss"] == pytest.approx(
        expected.predict(Counting(5)).metrics["test_loss"]
    )


@pytest.mark.parametrize("settings", [BEST, {**BEST, "save_only_model": True}], ids=["", "model"])
def test_the_best_model_is_loaded_at_the_end(settings, tmp_path):
    settings = {**settings, "learning_rate": 0.2, "save_total_limit": 1}
    expected = trained(transformers.Trainer, tmp_path / "own", **settings)
    found = trained(Trainer, tmp_path / "ours", **settings)
    best = expected.state.best_global_step
    assert best < 12, "the last model is not the best"
    assert found.state.best_model_checkpoint == str(tmp_path / f"ours/checkpoint-{best}")
    assert_same_weights(found, expected)


def test_a_checkpoint_of_the_model_alone_opens_and_resumes_as_that_of_transformers(tmp_path):
    settings = {"save_only_model": True}
    trained(transformers.Trainer, tmp_path / "own", **settings)
    trained(Trainer, tmp_path / "ours", **settings)
    names = [
        {file.name for file in (tmp_path / each / "checkpoint-8").iterdir()}
        for each in ("own", "ours")
    ]
    assert names[0] == names[1]
    LlamaForCausalLM.from_pretrained(tmp_path / "ours/checkpoint-8")
    expected = trained(transformers.Trainer, tmp_path / "own", tmp_path / "own/checkpoint-8")
    found = trained(Trainer, tmp_path / "ours", tmp_path / "ours/checkpoint-8")
    assert figures(found) == figures(expected)


def test_a_checkpoint_of_transformers_is_resumed(tmp_path):
    expected = trained(transformers.Trainer, tmp_path / "own")
    found = trained(Trainer, tmp_path / "ours", resume=str(tmp_path / "own/checkpoint-8"))
    assert figures(found) == figures(expected)
    assert_same_weights(found, expected)


class Averaging(TrainerCallback):
    """Averages the weights after each step."""

    def __init__(self, average):
        self.average = average

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.average.update_parameters(model)


class WithAverage(Trainer):
    """Saves an average of the weights, too."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.average = torch.optim.swa_utils.AveragedModel(self.model)
        self.add_callback(Averaging(self.average))

    def training_state(self):
        return {**super().training_state(), "average": self.average}


def test_a_subclass_saves_more_objects(tmp_path):
    whole = trained(WithAverage, tmp_path)
    resumed = trained(WithAverage, tmp_path, resume=str(tmp_path / "checkpoint-8"))
    for name, value in whole.average.state_dict().items():
        assert torch.equal(resumed.average.state_dict()[name], value), name


def test_the_weights_of_a_checkpoint_are_exported_and_predict_as_the_trainer(tmp_path):
    trainer = trained(Trainer, tmp_path / "ours")
    exported = tmp_path / "exported"
    distckpt.consolidate(tmp_path / "ours/checkpoint-12/state", exported)
    trainer.model.config.save_pretrained(exported)
    opened = LlamaForCausalLM.from_pretrained(exported)
    assert torch.equal(opened.lm_head.weight, trainer.model.lm_head.weight)
    other = make(Trainer, tmp_path / "other")
    distckpt.load({"model": other.model}, tmp_path / "ours/checkpoint-12/state")
    assert other.predict(Counting(5)).metrics["test_loss"] == pytest.approx(
        trainer.predict(Counting(5)).metrics["test_loss"]
    )
