# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""Runs a function in several processes of one group."""

import os
import tempfile

import torch
import torch.distributed
import torch.multiprocessing


def _rank(rank, ranks, backend, store, function, arguments):
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    torch.distributed.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks)
    try:
        function(rank, ranks, *arguments)
    finally:
        torch.distributed.destroy_process_group()


def run(function, ranks, *arguments, backend="gloo"):
    """`function(rank, ranks, *arguments)`, of a module's top level; raises what a rank raised."""
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        torch.multiprocessing.spawn(_rank, (ranks, backend, store, function, arguments), nprocs=ranks)
