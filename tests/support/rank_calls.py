"""Calls that three ranks make, of a checkpoint in a folder."""

from __future__ import annotations

import distckpt
from tests.support.states import state_of

NUM_RANKS = 3


def overwrite(rank, folder):
    distckpt.save(state_of(2, rank, NUM_RANKS), f"{folder}/checkpoint", overwrite=True)


def load(rank, folder):
    distckpt.load(state_of(-1, rank, NUM_RANKS), f"{folder}/checkpoint", strict="raise")


def load_sharing_reads(rank, folder):
    distckpt.load(state_of(-1, rank, NUM_RANKS), f"{folder}/checkpoint", share_reads="on")
