# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""One call of a plan: from arrays to an argument struct and back."""

from __future__ import annotations

import ctypes
import math
import numbers
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _abi
from ._dlpack import CUDA, CUDA_MANAGED, DTYPES, NAMES, DType, Tensor, dtype_name
from ._frameworks import Framework, framework_of
from ._library import Context, InvalidArgument, check, error_slot, integer, lib, real

if TYPE_CHECKING:
    from ._plan import Plan


class Result(NamedTuple):
    """Outputs of a call; None for what was not asked for. "acc" is float32, or float64 for float64 logits."""

    loss: Any = None  # [] for "sum" and "mean", [...] for "none"; acc
    grad: Any = None  # [..., vocab], the gradient of the logits
    stats: Any = None  # [rows, 2] acc: maximum and sum of exponentials of each row, for backward
    divisor: Any = None  # [] acc: what was divided by, for backward
    lse: Any = None  # [...] acc: log-sum-exp; 0 for ignored rows
    entropy: Any = None  # [...] acc, in nats; 0 for ignored rows
    predicted: Any = None  # [...] type of the targets: argmax; -1 for ignored rows and those without a softmax
    row_counts: Any = None  # [3] type of the targets: rows counted, ignored, with a target out of range


class Handle:
    """Owns an xent_plan. A call holds it, so that close() on one thread cannot free it under another."""

    __slots__ = ("context", "pointer")

    def __init__(self, pointer: ctypes.c_void_p, context: Context) -> None:
        self.pointer = pointer
        self.context = context

    def __reduce__(self) -> Any:
        raise TypeError("libxent: a Plan cannot be pickled")

    def __del__(self, destroy=lib.xent_plan_destroy) -> None:
        destroy(self.pointer)


def plan_dtype(name: str, value: Any) -> _abi.DLDataType:
    text = dtype_name(value)
    if text not in DTYPES:
        raise InvalidArgument(f"{name}: unknown element type {text}")
    return _abi.DLDataType(*DTYPES[text], 1)


def _fitting(name: str, value: Any, dtype: DType) -> int | float:
    """A number that the type holds: ctypes would cut an integer off, and make infinity or 0 of a float."""
    if dtype == DTYPES["int64"]:
        return integer(name, value)
    number = real(name, value)
    holder = ctypes.c_float(number) if dtype == DTYPES["float32"] else ctypes.c_double(number)
    if math.isfinite(number) and (math.isinf(holder.value) or (holder.value == 0 and number != 0)):
        raise InvalidArgument(f"{name}: {number} is beyond the range of {NAMES[dtype]}")
    return number


class Call:
    """One call of a plan: borrowed tensors, new outputs, and their release however it ends."""

    def __init__(self, plan: Plan, logits: Any) -> None:
        handle = plan._handle
        if handle is None:
            raise InvalidArgument("plan: it was closed")
        self.plan, self.handle, self.logits = plan, handle, logits
        self.tensors: list[Tensor] = []
        self.results: dict[str, Any] = {}
        self.written: list[tuple[Framework, Any]] = []
        self.lead = framework_of(logits)
        self.tensor = self.lead.tensor(logits, "logits")
        self.tensors.append(self.tensor)
        self.device = self.tensor.device
        on_cuda = plan._device[0] == CUDA and self.device[0] in (CUDA, CUDA_MANAGED)
        self.stream = self.lead.stream(self.device[1]) if on_cuda else None
        if not self.tensor.shape:
            self.__exit__()
            raise InvalidArgument("logits: expected [..., vocab], got a tensor without dimensions")

    def __enter__(self) -> Call:
        return self

    def __exit__(self, *_: Any) -> None:
        for tensor in self.tensors:
            tensor.release()

    def take(self, name: str, obj: Any, writable: bool = False) -> Any:
        framework = framework_of(obj)
        tensor = framework.tensor(obj, name, writable)
        self.tensors.append(tensor)
        if framework is not self.lead and tensor.device[0] == CUDA:
            if writable:
                raise InvalidArgument(f"{name}: on CUDA an output must come from {self.lead.name}, like the logits")
            # Only the protocol can order another library's pending work before our stream.
            tensor = framework.tensor(obj, name, stream=self.stream or 1)
            self.tensors.append(tensor)
        return tensor.pointer()

    def input(self, name: str, obj: Any, number: DType | None = None) -> Any:
        if obj is None:
            return None
        if number is not None and isinstance(obj, numbers.Real):
            tensor = self.lead.scalar(_fitting(name, obj, number), number, self.device)
            self.tensors.append(tensor)
            return tensor.pointer()
        return self.take(name, obj)

    def new(self, name: str, shape: tuple[int, ...], dtype: DType) -> Any:
        tensor, self.results[name] = self.lead.empty(shape, dtype, self.device)
        self.tensors.append(tensor)
        return tensor.pointer()

    def output(self, name: str, obj: Any, shape: tuple[int, ...], dtype: DType) -> Any:
        if obj is None or obj is False:
            return None
        if obj is True:
            return self.new(name, shape, dtype)
        pointer = self.take(name, obj, writable=True)
        self.results[name] = lambda: obj
        self.written.append((framework_of(obj), obj))
        return pointer

    def inputs(self, args: Any, targets: Any, mask: Any, row_weights: Any, workspace_bytes: int) -> None:
        args.stream = self.stream
        if workspace_bytes:
            alignment = self.plan._info.alignment
            size = workspace_bytes + alignment - 1
            tensor, _ = self.lead.empty((size,), DTYPES["uint8"], self.device)
            self.tensors.append(tensor)
            args.workspace = -(-tensor.address // alignment) * alignment
            args.workspace_bytes = workspace_bytes
        args.logits = self.tensor.pointer()
        args.targets = self.input("targets", targets)
        args.mask = self.input("mask", mask)
        args.row_weights = self.input("row_weights", row_weights)

    def forward_args(self, targets: Any, mask: Any, row_weights: Any, denominator: Any, workspace: int) -> Any:
        args = _abi.ForwardArgs(struct_size=ctypes.sizeof(_abi.ForwardArgs))
        self.inputs(args, targets, mask, row_weights, workspace)
        number = DTYPES["int64" if isinstance(denominator, numbers.Integral) else "float32"]
        args.denominator = self.input("denominator", denominator, number)
        return args

    def outputs(
        self,
        args: Any,
        loss: Any,
        stats: Any,
        divisor: Any,
        lse: Any,
        entropy: Any,
        predicted: Any,
        row_counts: Any,
    ) -> None:
        plan, lead_shape = self.plan, self.tensor.shape[:-1]
        acc, index = plan._acc, plan._target_dtype
        args.loss = self.output("loss", loss, lead_shape if plan._reduction == "none" else (), acc)
        args.stats = self.output("stats", stats, (math.prod(lead_shape), 2), acc)
        args.divisor = self.output("divisor", divisor, (), acc)
        args.lse = self.output("lse", lse, lead_shape, acc)
        args.entropy = self.output("entropy", entropy, lead_shape, acc)
        args.predicted = self.output("predicted", predicted, lead_shape, index)
        args.row_counts = self.output("row_counts", row_counts, (3,), index)

    def gradient(self, grad_logits: Any, grad_dtype: Any) -> Any:
        if grad_logits is None and not self.plan._overwrite:
            dtype = self.plan._logits_dtype
            if grad_dtype is not None:
                dtype = DType(*(getattr(plan_dtype("grad_dtype", grad_dtype), name) for name in DType._fields))
            return self.new("grad", self.tensor.shape, dtype)
        given = self.logits if grad_logits is None else grad_logits
        if grad_dtype is not None and DTYPES.get(dtype_name(grad_dtype)) != self._dtype_of(given):
            raise InvalidArgument(
                f"grad_dtype: {dtype_name(grad_dtype)} differs from the type of the array that the gradient goes to, "
                f"{NAMES.get(self._dtype_of(given))}"
            )
        return self.output("grad", given, self.tensor.shape, self.plan._logits_dtype)

    def _dtype_of(self, obj: Any) -> DType:
        return DTYPES[dtype_name(obj.dtype)] if hasattr(obj, "dtype") else self.tensor.dtype

    def run(self, function: Any, args: Any) -> None:
        check(function(self.handle.pointer, ctypes.byref(args), error_slot.reference))
        self.lead.finish(self.device)
        for framework, obj in self.written:
            framework.wrote(obj)

    def result(self) -> Result:
        return Result(**{name: make() for name, make in self.results.items()})
