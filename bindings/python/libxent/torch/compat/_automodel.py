# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from typing import Any

import torch

from ..._library import InvalidArgument
from .._functional import cross_entropy
from .._parallel import is_dtensor

_DATASET_PADDING = -100
_MASKS = (torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32)


def _chunk(name: str, value: Any) -> int:
    if int(value) <= 0:
        raise InvalidArgument(f"{name} must be greater than zero; got {value}.")
    return int(value)


def _whole(tensor: Any) -> Any:
    """A DTensor gathered, anything else as it is."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def _keeps_its_split(logits: Any) -> bool:
    """A DTensor that is split along the classes alone needs no gathering."""
    return is_dtensor(logits) and all(p.is_replicate() or p.is_shard(logits.dim() - 1) for p in logits.placements)


def _loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    mask: torch.Tensor | None,
    num_label_tokens: Any,
    loss_weights: torch.Tensor | None,
    *,
    ignore_index: int,
    reduction: str,
    overwrite: bool,
) -> torch.Tensor:
    if reduction != "sum" and num_label_tokens is not None:
        raise InvalidArgument("num_label_tokens is only supported when reduction is 'sum'")
    if loss_weights is not None:
        if reduction != "sum":
            raise InvalidArgument("loss_weights is only supported when reduction is 'sum'")
        if loss_weights.shape != labels.shape:
            raise InvalidArgument(
                f"loss_weights.shape must match labels.shape, got {tuple(loss_weights.shape)} and {tuple(labels.shape)}"
            )
    labels, loss_weights = _whole(labels), _whole(loss_weights)
    logits = logits if _keeps_its_split(logits) else _whole(logits)
    device, rows = logits.device, logits.shape[:-1]
    if labels.numel() != rows.numel():
        raise InvalidArgument(f"labels: shape {tuple(labels.shape)} does not fit logits of {tuple(logits.shape)}")
    if mask is not None:
        mask = _whole(mask).to(device)
        mask = mask.reshape(rows) if mask.numel() == rows.numel() else mask.expand(labels.shape).reshape(rows)
        if mask.dtype not in _MASKS:
            mask = mask != 0
    labels = labels.to(device).reshape(rows)
    if ignore_index != _DATASET_PADDING:
        padding = labels != _DATASET_PADDING
        mask = padding if mask is None else padding & (mask != 0)
    if loss_weights is not None:
        acc = torch.float64 if logits.dtype == torch.float64 else torch.float32
        loss_weights = loss_weights.to(device=device, dtype=acc).reshape(rows)
    if isinstance(num_label_tokens, torch.Tensor) and num_label_tokens.dtype not in (torch.int64, torch.int32):
        num_label_tokens = num_label_tokens.float()
    loss = cross_entropy(
        logits,
        labels,
        ignore_index=ignore_index,
        reduction=reduction,
        mask=mask,
        row_weights=loss_weights,
        denominator=num_label_tokens,
        class_dim=-1,
        empty_mean_is_nan=True,
        overwrite_logits=overwrite,
    )
    return loss.reshape(-1) if reduction == "none" else loss


class MaskedCrossEntropy(torch.nn.Module):
    """nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy.

    fp32_upcast   taken for its checks: arithmetic is float32 and the loss float32 either way, without a copy
    ignore_index  labels that do not count; -100, the padding of data sets, never counts either
    reduction     "sum", "mean" or "none"
    chunk_size    taken for its checks, and to allow inplace_grad: nothing is upcast, so nothing is cut into chunks
    inplace_grad  with chunk_size: backward writes the gradient over the logits, and runs once

    Unlike the original: labels are never written; ignore_index counts also without chunk_size; num_label_tokens may be
    a tensor on the device, and 0 gives loss 0 and gradients 0.
    """

    def __init__(
        self,
        fp32_upcast: bool = True,
        ignore_index: int = -100,
        reduction: str = "sum",
        chunk_size: int | None = None,
        *,
        inplace_grad: bool = False,
    ) -> None:
        super().__init__()
        if chunk_size is not None:
            chunk_size = _chunk("chunk_size", chunk_size)
            if reduction != "sum":
                raise InvalidArgument("chunk_size requires reduction='sum'.")
            if not fp32_upcast:
                raise InvalidArgument("chunk_size requires fp32_upcast=True; arithmetic is float32.")
        self.fp32_upcast = fp32_upcast
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.chunk_size = chunk_size
        self.inplace_grad = inplace_grad

    def forward(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        mask: torch.Tensor | None = None,
        num_label_tokens: Any = None,
        loss_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """logits (B, S, V), labels (B, S); mask, where 0: ignored; num_label_tokens divides a sum.

        loss_weights  factors of the rows' losses, shaped like the labels, with "sum"; they get no gradient
        """
        if self.chunk_size is not None:
            for name, tensor in (("logits.shape[:-1]", logits[..., 0]), ("mask.shape", mask)):
                if tensor is not None and tensor.shape != labels.shape:
                    raise InvalidArgument(
                        f"chunked MaskedCrossEntropy requires {name} == labels.shape; got {tuple(tensor.shape)} and "
                        f"{tuple(labels.shape)}."
                    )
        return _loss(
            logits,
            labels,
            mask,
            num_label_tokens,
            loss_weights,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            overwrite=self.inplace_grad and self.chunk_size is not None,
        )


class ChunkedCrossEntropy(torch.nn.Module):
    """nemo_automodel.components.loss.chunked_ce.ChunkedCrossEntropy, of the releases where it takes logits.

    chunk_len, compile  taken and ignored: nothing is upcast, so nothing is cut into chunks, and nothing is compiled
    ignore_index        labels that do not count; -100, the padding of data sets, never counts either
    reduction           "sum", "mean" or "none"
    inplace_grad        with "sum": backward writes the gradient over the logits, and runs once

    Unlike the original: "mean" is the mean over all rows that count, not a sum of the means of chunks, and "none" gives
    every row's loss; labels are never written; num_label_tokens 0 gives loss 0 and gradients 0.
    """

    def __init__(
        self,
        chunk_len: int = 32,
        compile: bool = True,
        ignore_index: int = -100,
        reduction: str = "sum",
        *,
        inplace_grad: bool = False,
    ) -> None:
        super().__init__()
        self.chunk_len = _chunk("chunk_len", chunk_len)
        self.compile = compile
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.inplace_grad = inplace_grad

    def forward(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        mask: torch.Tensor | None = None,
        num_label_tokens: Any = None,
    ) -> torch.Tensor:
        """logits (B, S, V), labels (B, S); mask, where 0: ignored; num_label_tokens divides a sum."""
        return _loss(
            logits,
            labels,
            mask,
            num_label_tokens,
            None,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            overwrite=self.inplace_grad and self.reduction == "sum",
        )
