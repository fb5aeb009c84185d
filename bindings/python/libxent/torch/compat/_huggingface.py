# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from typing import Any

import torch

from ..._library import InvalidArgument
from .._functional import cross_entropy
from .._module import OPTIONS, HoldsOptions


def ForCausalLMLoss(
    logits: torch.Tensor,
    labels: torch.Tensor | None = None,
    vocab_size: int | None = None,
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """transformers.loss.loss_utils.ForCausalLMLoss: the loss of a causal language model.

    logits              (B, S, V)
    labels              (B, S) token ids; position s predicts the label of s + 1
    vocab_size          columns of the logits
    num_items_in_batch  None: the mean over the tokens that count; else their sum divided by it: a number, or a tensor
                        on any device
    ignore_index        labels that do not count
    shift_labels        (B, S) labels that are shifted already, instead of `labels`
    kwargs              options of libxent.torch.cross_entropy are used (z_loss, softcap, overwrite_logits, ...), others
                        are what a model passes to any loss, and ignored

    Unlike the original: the logits are not copied to float32; where no token counts, or num_items_in_batch is 0, loss
    and gradients are 0, not NaN.
    """
    if shift_labels is None:
        if labels is None:
            raise InvalidArgument("labels: expected labels or shift_labels, got neither")
        shift_labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    if vocab_size is not None and logits.shape[-1] != vocab_size:
        logits = logits.reshape(-1, vocab_size)
    shift_labels = shift_labels.to(logits.device).reshape(logits.shape[:-1])
    if isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = num_items_in_batch.to(logits.device)
        if num_items_in_batch.dtype not in (torch.int64, torch.int32):
            num_items_in_batch = num_items_in_batch.float()
    return cross_entropy(
        logits,
        shift_labels,
        ignore_index=ignore_index,
        reduction="mean" if num_items_in_batch is None else "sum",
        denominator=num_items_in_batch,
        class_dim=-1,
        **{name: value for name, value in kwargs.items() if name in _OPTIONS},
    )


# Without those that change what is returned, or what the arguments above say.
_OPTIONS = {name for name in (*OPTIONS, "label_smoothing") if name != "class_dim" and name[:7] != "return_"}


def patch_causal_lm(model: Any, **options: Any) -> Any:
    """Makes a causal language model of transformers compute its loss with libxent, and returns the model.

        patch_causal_lm(model, overwrite_logits=True)

    options  of libxent.torch.cross_entropy: z_loss, softcap, overwrite_logits, fused, ...

    With overwrite_logits=True the logits that the model returns hold their gradient after backward; under
    torch.compile, where the graph returns them, they keep their values and the gradient takes memory of its own.
    """
    unknown = options.keys() - _OPTIONS
    if unknown:
        raise TypeError(f"patch_causal_lm: unexpected option {min(unknown)!r}; there are {sorted(_OPTIONS)}")
    if not hasattr(type(model), "loss_function"):
        raise TypeError(f"patch_causal_lm: {type(model).__name__} has no loss_function (transformers 4.46 or newer)")
    model.loss_function = _Patch(options)
    return model


class _Patch(HoldsOptions):
    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options

    def __call__(self, *arguments: Any, **named: Any) -> torch.Tensor:
        return ForCausalLMLoss(*arguments, **{**self.options, **named})
