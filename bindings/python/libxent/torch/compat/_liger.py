# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..._library import InvalidArgument
from .._functional import cross_entropy


@dataclass
class CrossEntropyOutput:
    """What was asked for. Gradients flow to the loss alone."""

    loss: torch.Tensor
    z_loss: torch.Tensor | None = None
    token_accuracy: torch.Tensor | None = None
    predicted_tokens: torch.Tensor | None = None


def liger_cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: Any = None,
    ignore_index: int | None = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    *,
    overwrite_logits: bool = False,
    fused: bool = False,
) -> torch.Tensor | CrossEntropyOutput:
    """liger_kernel.transformers.functional.liger_cross_entropy.

    input                    (rows, V)
    target                   (rows) class indices
    weight                   (V) of the classes; not with label_smoothing or lse_square_scale
    size_average, reduce     taken and ignored, as in the original
    lse_square_scale         weight of lse^2, added to each row's loss
    softcap                  input becomes softcap * tanh(input / softcap)
    return_z_loss            the part of the loss that is lse_square_scale * lse^2, for logging
    return_token_accuracy    1 where the argmax is the target, else 0: a row each with "none", else the mean of the rows
                             that count
    return_predicted_tokens  argmax, int64, -1 for ignored rows
    overwrite_logits         backward writes the gradient over the input, and runs once
    fused                    forward writes the gradient too, for an upstream gradient of 1

    Unlike the original: the input is not overwritten unless asked for; the loss is float32 also for 16-bit input; a
    factor on the loss costs no rounding of the gradient (without fused); "none" takes every row's own upstream
    gradient; the host reads nothing from the device; where no row counts, all is 0.
    """
    if weight is not None and lse_square_scale:
        raise InvalidArgument("weight: class weights together with lse_square_scale are not supported")
    got = cross_entropy(
        input,
        target,
        weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        z_loss=lse_square_scale,
        softcap=softcap or 0.0,
        overwrite_logits=overwrite_logits,
        fused=fused,
        return_lse=return_z_loss,
        return_predicted=return_token_accuracy or return_predicted_tokens,
    )
    if not (return_z_loss or return_token_accuracy or return_predicted_tokens):
        return got
    counts = torch.ones_like(target, dtype=torch.bool) if ignore_index is None else target != ignore_index
    counted = counts.sum().clamp(min=1)
    z_loss = accuracy = None
    if return_z_loss:
        z_loss = lse_square_scale * got.lse.square()  # lse is 0 for ignored rows
        if reduction != "none":
            z_loss = z_loss.sum() / counted if reduction == "mean" else z_loss.sum()
    if return_token_accuracy:
        accuracy = ((got.predicted == target) & counts).float()
        if reduction != "none":
            accuracy = accuracy.sum() / counted
    return CrossEntropyOutput(got.loss, z_loss, accuracy, got.predicted.long() if return_predicted_tokens else None)


class LigerCrossEntropyLoss(torch.nn.Module):
    """liger_kernel.transformers.LigerCrossEntropyLoss; see liger_cross_entropy.

    loss = LigerCrossEntropyLoss(lse_square_scale=1e-4)(logits, targets)
    """

    def __init__(
        self,
        weight: torch.Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
        *,
        overwrite_logits: bool = False,
        fused: bool = False,
    ) -> None:
        super().__init__()
        if not 0 <= label_smoothing <= 1:
            raise InvalidArgument(f"label_smoothing must be between 0.0 and 1.0. Got: {label_smoothing}")
        if reduction not in ("mean", "sum", "none"):
            raise InvalidArgument(f"reduction must be one of 'mean', 'sum', or 'none'. Got: {reduction}")
        if softcap is not None and softcap <= 0:
            raise InvalidArgument(f"softcap must greater than 0.0 or None. Got: {softcap}")
        self.weight = weight
        self.ignore_index = ignore_index
        self.lse_square_scale = lse_square_scale
        self.label_smoothing = label_smoothing
        self.reduction = reduction
        self.softcap = softcap
        self.return_z_loss = return_z_loss
        self.return_token_accuracy = return_token_accuracy
        self.return_predicted_tokens = return_predicted_tokens
        self.overwrite_logits = overwrite_logits
        self.fused = fused

    def forward(self, _input: torch.Tensor, target: torch.Tensor) -> torch.Tensor | CrossEntropyOutput:
        return liger_cross_entropy(
            _input,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            lse_square_scale=self.lse_square_scale,
            softcap=self.softcap,
            return_z_loss=self.return_z_loss,
            return_token_accuracy=self.return_token_accuracy,
            return_predicted_tokens=self.return_predicted_tokens,
            overwrite_logits=self.overwrite_logits,
            fused=self.fused,
        )
