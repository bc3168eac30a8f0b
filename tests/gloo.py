"""Ranks of one process group, forked from a process that has imported PyTorch and the trainer once."""

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing

from pipeline import distributed
from tests import daemons

IMPORTS = ["pipeline.learner", "pipeline.distributed"]
"""What takes seconds to import, and starts no thread."""


def run(work: Callable[..., None], *arguments: Any, count: int = 2, timeout_s: float = 200) -> None:
    """`work(*arguments)` on each of `count` gloo ranks.

    `timeout_s`: of each wait of one rank for another. What a rank raises is raised here.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(IMPORTS)
    with daemons.held_port() as port:
        given = (port, count, timeout_s, work, arguments)
        torch.multiprocessing.start_processes(_rank, given, nprocs=count, start_method="forkserver")


def _rank(
    rank: int, port: int, count: int, timeout_s: float, work: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    distributed.start(timeout_s)
    work(*arguments)
    distributed.stop()
