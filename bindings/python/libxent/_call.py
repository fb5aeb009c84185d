# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""One call of a plan: from arrays to an argument struct and back."""

from __future__ import annotations

import ctypes
import math
import numbers
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

from . import _abi, _frame
from ._dlpack import CPU, CUDA, DTYPES, NAMES, DType, Tensor, dtype_name
from ._frame import SCRATCH
from ._framework import Device, Framework
from ._frameworks import by_type, framework_of
from ._library import Context, Error, InvalidArgument, check, integer, lib, real

if TYPE_CHECKING:
    from ._plan import Plan


class Result(NamedTuple):
    """Outputs of a call; None for what was not asked for.

    [...] is the shape of the targets; "acc" is float32, or float64 for float64 logits.

    loss        [] for "sum" and "mean", [...] for "none"; acc
    grad        [..., vocab], the gradient of the logits, of their type unless given as another
    stats       [rows, 2] acc: maximum and sum of exponentials of each row, for backward
    divisor     [] acc: what was divided by, for backward
    lse         [...] acc: log-sum-exp; 0 for ignored rows
    entropy     [...] acc, in nats; 0 for ignored rows
    predicted   [...] of the targets' type: argmax; -1 for ignored rows and those without a softmax
    row_counts  [3] of the targets' type: rows counted, ignored, with a target out of range
    """

    loss: Any = None
    grad: Any = None
    stats: Any = None
    divisor: Any = None
    lse: Any = None
    entropy: Any = None
    predicted: Any = None
    row_counts: Any = None


_LOSS, _GRAD, _STATS, _DIVISOR, _LSE, _ENTROPY, _PREDICTED, _ROW_COUNTS = range(len(Result._fields))
_NAMES = (*Result._fields, "partial")
_SCALAR, _ROWS, _PAIRS, _TRIPLE, _MATRIX = range(5)


class Handle:
    """Owns an xent_plan. A call holds it, so that close() on one thread cannot free it under another.

    comm  what its communicator calls back
    """

    __slots__ = ("comm", "context", "pointer")

    def __init__(self, pointer: ctypes.c_void_p, context: Context, comm: Any) -> None:
        self.pointer = pointer
        self.context = context
        self.comm = comm

    def __reduce__(self) -> Any:
        raise TypeError("libxent: a Plan cannot be pickled")

    def __del__(self, destroy=lib.xent_plan_destroy) -> None:
        destroy(self.pointer)


def plan_dtype(name: str, value: Any) -> _abi.DLDataType:
    text = dtype_name(value)
    if text not in DTYPES:
        raise InvalidArgument(f"{name}: unknown element type {text}")
    return _abi.DLDataType(*DTYPES[text], 1)


def fitting(name: str, value: Any, dtype: DType) -> int | float:
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

    __slots__ = (
        "_facts", "at_logits", "frame", "held", "later", "lead", "logits", "memory", "plan", "put", "results",
        "strange", "stream", "taken", "written",
    )  # fmt: skip

    name = "logits"  # of the array that leads: it gives the shape and the framework
    writes = False  # that array is an output

    def run(self, plan: Plan, logits: Any, function: Any, describe: Callable[[Any, tuple], Any], rest: tuple) -> Result:
        """Makes the call. `describe` gives, of `rest`, the address of the arguments, or what ctypes takes for one.

        In one go and without keywords or *rest, which would cost a tenth of it.
        """
        handle = plan._handle
        if handle is None:
            raise InvalidArgument("plan: it was closed")
        self.plan, self.logits = plan, logits
        self.held: list[Tensor] = []  # to be released
        self.taken: list[tuple[str, Any, bool]] = []  # name, array, writable: put on trust, one a slot of the frame
        self.results: list[Any] = [None] * 8  # as Result has fields
        self.later: dict[int, Callable[[], Any]] | None = None  # results that are made once they are written
        self.written: list[Any] = []  # outputs of the framework of the logits
        self.strange: list[tuple[Framework, Any]] | None = None  # of others
        self._facts: tuple[tuple[int, ...], Device] | None = None
        self.lead = lead = by_type.get(type(logits)) or framework_of(logits)
        self.put = put = lead.put
        self.frame = frame = _frame.take()
        try:
            self.at_logits = put(self, self.name, logits, self.writes)
            kind, device = plan._device
            self.stream = lead.stream(self, device) if kind == CUDA else 0
            status = function(handle.pointer, describe(self, rest), frame.address)
            if status:
                check(status, frame)
            if lead.finishes:
                lead.finish(self.device)
            if self.written:
                lead.wrote(self.written)
            if self.strange is not None:
                for framework, array in self.strange:
                    framework.wrote([array])
            if self.later is not None:
                for index, make in self.later.items():
                    self.results[index] = make()
            return tuple.__new__(Result, self.results)  # Result(*...) by its shortest way
        except Error:
            self._explain()
            raise
        finally:
            for tensor in self.held:
                tensor.release()
            _frame.give_back(frame)

    def _explain(self) -> None:
        """The call failed: the first array that its framework refuses is the reason."""
        try:
            for name, obj, writable in self.taken:
                framework_of(obj).tensor(obj, name, writable)
                if obj is self.logits:
                    _ = self.shape
        except InvalidArgument as reason:
            raise reason from None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the logits."""
        if self._facts is None:
            self._facts = self.lead.facts(self, self.logits)
            if not self._facts[0]:
                raise InvalidArgument(f"{self.name}: expected [..., vocab], got a tensor without dimensions")
        return self._facts[0]

    @property
    def device(self) -> Device:
        """Of the logits."""
        return self._facts[1] if self._facts is not None else self.lead.facts(self, self.logits)[1]

    def take(self, name: str, obj: Any, writable: bool = False) -> int:
        framework = by_type.get(type(obj)) or framework_of(obj)
        if framework is self.lead:
            return framework.put(self, name, obj, writable)
        tensor = framework.tensor(obj, name, writable)
        self.held.append(tensor)
        if tensor.device[0] == CUDA:
            if writable:
                raise InvalidArgument(f"{name}: on CUDA an output must come from {self.lead.name}, like the logits")
            # Only the protocol can order another library's pending work before our stream.
            tensor = framework.tensor(obj, name, stream=self.stream or 1)
            self.held.append(tensor)
        return ctypes.addressof(tensor.dl)

    def input(self, name: str, obj: Any) -> int:
        if obj is None:
            return 0
        put = self.put
        return put(self, name, obj) if by_type.get(type(obj)) is self.lead else self.take(name, obj)

    def number(self, name: str, obj: Any, dtype: DType) -> int:
        """An input that may be a Python number, of that type."""
        if isinstance(obj, numbers.Real):
            tensor = self.lead.scalar(fitting(name, obj, dtype), dtype, self.device)
            self.held.append(tensor)
            return ctypes.addressof(tensor.dl)
        return self.take(name, obj)

    def output(self, index: int, obj: Any, dtype: DType, form: int) -> int:
        """`index`: of Result's fields; `form`: its shape."""
        if obj is None or obj is False:
            return 0
        if obj is True:
            shape = self.shape
            if form == _ROWS:
                shape = shape[:-1]
            elif form == _PAIRS:
                shape = (math.prod(shape[:-1]), 2)
            elif form != _MATRIX:
                shape = () if form == _SCALAR else (3,)
            return self.lead.new(self, index, shape, dtype)
        if by_type.get(type(obj)) is self.lead:
            put = self.put
            address = put(self, _NAMES[index], obj, True)
            self.written.append(obj)
        else:
            address = self.take(_NAMES[index], obj, True)
            self.strange = [*(self.strange or ()), (framework_of(obj), obj)]
        self.results[index] = obj
        return address

    def workspace(self, size: int) -> int:
        if size == 0:
            return 0
        plan = self.plan
        # On the CPU a call is over when it returns, and a little memory can be used again.
        if plan._device[0] == CPU and size <= SCRATCH:
            return self.frame.workspace(size, plan._info.alignment)
        return self.lead.workspace(self, size, plan._info.alignment)

    def forward(self, rest: tuple) -> int:
        """The address of the arguments of xent_forward."""
        (
            workspace_bytes, targets, mask, row_weights, denominator,
            loss, stats, divisor, lse, entropy, predicted, row_counts,
        ) = rest  # fmt: skip
        plan, take, output = self.plan, self.input, self.output
        acc, index = plan._acc, plan._target_dtype
        args = self.frame.forward
        args.pack(
            self.stream,
            self.workspace(workspace_bytes) if workspace_bytes else 0,
            workspace_bytes,
            self.at_logits,
            take("targets", targets),
            0 if mask is None else take("mask", mask),
            0 if row_weights is None else take("row_weights", row_weights),
            0 if denominator is None else self.denominator(denominator),
            output(_LOSS, loss, acc, _ROWS if plan._reduction == "none" else _SCALAR),
            0 if stats is None else output(_STATS, stats, acc, _PAIRS),
            0 if divisor is None else output(_DIVISOR, divisor, acc, _SCALAR),
            0 if lse is None else output(_LSE, lse, acc, _ROWS),
            0 if entropy is None else output(_ENTROPY, entropy, acc, _ROWS),
            0 if predicted is None else output(_PREDICTED, predicted, index, _ROWS),
            0 if row_counts is None else output(_ROW_COUNTS, row_counts, index, _TRIPLE),
        )
        return args.address

    def denominator(self, value: Any) -> int:
        return self.number("denominator", value, DTYPES["int64" if isinstance(value, numbers.Integral) else "float32"])

    def backward(self, rest: tuple) -> int:
        """The address of the arguments of xent_backward."""
        workspace_bytes, targets, mask, row_weights, stats, divisor, grad_loss, grad_logits, grad_dtype = rest
        args = self.frame.backward
        args.pack(
            self.stream,
            self.workspace(workspace_bytes),
            workspace_bytes,
            self.at_logits,
            self.input("targets", targets),
            self.input("mask", mask),
            self.input("row_weights", row_weights),
            self.input("stats", stats),
            self.input("divisor", divisor),
            self.upstream(grad_loss),
            self.gradient(grad_logits, grad_dtype),
        )
        return args.address

    def loss_and_grad(self, rest: tuple) -> int:
        """The address of the arguments of xent_loss_and_grad."""
        forward, grad_loss, grad_logits, grad_dtype = rest
        args = self.frame.loss_and_grad
        args.pack(self.forward(forward), self.upstream(grad_loss), self.gradient(grad_logits, grad_dtype))
        return args.address

    def upstream(self, grad_loss: Any) -> int:
        return 0 if grad_loss is None else self.number("grad_loss", grad_loss, self.plan._acc)

    def gradient(self, grad_logits: Any, grad_dtype: Any) -> int:
        if grad_logits is None and not self.plan._overwrite:
            dtype = self.plan._logits_dtype
            if grad_dtype is not None:
                dtype = DType(*(getattr(plan_dtype("grad_dtype", grad_dtype), name) for name in DType._fields))
            return self.lead.new(self, _GRAD, self.shape, dtype)
        given = self.logits if grad_logits is None else grad_logits
        if grad_dtype is not None and DTYPES.get(dtype_name(grad_dtype)) != self._dtype_of(given):
            raise InvalidArgument(
                f"grad_dtype: {dtype_name(grad_dtype)} differs from the type of the array that the gradient goes to, "
                f"{NAMES.get(self._dtype_of(given))}"
            )
        return self.output(_GRAD, given, self.plan._logits_dtype, _MATRIX)

    def _dtype_of(self, obj: Any) -> DType:
        return DTYPES[dtype_name(obj.dtype)] if hasattr(obj, "dtype") else self.plan._logits_dtype


class ScaleCall(Call):
    """A call without logits: the gradient leads."""

    __slots__ = ()
    name = "grad_logits"
    writes = True

    def scale_grad(self, rest: tuple) -> int:
        """The address of the arguments of xent_scale_grad."""
        targets, mask, grad_loss = rest
        self.results[_GRAD] = self.logits
        self.written.append(self.logits)
        args = self.frame.scale_grad
        args.pack(
            self.stream,
            self.input("targets", targets),
            self.input("mask", mask),
            self.upstream(grad_loss),
            self.at_logits,
        )
        return args.address
