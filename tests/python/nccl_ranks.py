# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""An NCCL communicator over the processes of a gloo group, made with the libnccl that PyTorch has loaded."""

import ctypes
import re

import torch


class UniqueId(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_byte * 128)]


def library():
    """The libnccl of this process, or None where PyTorch has none."""
    with open("/proc/self/maps") as maps:
        found = re.search(r"/\S*/libnccl\.so\S*", maps.read())
    if found is None:
        return None
    nccl = ctypes.CDLL(found[0])
    nccl.ncclCommInitRank.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, UniqueId, ctypes.c_int]
    nccl.ncclCommDestroy.argtypes = [ctypes.c_void_p]
    nccl.ncclAllGather.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int] + [
        ctypes.c_void_p
    ] * 2
    return nccl


class Nccl:
    """One rank's communicator; `device` is current."""

    def __init__(self, rank, ranks):
        self.library = library()
        id = UniqueId()
        if rank == 0:
            assert self.library.ncclGetUniqueId(ctypes.byref(id)) == 0
        shared = torch.tensor(list(bytes(id)), dtype=torch.uint8)
        torch.distributed.broadcast(shared, 0)
        ctypes.memmove(ctypes.byref(id), bytes(shared.tolist()), 128)
        self.comm = ctypes.c_void_p()
        assert self.library.ncclCommInitRank(ctypes.byref(self.comm), ranks, id, rank) == 0

    def all_gather(self, send, recv, stream):
        size = send.numel() * send.element_size()
        assert self.library.ncclAllGather(send.data_ptr(), recv.data_ptr(), size, 1, self.comm, stream) == 0

    def close(self):
        torch.cuda.synchronize()
        self.library.ncclCommDestroy(self.comm)
