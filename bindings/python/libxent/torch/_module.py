# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""CrossEntropyLoss."""

from __future__ import annotations

import copy
from typing import Any

import torch

from ._functional import CrossEntropyOutput, cross_entropy


class HoldsOptions:
    """Of `cross_entropy`, in `options`. There is one process group: copies, deep ones too, share it, pickles cannot."""

    options: dict[str, Any]

    def __copy__(self) -> HoldsOptions:
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin

    def __deepcopy__(self, memo: dict) -> HoldsOptions:
        group = self.options.get("process_group")
        memo[id(group)] = group
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.options.get("process_group") is not None:
            raise TypeError(
                "libxent.torch: a loss with a process_group cannot be pickled, nor saved as a module by torch.save; "
                "save the state_dict(), or take the group out of its options first"
            )
        return super().__reduce_ex__(protocol)


class CrossEntropyLoss(HoldsOptions, torch.nn.CrossEntropyLoss):
    """torch.nn.CrossEntropyLoss of class indices; keywords beyond PyTorch's are those of `cross_entropy`.

        loss = libxent.torch.CrossEntropyLoss(z_loss=1e-4, overwrite_logits=True)(logits, targets)

    `mask`, `row_weights` and `denominator` change with the data, and are arguments of the call. Copies, deep ones too,
    have the same `process_group`; with one, the state_dict can be saved, the module cannot.
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
