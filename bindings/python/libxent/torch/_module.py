# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""CrossEntropyLoss."""

from __future__ import annotations

from typing import Any

import torch

from ._functional import CrossEntropyOutput, cross_entropy


class CrossEntropyLoss(torch.nn.CrossEntropyLoss):
    """torch.nn.CrossEntropyLoss of class indices; keywords beyond PyTorch's are those of `cross_entropy`.

        loss = libxent.torch.CrossEntropyLoss(z_loss=1e-4, overwrite_logits=True)(logits, targets)

    `mask`, `row_weights` and `denominator` change with the data, and are arguments of the call.
    """

    def __init__(
        self,
        weight: torch.Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int | None = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        unknown = options.keys() - OPTIONS
        if unknown:
            raise TypeError(f"CrossEntropyLoss: unexpected keyword {min(unknown)!r}; there are {OPTIONS}")
        self.options = options

    def forward(
        self,
        input: torch.Tensor,
        target: torch.Tensor,
        *,
        mask: torch.Tensor | None = None,
        row_weights: torch.Tensor | None = None,
        denominator: Any = None,
    ) -> torch.Tensor | CrossEntropyOutput:
        return cross_entropy(
            input,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            mask=mask,
            row_weights=row_weights,
            denominator=denominator,
            **self.options,
        )

    def extra_repr(self) -> str:
        shown = {"ignore_index": self.ignore_index, "reduction": self.reduction}
        if self.label_smoothing:
            shown["label_smoothing"] = self.label_smoothing
        return ", ".join(f"{name}={value!r}" for name, value in {**shown, **self.options}.items())


OPTIONS = (
    "z_loss",
    "softcap",
    "logit_scale",
    "classes",
    "class_dim",
    "empty_mean_is_nan",
    "overwrite_logits",
    "fused",
    "process_group",
    "class_offsets",
    "return_lse",
    "return_entropy",
    "return_predicted",
    "return_row_counts",
)
