# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import warnings
from typing import Any

import torch

from ..._library import InvalidArgument
from .._functional import cross_entropy


def parallel_cross_entropy(
    inp: torch.Tensor | None = None,
    target: torch.Tensor | None = None,
    label_smoothing: float = 0.0,
    reduce_loss: bool = False,
    dist_process_group: Any = None,
    ignore_idx: int = -100,
    is_cg_capturable: bool = False,
    overwrite_input: bool = False,
    *,
    _input: torch.Tensor | None = None,
) -> torch.Tensor:
    """transformer_engine.pytorch.cross_entropy.parallel_cross_entropy.

    inp                 (B, S, V) or (S, B, V), V over the number of ranks with a process group; also any other (..., V)
    target              a class index for each row of inp, in the shape of its leading dimensions
    label_smoothing     in [0, 1], the smoothed part spread over all V classes
    reduce_loss         False: losses in float32, shaped like the rows; True: their mean over the rows that count
    dist_process_group  the group over whose ranks the vocabulary is split, in equal parts
    ignore_idx          rows with this target have loss 0 and gradient 0
    is_cg_capturable    taken and ignored: calls can always be captured, and never read the device from the host
    overwrite_input     backward writes the gradient over inp, and runs once
    _input              deprecated name of inp

    Unlike the original: backward may run again without overwrite_input; upstream gradients may differ from row to row
    and have any strides; targets that are a slice of a longer sequence are read by their strides.
    """
    if _input is not None:
        warnings.warn("The '_input' parameter is deprecated. Please use 'inp' instead.", FutureWarning, stacklevel=2)
        inp = _input
    if inp is None or target is None:
        raise TypeError("parallel_cross_entropy() needs inp and target")
    rows = inp.shape[:-1]
    if target.shape != rows:
        if target.numel() != rows.numel():
            raise InvalidArgument(f"target: each of the {rows.numel()} rows needs one, got {target.numel()}")
        target = target.reshape(rows)
    return cross_entropy(
        inp,
        target,
        ignore_index=ignore_idx,
        reduction="mean" if reduce_loss else "none",
        label_smoothing=label_smoothing,
        class_dim=-1,
        overwrite_logits=overwrite_input,
        process_group=dist_process_group,
    )
