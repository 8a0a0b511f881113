"""The save of a step to the local directories of all hosts."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from distckpt._base.options import SaveReport
from distckpt._commit import posix
from distckpt._format.manifest import is_manifest_name
from distckpt._format.marker import CONFIG_FNAME, encode_marker
from distckpt._operations.planned_save import PlannedSave, complete_marker, report_save
from distckpt._ranks.collectives import Ranks
from distckpt._ranks.exchanges import pack_parts, unpack_parts
from distckpt._storage import locations
from distckpt.manager import _steps as steps
from distckpt.manager._tiers._local_steps import (
    ATTEMPT,
    NUM_BYTES,
    NUM_FILES,
    LocalRoot,
    pack_files,
    unpack_files,
)
from distckpt.manager._tiers._run_files import RUN


@dataclass
class HostSave:
    """The part of one rank in a save to the hosts.

    Attributes:
        place: the local directory of its run.
        step: the number of the step.
        attempt: when the job began, in seconds since 1970.
        is_leader: whether this rank acts for its host.
        name: names the save, once it is written.
    """

    place: LocalRoot
    step: int
    attempt: int
    is_leader: bool
    name: str = field(default="", init=False)
    _is_committed: bool = field(default=False, init=False)

    def write(self, ranks: Ranks, save: PlannedSave) -> SaveReport:
        """Write a planned save, and commit it on all hosts.

        Collective operation: all ranks must call it. A host that fails fails the save: no host
        keeps its files.
        """
        with contextlib.ExitStack() as cleaning:
            with save.timer.phase("write") as details:
                details["bytes"] = save.prepared.num_bytes
                directory = self._begin(ranks, save, cleaning)
                with ranks.telling("save to the hosts") as told:
                    if self.is_leader:
                        self.place.make()
                    # Every rank makes them: the ones of a host do not wait for their leader.
                    for name in posix.SUBDIRECTORIES:
                        locations.make_directories(locations.join(directory, name))
                    own = save.prepared.write_own(directory, ranks)
                    if save.request.options.durable:
                        for name in posix.SUBDIRECTORIES:
                            locations.sync_directory(locations.join(directory, name))
                    figures = save.timer.figures(save.prepared.num_bytes)
                    told.payload = pack_parts([figures, own])
            with save.timer.phase("commit"):
                with ranks.answering(told, "complete the manifest"):
                    if ranks.is_coordinator:
                        told.answer = self._complete(save, directory, told.payloads)
                figures, contents = unpack_parts(told.answer)
                with ranks.phase("commit on the hosts"):
                    if self.is_leader:
                        durable = save.request.options.durable
                        self.place.commit(self.step, directory, unpack_files(contents), durable)
                        self._is_committed = True
            cleaning.pop_all()
        return report_save(ranks, save, tuple(json.loads(figures)))

    def _begin(self, ranks: Ranks, save: PlannedSave, cleaning: contextlib.ExitStack) -> str:
        """Return the directory that is written into on this host."""
        nonce, self.name = ranks.decide_json(
            "create directories on the hosts",
            lambda: [secrets.token_hex(8), save.request.notes[steps.NOTE]["save"]],
        )
        directory = self.place.hidden(self.step, nonce)
        if self.is_leader:
            cleaning.callback(self._give_up, directory)
        return directory

    def _give_up(self, directory: str) -> None:
        """Remove the files of this host after a failure; another host may lack its own."""
        locations.remove_tree(directory)
        if self._is_committed:
            self.place.remove(self.step)

    def _complete(self, save: PlannedSave, directory: str, payloads: Sequence[bytes]) -> bytes:
        """Return figures, and manifests and marker, for all hosts; for the coordinator."""
        figures, reports = zip(*map(unpack_parts, payloads), strict=True)
        fields = complete_marker(save, directory, reports)
        files = [file for file in save.prepared.written if not is_manifest_name(file[0])]
        note = {
            **fields[steps.NOTE],
            RUN: self.place.run,
            ATTEMPT: self.attempt,
            NUM_FILES: len(files),
            NUM_BYTES: sum(size for _, size in files),
        }
        contents = {}
        for name, _ in save.prepared.written:
            if is_manifest_name(name):
                contents[name] = locations.read_bytes(locations.join(directory, name))
        # The marker comes last.
        contents[CONFIG_FNAME] = encode_marker({**fields, steps.NOTE: note})
        united = json.dumps(save.timer.united(figures, "write")).encode()
        return pack_parts([united, pack_files(contents)])
