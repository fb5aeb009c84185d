# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from typing import Any

import torch

from ..._library import InvalidArgument
from .._functional import cross_entropy


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: torch.Tensor,
    target: torch.Tensor,
    label_smoothing: float = 0.0,
    tp_group: Any = None,
    *,
    smoothing_formula: str = "megatron",
    overwrite_logits: bool = False,
) -> torch.Tensor:
    """megatron.core.tensor_parallel.vocab_parallel_cross_entropy.

    vocab_parallel_logits  (S, B, V), V over the number of ranks with a process group; also any other (..., V)
    target                 (S, B) class indices; a negative one gives loss 0 and gradient 0
    label_smoothing        in [0, 1)
    tp_group               the group over whose ranks the vocabulary is split, in equal parts. None: not split
    smoothing_formula      "megatron": 1 - label_smoothing on the target, the rest evenly on the V - 1 other classes;
                           "pytorch": label_smoothing spread over all V classes
    overwrite_logits       backward writes the gradient over the logits, and runs once

    Returns float32 losses in the shape of the target.

    Unlike the original: smoothing is over the classes of all ranks, and the loss the same on every rank; float32 logits
    are not overwritten in forward; negative targets, which a loss mask removes later, do not give a loss of their own
    before.
    """
    if not 0 <= label_smoothing < 1:
        raise InvalidArgument(f"label_smoothing: expected a number in [0, 1), got {label_smoothing}")
    if smoothing_formula not in ("megatron", "pytorch"):
        raise InvalidArgument(f"smoothing_formula: expected 'megatron' or 'pytorch', got {smoothing_formula!r}")
    vocab = vocab_parallel_logits.shape[-1]
    if tp_group is not None:
        vocab *= torch.distributed.get_world_size(tp_group)
    if smoothing_formula == "megatron" and label_smoothing > 0:
        if label_smoothing * vocab > vocab - 1:
            raise InvalidArgument(
                f"label_smoothing: Megatron's formula needs at most {vocab - 1}/{vocab} here, got {label_smoothing}"
            )
        label_smoothing = label_smoothing * vocab / (vocab - 1)
    return cross_entropy(
        vocab_parallel_logits,
        target,
        ignore_index=None,
        mask=target >= 0,
        reduction="none",
        label_smoothing=label_smoothing,
        class_dim=-1,
        overwrite_logits=overwrite_logits,
        process_group=tp_group,
    )
