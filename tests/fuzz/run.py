"""The long form: coverage-guided fuzzing of one target with atheris.

    python -m tests.fuzz.run TARGET --runs 100000

Starts from the valid inputs of the target and its corpus in `tests/fuzz/corpus/TARGET/`. What is
found there is
minimised: afterwards the corpus holds the inputs, shortest first, that reach branches which no
valid input reaches. An input that makes the target fail is kept in the corpus as `finding-<digest>`
and replayed by the tests from then on.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

CORPUS = Path(os.environ.get("DISTCKPT_FUZZ_CORPUS", Path(__file__).parent / "corpus"))
MEMORY_BYTES = 1 << 30
"""An input may make its target take this much memory at most."""
SECONDS = 20
"""An input may take this long, on a busy machine too."""
KEPT_BYTES = 15_000
"""Size of the corpus of a target, findings aside."""

_Branch = tuple[CodeType, int, int]


def main() -> int:
    """Fuzz, then minimise."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target")
    parser.add_argument(
        "--runs", type=int, default=100_000, help="executions (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the random numbers; 0 takes another one each time"
    )
    parser.add_argument("--child", metavar="FOLDER", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        _fuzz(arguments.target, arguments.runs, arguments.seed, Path(arguments.child))
    return _run(arguments.target, arguments.runs, arguments.seed)


def corpus_of(target: str) -> list[Path]:
    """List the inputs that are kept for a target."""
    return sorted((CORPUS / target).glob("*"))


def _run(target: str, runs: int, seed: int) -> int:
    """Fuzz in a child process, which libFuzzer ends, and keep what it found."""
    with tempfile.TemporaryDirectory(prefix="distckpt-fuzz-") as folder:
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "tests.fuzz.run",
            target,
            "--child",
            folder,
        ]
        command += ["--runs", str(runs), "--seed", str(seed)]
        child = subprocess.run(
            command, stderr=subprocess.PIPE, text=True, errors="replace", check=False
        )
        done = re.findall(r"Done (\d+) runs in (\d+) second", child.stderr)
        findings = sorted(Path(folder, "findings").glob("*"))
        kept = _keep(target, sorted(Path(folder, "corpus").glob("*")), findings)
        if not done:
            print(child.stderr[-6000:])
    executions, seconds = done[-1] if done else ("an unknown number of", "?")
    print(
        f"{target}: {executions} executions in {seconds} s, {len(findings)} findings, {kept} "
        "inputs kept"
    )
    return 1 if findings or not done else 0


def _fuzz(name: str, runs: int, seed: int, folder: Path) -> None:
    """Fuzz in this process; libFuzzer ends it."""
    import atheris

    # Before the hook, which would slow its import down.
    import torch.distributed.checkpoint  # noqa: F401

    with atheris.instrument_imports(include=["distckpt"]):
        from tests.fuzz.contained import limit_memory
        from tests.fuzz.targets import TARGETS

    for sub in ("corpus", "findings", "files"):
        (folder / sub).mkdir()
    target = TARGETS[name]
    seeds, run = target.prepare(folder / "files")
    for index, data in enumerate(seeds):
        (folder / "corpus" / f"valid-{index}").write_bytes(data)
    limit_memory(MEMORY_BYTES)
    options = [
        f"-runs={runs}",
        f"-max_len={target.max_bytes}",
        f"-timeout={SECONDS}",
        "-rss_limit_mb=0",
        "-len_control=0",
    ]
    options += [f"-artifact_prefix={folder}/findings/", f"-seed={seed}"]
    CORPUS.joinpath(name).mkdir(parents=True, exist_ok=True)
    atheris.Setup([sys.argv[0], *options, str(folder / "corpus"), str(CORPUS / name)], run)
    atheris.Fuzz()


# ---- minimising


def _keep(name: str, inputs: list[Path], findings: list[Path]) -> int:
    """Replace the corpus of a target by a small one; returns how many inputs it has."""
    from tests.fuzz.targets import TARGETS

    known = [file.read_bytes() for file in [*corpus_of(name), *inputs]]
    with tempfile.TemporaryDirectory(prefix="distckpt-fuzz-") as folder:
        seeds, run = TARGETS[name].prepare(Path(folder))
        chosen = list(_choose(run, seeds, sorted(set(known), key=lambda data: (len(data), data))))
    for file in corpus_of(name):
        if not file.name.startswith("finding-"):
            file.unlink()
    (CORPUS / name).mkdir(parents=True, exist_ok=True)
    for data in chosen:
        (CORPUS / name / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
    for file in findings:
        data = file.read_bytes()
        (CORPUS / name / f"finding-{hashlib.sha256(data).hexdigest()[:16]}").write_bytes(data)
    return len(corpus_of(name))


def _choose(run: Any, seeds: list[bytes], inputs: list[bytes]) -> Iterator[bytes]:
    """Yield the inputs that reach branches which neither the seeds nor earlier inputs reach."""
    reached: set[_Branch] = set()
    for data in seeds:
        reached |= _branches(run, data)
    num_bytes = 0
    for data in inputs:
        branches = _branches(run, data)
        if branches <= reached or num_bytes + len(data) > KEPT_BYTES:
            continue
        reached |= branches
        num_bytes += len(data)
        yield data


def _branches(run: Any, data: bytes) -> set[_Branch]:
    """Run one input and return the steps from line to line that it takes through the package."""
    steps: set[_Branch] = set()

    def on_call(frame: FrameType, event: str, value: Any) -> Any:
        if f"{os.sep}distckpt{os.sep}" not in frame.f_code.co_filename:
            return None
        last = [frame.f_lineno]

        def on_line(inner: FrameType, kind: str, argument: Any) -> Any:
            steps.add((inner.f_code, last[0], inner.f_lineno))
            last[0] = inner.f_lineno
            return on_line

        return on_line

    threading.settrace(on_call)
    sys.settrace(on_call)
    try:
        run(data)
    except Exception:
        # A finding; it is kept as such.
        return set()
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
    return steps


if __name__ == "__main__":
    sys.exit(main())
