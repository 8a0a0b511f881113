"""The part that a process does, according to its scheduler's environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distckpt.tasks._pieces import Part

_ARRAYS = (
    ("JOB_COMPLETION_INDEX", None),
    ("AWS_BATCH_JOB_ARRAY_INDEX", "AWS_BATCH_JOB_ARRAY_SIZE"),
)
"""The variables with number and count of jobs in an array.

They are of Kubernetes, which does not give the count, and AWS Batch.
"""
_PROCESSES = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)
"""The variables with number and count of processes in a job.

They are of torchrun, Open MPI, other MPIs, and srun. The first one that is set counts.
"""


def part_of_environment(variables: Mapping[str, str], count: int | None = None) -> Part:
    """Return the part of this process.

    It is the part of its job in an array, divided further among the processes of the job.

    Args:
        variables: of the environment.
        count: number of jobs in the array, where the scheduler does not say it.

    Raises:
        ValueError: the environment does not say it, or not all of it.
    """
    jobs = _job(variables, count)
    processes = _first(variables, _PROCESSES, None)
    known = jobs or processes
    if count is not None and known is not None and known.count != count:
        raise ValueError(
            f"--part auto/{count}: the environment says that there are {known.count}. Write "
            "--part auto."
        )
    if jobs is None and processes is None:
        raise ValueError(
            "--part auto finds no SLURM_ARRAY_TASK_ID, JOB_COMPLETION_INDEX, "
            "AWS_BATCH_JOB_ARRAY_INDEX or RANK in the environment: write --part K/N."
        )
    outer = jobs or Part(0, 1)
    inner = processes or Part(0, 1)
    return Part(outer.index * inner.count + inner.index, outer.count * inner.count)


def _job(variables: Mapping[str, str], count: int | None) -> Part | None:
    """Return the number of this job in its array."""
    is_joined = variables.get("GROUP_WORLD_SIZE", "1") != "1"
    if is_joined and "JOB_COMPLETION_INDEX" in variables:
        # torchrun has joined the pods of an indexed job: its ranks count the processes of all pods.
        return None
    return _slurm_array(variables) or _first(variables, _ARRAYS, count)


def _slurm_array(variables: Mapping[str, str]) -> Part | None:
    if "SLURM_ARRAY_TASK_ID" not in variables:
        return None
    names = ("ID", "MIN", "MAX", "STEP")
    try:
        index, low, high, step = (int(variables[f"SLURM_ARRAY_TASK_{name}"]) for name in names)
    except (KeyError, ValueError) as error:
        raise ValueError(f"The variables of the Slurm array are incomplete ({error}).") from error
    # An array such as 1-4,9 has gaps. All that is known is that the numbers are fewer than its
    # range.
    num_tasks = int(variables.get("SLURM_ARRAY_TASK_COUNT", (high - low) // step + 1))
    if num_tasks != (high - low) // step + 1:
        raise ValueError(
            f"The Slurm array has {num_tasks} tasks from {low} to {high}, with gaps: write --part "
            f"K/{num_tasks}, K from 0, or submit it with --array=0-{num_tasks - 1}."
        )
    return Part((index - low) // step, num_tasks)


def _first(
    variables: Mapping[str, str], numberings: Sequence[tuple[str, str | None]], count: int | None
) -> Part | None:
    for index, size in numberings:
        if index not in variables or (size is not None and size not in variables):
            continue
        if size is None and count is None:
            raise ValueError(
                f"{index} says which part this is, and nothing says of how many: write --part "
                "auto/N with the number of completions of the job."
            )
        return Part(_number(variables, index), _number(variables, size) if size else count or 0)
    return None


def _number(variables: Mapping[str, str], name: str) -> int:
    try:
        return int(variables[name])
    except ValueError:
        raise ValueError(
            f"{name} is {variables[name]!r} in the environment, no number: write --part K/N."
        ) from None
