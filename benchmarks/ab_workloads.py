"""What `ab.py` measures: a table of workloads, each a call of distckpt or an import."""

from __future__ import annotations

from typing import NamedTuple


class Workload(NamedTuple):
    """A call that is measured, and what it saves, loads or merges; or an import.

    Attributes:
        name: for `--only`.
        title: as it is shown, with `{size}`.
        verb: "save", "load" or "consolidate"; what the last two read is saved before. Or "import".
        state: "small" (tensors of 16 KiB on each rank), "tiny" (of 4 KiB), "llama", or "shards" of
            torch's Hugging Face writer.
        size: number of tensors; of a llama, gigabytes of all ranks together.
        quick_size: that of `--quick`.
        ranks: that make the call.
        writers: ranks that save what is read.
        is_processor_time: measured rather than the time that passes.
        is_first: the first call of a process. Others follow calls for one tensor.
        statement: for an import, whose processor time is measured, after that of torch.
    """

    name: str
    title: str
    verb: str
    state: str = ""
    size: float = 0
    quick_size: float = 0
    ranks: int = 1
    writers: int = 1
    is_processor_time: bool = False
    is_first: bool = False
    statement: str = ""

    @property
    def reads(self) -> bool:
        """Whether there must be a checkpoint before."""
        return self.verb in ("load", "consolidate")

    def size_of(self, is_quick: bool) -> float:
        """Return the size of a run."""
        return self.quick_size if is_quick else self.size


WORKLOADS = (
    Workload("save_small", "save {size} x 16 KiB, 2 ranks", "save", "small", 20_000, 4_000, 2),
    Workload("load_small", "load {size} x 16 KiB, 2 ranks", "load", "small", 20_000, 4_000, 2, 2),
    Workload("save_large", "save about {size} GB, 2 ranks", "save", "llama", 2.2, 0.3, 2),
    Workload("load_large", "load about {size} GB, 2 ranks", "load", "llama", 2.2, 0.3, 2, 2),
    Workload("load_whole", "load about {size} GB, TP2 to TP1", "load", "llama", 2.2, 0.3, 1, 2),
    Workload(
        "load_planning", "load {size} x 4 KiB, 1 rank (CPU)", "load", "tiny", 5_000, 5_000,
        is_processor_time=True,
    ),
    Workload(
        "consolidate", "consolidate {size} x 4 KiB (CPU)", "consolidate", "tiny", 5_000, 5_000,
        is_processor_time=True,
    ),
    Workload(
        "consolidate_shards", "consolidate {size} tensors of 4 shards of torch (CPU)",
        "consolidate", "shards", 2_000, 2_000, writers=4, is_processor_time=True,
    ),
    Workload(
        "first_save", "first save of a process, {size} x 4 KiB", "save", "tiny", 5_000, 5_000,
        is_first=True,
    ),
    Workload("import", "import distckpt (CPU)", "import", statement="import distckpt"),
    Workload(
        "import_names", "from distckpt import load, save (CPU)", "import",
        statement="from distckpt import load, save",
    ),
)  # fmt: skip
BY_NAME = {workload.name: workload for workload in WORKLOADS}
