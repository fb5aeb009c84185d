# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""A vocabulary split over ranks: communicators, and the two halves of a forward around another all-gather."""

from __future__ import annotations

import contextlib
import ctypes
import math
import operator
from typing import TYPE_CHECKING, Any, Callable

from . import _abi
from ._call import Call, Result
from ._library import Context, InvalidArgument, check, default_context, error_slot, integer, lib, raised

if TYPE_CHECKING:
    from ._plan import Plan

_ALL_GATHER = dict(_abi.CommDesc._fields_)["all_gather"]
_TENSOR = ctypes.POINTER(_abi.DLTensor)
_PARTIAL = len(Result._fields)  # of a call's results


def _guarded(all_gather: Callable[..., Any]) -> Any:
    def call(_user: int, send: int, recv: int, size: int, stream: int | None, err: Any) -> int:
        try:
            all_gather(send, recv, size, stream or 0)
        except BaseException as error:  # nothing may leave a C callback: `check` raises it where the call returns
            raised.error = error
            text = type(error).__name__
            with contextlib.suppress(BaseException):  # of its __str__
                text += f": {error}"
            err.contents.message = text.encode(errors="replace")[:495]
            return _abi.XENT_COMM_ERROR
        return _abi.XENT_OK

    return _ALL_GATHER(call)


def _address(name: str, value: Any) -> int:
    """An address of C: ctypes would take a string for one, and cut off what does not fit."""
    try:
        number = (value.value or 0) if isinstance(value, ctypes.c_void_p) else operator.index(value)
    except TypeError:
        raise InvalidArgument(f"{name}: expected an address as an integer, got {value!r}") from None
    if not 0 < number < 1 << 64:
        raise InvalidArgument(f"{name}: {number} is no address")
    return number


class Communicator:
    """Joins the ranks of a split vocabulary: what a Plan needs to run its own all-gather.

    rank, ranks  of the caller, and how many there are
    all_gather   all_gather(send, recv, size, stream): addresses of `size` bytes and of ranks * size bytes for those
                 of all ranks, in rank order. On CUDA ordered on `stream`; on the CPU done when it returns. What it
                 raises becomes the cause of an Error of the call, or leaves the call as it is where it is no Exception
                 (KeyboardInterrupt); either way the communicator is spent.
    device       as in Plan: whose memory it gathers
    capturable   all_gather may be captured in a CUDA graph

    Plans keep what they need of it alive.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        all_gather: Callable[[int, int, int, int], Any],
        *,
        device: Any = "cpu",
        capturable: bool = False,
        context: Context | None = None,
    ) -> None:
        from ._plan import parse_device

        self._handle: ctypes.c_void_p | None = None
        self._context = context or default_context()
        if not callable(all_gather):
            raise InvalidArgument(f"all_gather: expected a function, got {all_gather!r}")
        # Plans hold this object, and so what C calls: a `release` callback would be Python on a thread that drops a
        # plan, where the interpreter may have ended.
        self._callback = _guarded(all_gather)
        desc = _abi.CommDesc(
            struct_size=ctypes.sizeof(_abi.CommDesc),
            device=_abi.DLDevice(*parse_device(device)),
            rank=integer("rank", rank, 32),
            ranks=integer("ranks", ranks, 32),
            all_gather=self._callback,
            flags=_abi.XENT_COMM_GRAPH_CAPTURE if capturable else 0,
        )
        handle = ctypes.c_void_p()
        check(
            lib.xent_comm_create(self._context._handle, ctypes.byref(desc), ctypes.byref(handle), error_slot.reference)
        )
        self._handle = handle

    @classmethod
    def from_nccl(cls, nccl_comm: int, *, library: int | None = None, context: Context | None = None) -> Communicator:
        """Of a borrowed ncclComm_t, given as an address; it must outlive the plans that use it.

        library  a dlopen handle of the libnccl that made it, as ctypes.CDLL(...)._handle. Default: the one that this
                 process has loaded
        """
        self = cls.__new__(cls)
        self._handle, self._context = None, context or default_context()
        comm, loaded = _address("nccl_comm", nccl_comm), None if library is None else _address("library", library)
        handle = ctypes.c_void_p()
        check(lib.xent_comm_from_nccl(self._context._handle, comm, loaded, ctypes.byref(handle), error_slot.reference))
        self._handle = handle
        return self

    def __reduce__(self) -> Any:
        raise TypeError("libxent: a Communicator cannot be copied or pickled")

    def __del__(self, destroy=lib.xent_comm_destroy) -> None:
        handle, self._handle = getattr(self, "_handle", None), None
        if handle is not None:
            destroy(handle)


def describe(desc: _abi.PlanDesc, class_offsets: Any, rank: int, comm: Communicator | None) -> Any:
    """Puts a split into a plan's description; the result must live as long as that."""
    if class_offsets is None:
        if rank != 0 or comm is not None:
            raise InvalidArgument("class_offsets: expected one more offset than ranks, as rank or comm is given")
        return None
    offsets = [integer("class_offsets", offset) for offset in class_offsets]
    if len(offsets) < 2:
        raise InvalidArgument(f"class_offsets: expected at least 2 offsets, got {len(offsets)}")
    array = (ctypes.c_int64 * len(offsets))(*offsets)
    desc.class_offsets = ctypes.cast(array, ctypes.POINTER(ctypes.c_int64))
    desc.rank = integer("rank", rank, 32)
    desc.ranks = len(offsets) - 1
    if comm is not None:
        if not isinstance(comm, Communicator):
            raise InvalidArgument(f"comm: expected a Communicator, got {comm!r}")
        desc.comm = comm._handle
    return array


class _PartialCall(Call):
    __slots__ = ()

    def partial(self, rest: tuple) -> Any:
        """The arguments of xent_forward_partial."""
        targets, mask, partial = rest
        self.results.append(None)
        size, acc = self.plan._info.forward_workspace_bytes, self.plan._acc
        return ctypes.byref(
            _abi.PartialArgs(
                struct_size=ctypes.sizeof(_abi.PartialArgs),
                stream=self.stream or None,
                workspace=self.workspace(size) or None,
                workspace_bytes=size,
                logits=_tensor(self.at_logits),
                targets=_tensor(self.input("targets", targets)),
                mask=_tensor(self.input("mask", mask)),
                partial=_tensor(
                    self.lead.new(self, _PARTIAL, (math.prod(self.shape[:-1]), self.plan._info.partial_width), acc)
                    if partial is None
                    else self.output(_PARTIAL, partial, acc, 0)
                ),
            )
        )


class _CombineCall(Call):
    """A call without logits: the targets lead, and their shape is [...]."""

    __slots__ = ()
    name = "targets"

    @property
    def shape(self) -> tuple[int, ...]:
        if self._facts is None:
            self._facts = self.lead.facts(self, self.logits)
        return (*self._facts[0], 0)

    def combine(self, rest: tuple) -> Any:
        """The arguments of xent_forward_combine."""
        partials, *others = rest
        self.at_logits = 0
        forward = self.forward((self.plan._info.forward_workspace_bytes, *others))
        return ctypes.byref(
            _abi.CombineArgs(
                struct_size=ctypes.sizeof(_abi.CombineArgs),
                forward=ctypes.cast(forward, ctypes.POINTER(_abi.ForwardArgs)),
                partials=_tensor(self.input("partials", partials)),
            )
        )


def _tensor(address: int) -> Any:
    return ctypes.cast(address, _TENSOR) if address else None


def forward_partial(plan: Plan, logits: Any, targets: Any, mask: Any, partial: Any) -> Any:
    rest = (targets, mask, partial)
    return _PartialCall().run(plan, logits, lib.xent_forward_partial, _PartialCall.partial, rest)[_PARTIAL]


def forward_combine(plan: Plan, partials: Any, targets: Any, *others: Any) -> Result:
    rest = (partials, targets, *others)
    return _CombineCall().run(plan, targets, lib.xent_forward_combine, _CombineCall.combine, rest)
