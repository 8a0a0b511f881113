"""After a power failure: the result, whole, once a call has returned; until then that or what was
there before.

Every scenario is run once and recorded. From the recording follow the states in which a disk may be
at any moment (see `after_crash`); each is made in a folder and judged as users judge: by a look, a
load, checksums.
"""

from __future__ import annotations

import os
import shutil
import sys
from functools import partial

import pytest
import torch

import distckpt
from distckpt import CheckpointManager, CheckpointNotFoundError, ShardedTensor
from tests.support import harness, scenarios
from tests.support.after_crash import SYNCS, history_of, merged, states_after, tree_of, write_tree
from tests.support.calls import recorded
from tests.support.hf_folders import read_export
from tests.support.sampling import one_in
from tests.support.scenarios import NEW, SCENARIOS, Scenario, scenario_state, verdict_on

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="descriptors are looked up in /proc"),
    pytest.mark.filterwarnings("ignore:torch.distributed is "),
]

FEW, MANY = 8, 2048
"""Combinations of what is kept and what is lost that are all tried; of more, a choice."""


# --- Scenarios ------------------------------------------------------------------------------------


def save_into_new_folders(folder, rank, num_ranks):
    distckpt.save(
        scenario_state(NEW, rank, num_ranks), folder / "runs" / "a" / "checkpoint", overwrite=True
    )


def judge_new_folders(folder):
    return verdict_on(folder / "runs" / "a" / "checkpoint")


def judge_with_config(judge, folder):
    """An export is not whole without the files that were to be copied into it."""
    verdict = judge(folder)
    assert verdict != "new" or (folder / "export" / "config.json").read_text() == "{}"
    return verdict


def judge_with_tracker(folder):
    """The file that names the latest step names one that is there, and a save is done when it names
    its step.
    """
    verdict = scenarios.judge_steps(folder)
    tracked = int((folder / "latest_checkpointed_iteration.txt").read_text())
    assert tracked in CheckpointManager(folder).steps()
    return verdict if tracked == 3 else "old"


def first_step(folder, rank, num_ranks):
    manager = CheckpointManager(folder / "run", async_save=False)
    manager.save(3, scenario_state(NEW, rank, num_ranks), overwrite=True)


def judge_first_step(folder):
    tracker = folder / "run" / "latest_checkpointed_iteration.txt"
    if not tracker.exists():
        return "absent"
    assert int(tracker.read_text()) == CheckpointManager(folder / "run").latest() == 3
    return verdict_on(folder / "run" / "step_00000003")


def source_to_reshard(folder):
    distckpt.save(scenario_state(NEW), folder / "source")


def reshard(folder, rank, num_ranks):
    distckpt.reshard(folder / "source", folder / "checkpoint", num_ranks=2, overwrite=True)


_OWN = [
    Scenario(
        "save_into_new_folders",
        scenarios.nothing,
        save_into_new_folders,
        judge_new_folders,
        "absent",
    ),
    Scenario("first_step", scenarios.nothing, first_step, judge_first_step, "absent"),
    Scenario(
        "reshard", source_to_reshard, reshard, scenarios.judge_checkpoint, "absent", max_ranks=1
    ),
]
NAMED = {**{scenario.name: scenario for scenario in _OWN}, **SCENARIOS}
"""All scenarios by name, with judges that look at everything that has to be flushed."""
for _name in ("export", "export_over_another"):
    NAMED[_name] = NAMED[_name]._replace(judge=partial(judge_with_config, NAMED[_name].judge))
for _name in ("manager", "async_manager"):
    NAMED[_name] = NAMED[_name]._replace(judge=judge_with_tracker)
ON_TWO_RANKS = ["save", "manager", "export_over_another"]


# --- Recording and judging ------------------------------------------------------------------------


def record_rank(rank, scenario, folder, num_ranks):
    """Run a scenario on one of several ranks, and return what matters of its calls."""
    with recorded(folder) as calls:
        scenario.run(folder, rank, num_ranks)
    return [call for call in calls if call.name == "open" or call.changes_something]


class Story:
    """A scenario that was run and recorded, and judgements on what may be left of it."""

    def __init__(self, scenario, folder, num_ranks=1, run=None):
        self.scenario, self._folder = scenario, folder
        work = folder / "work"
        work.mkdir(parents=True)
        scenario.prepare(work)
        self.before = tree_of(work)
        if num_ranks > 1:
            self.calls = merged(harness.run(record_rank, num_ranks, scenario, work, num_ranks))
        else:
            with recorded(work) as self.calls:
                (run or scenario.run)(work, 0, 1)
        self.history = history_of(self.before, self.calls)
        self.after = tree_of(work)
        self.syncs = [call for call in self.calls if call.name in SYNCS]
        self._num_made = 0

    def states(self, max_states, without=()):
        """Return the different states that power failures leave, as tree -> whether one after the
        end does.

        Args:
            max_states: see `states_after`.
            without: calls that are taken as not made.
        """
        history = self.without(without)
        found = {}
        for number in reversed(history.crash_points):
            for tree in states_after(history, number, max_states):
                found.setdefault(tuple(sorted(tree.items())), number == history.num_calls)
        return found

    def without(self, calls):
        """Return the history as if some calls had not been made."""
        return (
            history_of(self.before, [call for call in self.calls if call not in calls])
            if calls
            else self.history
        )

    def expected(self, is_after_end):
        """Return the verdicts that are right on a state."""
        return {"new"} if is_after_end else {"new", self.scenario.before}

    def make(self, state):
        """Make a folder of a state."""
        self._num_made += 1
        folder = self._folder / f"state_{self._num_made}"
        write_tree(dict(state), folder)
        return folder

    def verdict(self, state, retries=False):
        """Judge a state, and whether the scenario succeeds when it is run again on it."""
        folder = self.make(state)
        try:
            verdict = self.scenario.judge(folder)
            if retries:
                self.scenario.run_again(folder, 0, 1)
                assert self.scenario.judge(folder) == "new", "the next one does not work"
        finally:
            shutil.rmtree(folder)
        return verdict

    def survives(self, max_states, max_retries):
        """Judge all states, and run the scenario again on some that differ in names; returns
        counts.
        """
        states = self.states(max_states)
        shapes = {}
        for state in states:
            shapes.setdefault(tuple(path for path, _ in state), state)
        retried = {
            id(state) for state in list(shapes.values())[:: max(1, len(shapes) // max_retries)]
        }
        for state, is_after_end in states.items():
            verdict = self.verdict(state, id(state) in retried)
            assert verdict in self.expected(is_after_end), describe(state)
        return {
            "calls": len(self.calls),
            "flushes": len(self.syncs),
            "states": len(states),
            "retries": len(retried),
        }

    def notices(self, states):
        """Tell whether a judgement is wrong on any of these states."""
        for state, is_after_end in sorted(states.items(), key=lambda item: not item[1]):
            try:
                if self.verdict(state) not in self.expected(is_after_end):
                    return True
            except Exception:
                return True
        return False


def note(record_property, counts):
    """Put counts into the report that `--junitxml` writes."""
    for name, count in counts.items():
        record_property(name, count)


def describe(state):
    return "\n".join(
        f"{path} {'(directory)' if content is None else len(content)}" for path, content in state
    )


# --- The model ------------------------------------------------------------------------------------


def test_what_may_be_left_of_a_small_history(tmp_path):
    with recorded(tmp_path) as calls:
        fd = os.open(tmp_path / "a", os.O_CREAT | os.O_WRONLY)
        os.write(fd, b"1234")
        os.rename(tmp_path / "a", tmp_path / "b")
        os.fsync(fd)
        os.close(fd)
    history = history_of({}, calls)
    before_flush, end = (
        [dict(tree) for tree in states_after(history, n, 100)] for n in history.crash_points
    )
    contents = [b"1234", b"12", b""]
    assert {*map(repr, before_flush)} == {
        "{}",
        *(repr({name: content}) for name in "ab" for content in contents),
    }
    assert {*map(repr, end)} == {"{}", *(repr({name: b"1234"}) for name in "ab")}


def test_names_are_certain_when_the_directory_is_flushed(tmp_path):
    with recorded(tmp_path) as calls:
        os.mkdir(tmp_path / "d")
        os.close(os.open(tmp_path / "d" / "f", os.O_CREAT | os.O_WRONLY))
        fd = os.open(tmp_path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
    history = history_of({}, calls)
    end = [dict(tree) for tree in states_after(history, history.num_calls, 100)]
    assert sorted(map(repr, end)) == ["{'d': None, 'd/f': b''}", "{'d': None}"]


# --- Everything that is saved ---------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMED)
def test_whole_when_it_returns_and_never_a_mixture(tmp_path, record_property, name):
    story = Story(NAMED[name], tmp_path)
    # The recording is complete: with nothing lost it leads to what is there.
    assert dict(next(states_after(story.history, story.history.num_calls, 1))) == story.after
    note(record_property, story.survives(FEW, max_retries=3))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMED)
def test_more_states(tmp_path, record_property, name):
    note(record_property, Story(NAMED[name], tmp_path).survives(MANY, max_retries=1000))


@pytest.mark.parametrize("name", one_in(2, ON_TWO_RANKS))
def test_on_two_ranks(tmp_path, record_property, name):
    note(record_property, Story(NAMED[name], tmp_path, 2).survives(FEW, max_retries=2))


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(
    "name", [name for name, scenario in NAMED.items() if scenario.max_ranks > 1]
)
def test_more_states_on_several_ranks(tmp_path, record_property, name, num_ranks):
    story = Story(NAMED[name], tmp_path, num_ranks)
    note(record_property, story.survives(MANY // 8, max_retries=50))


@pytest.mark.parametrize(
    "name", one_in(2, [name for name in NAMED if not name.startswith("async")])
)
def test_a_flush_that_were_left_out_would_be_noticed(tmp_path, record_property, name):
    """Any one of them; where a file or directory is flushed more than once without need, all of
    these.
    """
    story = Story(NAMED[name], tmp_path)
    possible = story.states(FEW)
    superfluous = []
    for sync in story.syncs:
        if not story.notices(more_than(possible, story.states(FEW, without=[sync]))):
            superfluous.append(sync)
    for paths in {sync.paths for sync in superfluous}:
        same = [sync for sync in story.syncs if sync.paths == paths]
        assert len(same) > 1, paths
        assert story.notices(more_than(possible, story.states(FEW, without=same))), paths
    note(record_property, {"flushes": len(story.syncs), "superfluous": len(superfluous)})


def more_than(possible, states):
    """Return the states that were not possible, or not after the end."""
    return {
        state: is_after_end
        for state, is_after_end in states.items()
        if is_after_end > possible.get(state, -1)
    }


# --- Large files ----------------------------------------------------------------------------------


def large_tensor(value):
    return torch.arange(5 << 20, dtype=torch.float32) + value


def save_large(folder, rank, num_ranks):
    state = {"w": ShardedTensor.from_rank_offsets("w", large_tensor(NEW)), "value": NEW}
    distckpt.save(state, folder / "checkpoint")


def judge_large(folder):
    assert distckpt.verify(folder / "checkpoint").is_whole
    assert torch.equal(distckpt.open(folder / "checkpoint").read_tensors()["w"], large_tensor(NEW))
    return "new"


def prepare_large_export(folder):
    save_large(folder, 0, 1)


def export_large(folder, rank, num_ranks):
    distckpt.consolidate(folder / "checkpoint", folder / "export")


def judge_large_export(folder):
    assert torch.equal(read_export(folder / "export")["w"], large_tensor(NEW))
    return "new"


@pytest.mark.parametrize(
    "scenario",
    [
        Scenario("save", scenarios.nothing, save_large, judge_large, "absent"),
        Scenario("export", prepare_large_export, export_large, judge_large_export, "absent"),
    ],
    ids=lambda scenario: scenario.name,
)
def test_large_files_are_flushed_whole(tmp_path, scenario):
    """Several threads write one file, around the page cache."""
    story = Story(scenario, tmp_path)
    (file,) = {
        call.paths for call in story.calls if call.name == "open" and call.flags & os.O_DIRECT
    }
    flush = next(sync for sync in story.syncs if sync.paths == file)
    states = list(states_after(story.history, story.history.num_calls, FEW))
    assert {story.verdict(tuple(state.items())) for state in states} == {"new"}
    lost = story.without([flush])
    state = next(
        state for state in states_after(lost, lost.num_calls, 1) if dict(state) != story.after
    )
    assert story.notices({tuple(state.items()): True})


# --- Saves that do not wait for the disk ----------------------------------------------------------


@pytest.mark.parametrize("has_earlier", [False, True], ids=["new", "overwrite"])
def test_a_save_that_is_not_durable_is_not_falsely_whole(tmp_path, has_earlier):
    def save(folder, rank, num_ranks):
        distckpt.save(
            scenario_state(NEW), folder / "checkpoint", overwrite=has_earlier, durable=False
        )

    scenario = NAMED["overwrite" if has_earlier else "save"]
    story = Story(scenario, tmp_path, run=save)
    assert story.syncs == []
    verdicts = [verdict_without_flushes(story.make(state)) for state in story.states(200)]
    assert {"damaged", "new", "old" if has_earlier else "absent"} <= set(verdicts)


def verdict_without_flushes(folder):
    path = folder / "checkpoint"
    try:
        report = distckpt.verify(path)
    except CheckpointNotFoundError:
        return "absent"
    return verdict_on(path) if report.is_whole else "damaged"
