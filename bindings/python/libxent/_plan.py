# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""Plan: what to compute, decided once. Close to the C interface."""

from __future__ import annotations

import ctypes
import re
from typing import Any, NamedTuple

from . import _abi, _ranks
from ._call import Call, Handle, Result, ScaleCall, plan_dtype
from ._dlpack import CPU, CUDA, DTYPES, DType
from ._frameworks import by_type
from ._library import Context, InvalidArgument, check, default_context, error_slot, integer, lib, real

_REDUCTIONS = {
    "none": _abi.XENT_REDUCTION_NONE,
    "sum": _abi.XENT_REDUCTION_SUM,
    "mean": _abi.XENT_REDUCTION_MEAN,
}


def reduction_of(value: Any) -> str:
    if not isinstance(value, str) or value not in _REDUCTIONS:
        raise InvalidArgument(f"reduction: expected 'none', 'sum' or 'mean', got {value!r}")
    return value


class PlanInfo(NamedTuple):
    """What a plan needs and what runs it. Sizes are bytes, for max_rows rows.

    backend                        the name of what runs it: "cpu", "cuda", or a plugin's
    forward_workspace_bytes        scratch memory of a call; Plan provides it by itself
    backward_workspace_bytes
    loss_and_grad_workspace_bytes
    saved_bytes                    kept between forward and backward, logits and targets apart
    alignment                      of the workspace
    graph_capture                  calls may be captured in a CUDA graph
    one_pass                       loss_and_grad reads the logits from memory once
    partial_width                  of a split vocabulary: numbers a row of a partial
    """

    backend: str
    forward_workspace_bytes: int
    backward_workspace_bytes: int
    loss_and_grad_workspace_bytes: int
    saved_bytes: int
    alignment: int
    graph_capture: bool
    one_pass: bool
    partial_width: int = 0


def parse_device(device: Any) -> tuple[int, int]:
    """(device_type, device_id) of "cpu", "cuda", "cuda:1", a torch.device or a DLPack pair."""
    if isinstance(device, tuple) and len(device) == 2:
        return integer("device", device[0], 32), integer("device", device[1], 32)
    match = re.fullmatch(r"(cpu|cuda)(?::(\d+))?", str(device))
    if match is None:
        raise InvalidArgument(f"device: expected 'cpu', 'cuda' or 'cuda:N', got {device!r}")
    return (CPU if match[1] == "cpu" else CUDA), integer("device", int(match[2] or 0), 32)


class Plan:
    """Softmax cross-entropy with fixed options, for up to `max_rows` rows of `vocab` logits.

    device            "cpu", "cuda", "cuda:1", a torch.device or a DLPack (type, id) pair
    logits_dtype      "float32", "float16", "bfloat16", on the CPU also "float64"; a NumPy, PyTorch or JAX type too
    target_dtype      "int64" or "int32"
    max_rows          a call may have any number of rows up to this
    vocab             columns of the logits, padding included
    classes           real classes; the columns beyond are padding and get gradient 0. Default: vocab
    ignore_index      rows with this target do not count. Default: none
    reduction         "mean", "sum" or "none"
    label_smoothing   in [0, 1]
    z_loss            weight of lse^2, >= 0
    softcap           logits become softcap * tanh(logits / softcap); 0: off
    logit_scale       logits are multiplied by it first, > 0
    entropy           the entropy output may be asked for
    predicted         the argmax output may be asked for
    overwrite_logits  backward and loss_and_grad write the gradient over the logits, unless given another array
    empty_mean_is_nan "mean" over no rows is NaN, as in PyTorch; otherwise 0. Gradients are 0 either way
    context           a Context; default: one of the process, with all cores

    A vocabulary split over ranks (all but vocab, rank and comm the same on every rank, like the rows of each call):
    class_offsets     ranks + 1 of them: rank r holds the classes from class_offsets[r] to class_offsets[r + 1] in the
                      first columns of its logits. Targets, predicted and classes are global
    rank              of this process
    comm              a Communicator: forward and loss_and_grad then gather by themselves. Without one, put your own
                      all-gather between forward_partial and forward_combine

    Raises InvalidArgument (a ValueError) for options out of their range, Error where no backend here can run them.

    A plan never changes and may be used from many threads at once. Arrays are of any library with __dlpack__, of any
    shape [..., vocab] and any strides, and the logits are never copied. On CUDA a call is enqueued on the current
    stream of the library that the logits are from, which also gives the workspace and the outputs.
    """

    def __init__(
        self,
        *,
        max_rows: int,
        vocab: int,
        device: Any = "cpu",
        logits_dtype: Any = "float32",
        target_dtype: Any = "int64",
        classes: int | None = None,
        ignore_index: int | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float = 0.0,
        logit_scale: float = 1.0,
        entropy: bool = False,
        predicted: bool = False,
        overwrite_logits: bool = False,
        empty_mean_is_nan: bool = False,
        class_offsets: Any = None,
        rank: int = 0,
        comm: _ranks.Communicator | None = None,
        context: Context | None = None,
    ) -> None:
        self._handle: Handle | None = None
        reduction = reduction_of(reduction)
        # In C, zero means the default of these two.
        if classes is not None and integer("classes", classes) < 1:
            raise InvalidArgument(f"classes: expected at least 1, got {classes}")
        logit_scale = real("logit_scale", logit_scale)
        if logit_scale == 0:
            raise InvalidArgument("logit_scale: expected more than 0, got 0")
        self._device = parse_device(device)
        self._reduction = reduction
        self._overwrite = bool(overwrite_logits)
        desc = _abi.PlanDesc(
            struct_size=ctypes.sizeof(_abi.PlanDesc),
            device=_abi.DLDevice(*self._device),
            logits_dtype=plan_dtype("logits_dtype", logits_dtype),
            target_dtype=plan_dtype("target_dtype", target_dtype),
            max_rows=integer("max_rows", max_rows),
            vocab=integer("vocab", vocab),
            classes=0 if classes is None else integer("classes", classes),
            ignore_index=0 if ignore_index is None else integer("ignore_index", ignore_index),
            flags=(0 if ignore_index is None else _abi.XENT_PLAN_IGNORE_INDEX)
            | (_abi.XENT_PLAN_OVERWRITE_LOGITS if overwrite_logits else 0)
            | (_abi.XENT_PLAN_EMPTY_MEAN_IS_NAN if empty_mean_is_nan else 0)
            | (_abi.XENT_PLAN_ENTROPY if entropy else 0)
            | (_abi.XENT_PLAN_PREDICTED if predicted else 0),
            reduction=_REDUCTIONS[reduction],
            label_smoothing=real("label_smoothing", label_smoothing),
            z_loss=real("z_loss", z_loss),
            softcap=real("softcap", softcap),
            logit_scale=logit_scale,
        )
        offsets = _ranks.describe(desc, class_offsets, rank, comm)
        self._logits_dtype = DType(desc.logits_dtype.code, desc.logits_dtype.bits)
        self._target_dtype = DType(desc.target_dtype.code, desc.target_dtype.bits)
        self._acc = DTYPES["float64" if self._logits_dtype == DTYPES["float64"] else "float32"]
        context = context or default_context()
        pointer = ctypes.c_void_p()
        check(lib.xent_plan_create(context._handle, ctypes.byref(desc), ctypes.byref(pointer), error_slot.reference))
        del offsets  # copied
        self._handle = Handle(pointer, context, comm)
        info = _abi.PlanInfo(struct_size=ctypes.sizeof(_abi.PlanInfo))
        check(lib.xent_plan_get_info(pointer, ctypes.byref(info), error_slot.reference))
        self._info = PlanInfo(
            info.backend_name.decode(),
            info.forward_workspace_bytes,
            info.backward_workspace_bytes,
            info.loss_and_grad_workspace_bytes,
            info.saved_bytes,
            info.alignment,
            bool(info.capabilities & _abi.XENT_CAP_GRAPH_CAPTURE),
            bool(info.capabilities & _abi.XENT_CAP_ONE_PASS),
            info.partial_width,
        )

    @property
    def info(self) -> PlanInfo:
        """What the plan needs and what runs it."""
        return self._info

    def close(self) -> None:
        """Frees the plan, once the calls that run on other threads have returned. May be called again."""
        self._handle = None

    def __enter__(self) -> Plan:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def forward(
        self,
        logits: Any,
        targets: Any,
        *,
        mask: Any = None,
        row_weights: Any = None,
        denominator: Any = None,
        loss: Any = True,
        stats: Any = True,
        divisor: Any = None,
        lse: Any = None,
        entropy: Any = None,
        predicted: Any = None,
        row_counts: Any = None,
    ) -> Result:
        """The loss, and the two numbers a row that backward needs. The logits are only read.

        logits       [..., vocab], the plan's type
        targets      [...], the plan's target type
        mask         [...] bool, uint8, int32, int64 or float32: rows where it is 0 are ignored
        row_weights  [...] acc (float32, or float64 for float64 logits): factors of the rows' losses
        denominator  an integer, another number (taken as float32), or [] float32, int32 or int64: divides "sum" or
                     "mean"

        The others are outputs, shaped and typed as in Result: True for a new array, an array to write into, None for
        none. `divisor` is made by itself where something is divided. stats=None where no backward follows.
        """
        if divisor is None and stats is not None and (self._reduction == "mean" or denominator is not None):
            divisor = True
        if mask is row_weights is denominator is lse is entropy is predicted is row_counts is None:
            lead = by_type.get(type(logits))
            if lead is not None and lead.usual_forward is not None:
                usual = lead.usual_forward(self, logits, targets, loss, stats, divisor)
                if usual is not None:
                    return Result._make(usual)
        rest = (
            self._info.forward_workspace_bytes, targets, mask, row_weights, denominator,
            loss, stats, divisor, lse, entropy, predicted, row_counts,
        )  # fmt: skip
        return Call().run(self, logits, lib.xent_forward, Call.forward, rest)

    def forward_partial(self, logits: Any, targets: Any, *, mask: Any = None, partial: Any = None) -> Any:
        """This rank's part of a forward over ranks: [rows, partial_width] of acc.

        partial  an array to write into. Default: a new one

        To be all-gathered as it is, bit by bit, to [ranks, rows, partial_width] for forward_combine.
        """
        return _ranks.forward_partial(self, logits, targets, mask, partial)

    def forward_combine(
        self,
        partials: Any,
        targets: Any,
        *,
        mask: Any = None,
        row_weights: Any = None,
        denominator: Any = None,
        loss: Any = True,
        stats: Any = True,
        divisor: Any = None,
        lse: Any = None,
        entropy: Any = None,
        predicted: Any = None,
        row_counts: Any = None,
    ) -> Result:
        """What forward gives, with the same bits on every rank, of the partials [ranks, rows, partial_width] of all."""
        if divisor is None and stats is not None and (self._reduction == "mean" or denominator is not None):
            divisor = True
        outputs = (loss, stats, divisor, lse, entropy, predicted, row_counts)
        return _ranks.forward_combine(self, partials, targets, mask, row_weights, denominator, *outputs)

    def backward(
        self,
        logits: Any,
        targets: Any,
        stats: Any,
        divisor: Any = None,
        *,
        mask: Any = None,
        row_weights: Any = None,
        grad_loss: Any = None,
        grad_logits: Any = None,
        grad_dtype: Any = None,
    ) -> Any:
        """The gradient of the logits, [..., vocab].

        logits, targets, mask, row_weights  as given to forward
        stats, divisor                      of forward's Result
        grad_loss                           upstream gradient: a number, [] or, for "none", [...]. Default: 1
        grad_logits                         an array to write into; default: a new one, or the logits with
                                            overwrite_logits
        grad_dtype                          of a new array: the logits' type (default) or "float32"
        """
        size = self._info.backward_workspace_bytes
        rest = (size, targets, mask, row_weights, stats, divisor, grad_loss, grad_logits, grad_dtype)
        return Call().run(self, logits, lib.xent_backward, Call.backward, rest).grad

    def loss_and_grad(
        self,
        logits: Any,
        targets: Any,
        *,
        mask: Any = None,
        row_weights: Any = None,
        denominator: Any = None,
        grad_loss: Any = None,
        grad_logits: Any = None,
        grad_dtype: Any = None,
        loss: Any = True,
        stats: Any = None,
        divisor: Any = None,
        lse: Any = None,
        entropy: Any = None,
        predicted: Any = None,
        row_counts: Any = None,
    ) -> Result:
        """Loss and gradient in one call, for an upstream gradient known in advance; arguments as above."""
        forward = (
            self._info.loss_and_grad_workspace_bytes, targets, mask, row_weights, denominator,
            loss, stats, divisor, lse, entropy, predicted, row_counts,
        )  # fmt: skip
        rest = (forward, grad_loss, grad_logits, grad_dtype)
        return Call().run(self, logits, lib.xent_loss_and_grad, Call.loss_and_grad, rest)

    def scale_grad(self, grad_logits: Any, targets: Any, grad_loss: Any, *, mask: Any = None) -> Any:
        """Multiplies, in place, what loss_and_grad gave as gradient by an upstream gradient that came later.

        grad_logits    [..., vocab], as loss_and_grad wrote it without grad_loss
        targets, mask  as given to loss_and_grad
        grad_loss      upstream gradient: a number, [] or, for "none", [...]

        Rows that do not count stay 0. Where grad_loss is 1 their rows are not touched; elsewhere they are rounded a
        second time, which backward with grad_loss does not. Nothing is read on the host. Gives grad_logits back.
        """
        rest = (targets, mask, grad_loss)
        return ScaleCall().run(self, grad_logits, lib.xent_scale_grad, ScaleCall.scale_grad, rest).grad
