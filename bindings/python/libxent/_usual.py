# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""The usual forward of PyTorch tensors, loss, stats and divisor and no more, without what only other calls need.

A Call costs twice as much as this. What is not usual, or fails, is left to it: it then says why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable

from . import _dlpack, _frame
from ._dlpack import CPU, CUDA
from ._library import lib

if TYPE_CHECKING:
    from ._plan import Plan


def forward_of(torch: Any, exchange: _dlpack.Exchange) -> Callable[..., tuple | None]:
    """forward(plan, logits, targets, loss, stats, divisor): the fields of a Result, or None: to be done by a Call.

    exchange  of torch.Tensor
    """
    kind, is_neg, empty = torch.Tensor, torch.Tensor.is_neg, torch.empty
    export, stream_of = exchange.tensor, exchange.stream
    increment = torch.autograd.graph.increment_version
    take, give_back, function = _frame.take, _frame.give_back, lib.xent_forward
    with_cuda = torch.version.cuda is not None  # else what PyTorch says of streams is not about CUDA
    types = {bits: getattr(torch, f"float{bits}") for bits in (32, 64)}

    def forward(plan: Plan, logits: Any, targets: Any, loss: Any, stats: Any, divisor: Any) -> tuple | None:
        handle, (place, index) = plan._handle, plan._device
        # A collective must not be entered a second time, as a Call would after a failure.
        if handle is None or handle.comm is not None or type(logits) is not kind or type(targets) is not kind:
            return None
        info = plan._info
        size = info.forward_workspace_bytes
        frame = take()
        try:
            slots, stream, workspace, written = frame.tensors, 0, 0, []
            at_logits, at_targets, at_loss, at_stats, at_divisor = slots[:5]
            # A lazy negation is the one thing that a DLTensor does not show and the C library cannot refuse.
            if is_neg(logits) or export(logits, at_logits) or export(targets, at_targets):
                return None
            if place == CUDA:
                if not with_cuda or stream_of(CUDA, index, frame.word_address):
                    return None
                stream = frame.word.value or 0
                if size:
                    memory = logits.new_empty(-(-size // logits.element_size()))
                    workspace = memory.data_ptr()
                    if workspace % info.alignment:
                        return None
            elif size:
                if place != CPU or size > _frame.SCRATCH:
                    return None
                workspace = frame.workspace(size, info.alignment)
            acc = types[plan._acc[1]]
            if loss is True:
                shape = logits.shape[:-1] if plan._reduction == "none" else ()
                loss = empty(size=shape, dtype=acc, device=logits.device)
            elif type(loss) is kind and not is_neg(loss):
                written.append(loss)
            else:
                return None
            if stats is True:
                stats = empty(size=(logits.numel() // logits.shape[-1], 2), dtype=acc, device=logits.device)
            elif type(stats) is kind and not is_neg(stats):
                written.append(stats)
            elif stats is not None:
                return None
            if divisor is True:
                divisor = empty(size=(), dtype=acc, device=logits.device)
            elif type(divisor) is kind and not is_neg(divisor):
                written.append(divisor)
            elif divisor is not None:
                return None
            if export(loss, at_loss):
                return None
            if stats is None:
                at_stats = 0
            elif export(stats, at_stats):
                return None
            if divisor is None:
                at_divisor = 0
            elif export(divisor, at_divisor):
                return None
            arguments = frame.forward
            arguments.pack(
                stream, workspace, size, at_logits, at_targets, 0, 0, 0, at_loss, at_stats, at_divisor, 0, 0, 0, 0
            )
            if function(handle.pointer, arguments.address, frame.address):
                return None
            if written:
                increment(written)
            return loss, None, stats, divisor, None, None, None, None
        except Exception:  # not strided, without storage, ...
            return None
        finally:
            give_back(frame)

    return forward
