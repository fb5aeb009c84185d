# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""Runs a function in several processes of one group."""

import datetime
import faulthandler
import os
import pathlib
import tempfile
import traceback

import torch
import torch.distributed
import torch.multiprocessing


def _rank(rank, ranks, backend, folder, function, arguments):
    faulthandler.dump_traceback_later(400, exit=True)  # a rank that hangs says where, and ends
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    torch.distributed.init_process_group(
        backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=120),
    )
    try:
        function(rank, ranks, *arguments)
    except BaseException:
        pathlib.Path(folder, f"failure-{rank}").write_text(traceback.format_exc())
        raise
    torch.distributed.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


def run(function, ranks, *arguments, backend="gloo"):
    """`function(rank, ranks, *arguments)`, of a module's top level; tells what every rank that failed raised."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            torch.multiprocessing.spawn(_rank, (ranks, backend, folder, function, arguments), nprocs=ranks)
        except (torch.multiprocessing.ProcessRaisedException, torch.multiprocessing.ProcessExitedException) as error:
            failures = sorted(pathlib.Path(folder).glob("failure-*"))
            told = "\n".join(f"{path.name}:\n{path.read_text()}" for path in failures)
            raise AssertionError(told or str(error)) from None
