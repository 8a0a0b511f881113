"""A step on several hosts, served to a load as one checkpoint."""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
from collections.abc import Iterator, Mapping

from distckpt._format.marker import CONFIG_FNAME
from distckpt._io.write import in_folder
from distckpt._ranks.collectives import Ranks
from distckpt._storage import locations
from distckpt.manager import _steps as steps
from distckpt.manager._tiers._file_server import Address, FileServer, FilesOfHost
from distckpt.manager._tiers._hosts import Hosts, decide_together
from distckpt.manager._tiers._local_steps import LocalRoot
from distckpt.manager._tiers._survey import SpreadStep
from distckpt.manager._tiers._tier_files import Source, TieredFile, TieredFiles, mounted
from distckpt.manager._tiers._uploads import files_of_manifest

logger = logging.getLogger(__name__)

_ANSWER_SECONDS = 30.0
"""Seconds without any bytes after which another host is no longer asked."""


@contextlib.contextmanager
def served(
    ranks: Ranks,
    hosts: Hosts,
    place: LocalRoot,
    spread: SpreadStep,
    in_root: str,
    contents: Mapping[str, bytes],
) -> Iterator[str]:
    """Yield a URL of a step, read from the nearest tiers.

    These are the directory of this host, the other hosts, and the root. Hosts serve their files
    to each other for the body, which all ranks must leave together.

    Collective operation: all ranks must call it.

    Args:
        ranks: the ranks of the job.
        hosts: the hosts of the job.
        place: the local directory of this host.
        spread: the step, and who has its files.
        in_root: location of the step in the root.
        contents: marker and manifest.
    """
    directory = place.step(spread.step)
    own = hosts.of_rank[ranks.rank]
    with contextlib.ExitStack() as serving:
        clients = _connected(ranks, hosts, spread, directory, serving)
        numbers = {}
        for host in clients:
            numbers[host] = {name: number for number, name in enumerate(spread.files_of(host))}
        files = {}
        for name, num_bytes in spread.sizes.items():
            sources: list[Source] = []
            holders = spread.hosts[name]
            if own in holders:
                sources.append(Source("own", locations.join(directory, name)))
            # Ranks begin with different ones.
            first = ranks.rank % len(holders)
            for host in (*holders[first:], *holders[:first]):
                if host in clients:
                    number = numbers[host][name]
                    sources.append(Source("peer", host=clients[host], number=number))
            files[name] = TieredFile(num_bytes, sources)
        if spread.root_suffix is not None:
            _add_root(files, contents, in_root, spread.root_suffix)
        tiered = TieredFiles(contents, files)
        yield serving.enter_context(mounted(tiered, steps.step_name(spread.step)))
        logger.info("%s", _describe(spread.step, tiered.bytes_of_tiers()))


def _connected(
    ranks: Ranks,
    hosts: Hosts,
    spread: SpreadStep,
    directory: str,
    serving: contextlib.ExitStack,
) -> dict[int, FilesOfHost]:
    """Serve the files of this host until `serving` ends; return the ones of other hosts."""
    own = hosts.of_rank[ranks.rank]
    token = ranks.decide("choose a token", lambda: secrets.token_bytes(32))

    def serve() -> Address | None:
        if not hosts.leads(ranks.rank) or len(hosts.names) == 1:
            return None
        paths = [locations.join(directory, name) for name in spread.files_of(own)]
        server = FileServer(paths, token)
        serving.callback(server.close)
        return server.address

    addresses = decide_together(ranks, "serve files to other hosts", serve, list)
    clients = {}
    for host in range(len(hosts.names)):
        address = addresses[hosts.ranks_of(host)[0]]
        if host != own and address is not None:
            clients[host] = FilesOfHost(tuple(address), token, _ANSWER_SECONDS)
            serving.callback(clients[host].close)
    return clients


def _describe(step: int, num_bytes: Mapping[str, int]) -> str:
    parts = []
    for tier, name in (("own", "this host"), ("peer", "other hosts"), ("store", "the root")):
        if num_bytes.get(tier):
            parts.append(f"{num_bytes[tier]} bytes from {name}")
    return f"step {step} was read: {', '.join(parts) or 'nothing but the manifest'}"


def _add_root(
    files: dict[str, TieredFile], contents: Mapping[str, bytes], in_root: str, suffix: str
) -> None:
    """Add the root as the last source of each file."""
    marker = json.loads(contents[CONFIG_FNAME])
    data = contents[marker["manifest"]["name"]]
    for file in files_of_manifest(data):
        name = file.name
        if suffix:
            name = in_folder(name, suffix)
        source = Source("store", locations.join(in_root, name))
        sources = [*files[file.name].sources, source] if file.name in files else [source]
        files[file.name] = TieredFile(file.num_bytes, sources)
