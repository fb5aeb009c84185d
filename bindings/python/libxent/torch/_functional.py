# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""cross_entropy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .._library import InvalidArgument, integer, real
from .._plan import reduction_of
from . import _ops, _parallel, _plans
from ._autograd import (
    TELLS_OF_HOOKS,
    CrossEntropy,
    FusedCrossEntropy,
    check_overwritable,
    refuse_tangents,
    saved_tensors_are_hooked,
)
from ._parallel import whole
from ._plans import Spec, Split, Wants

_INDEX = (torch.int64, torch.int32)
_SMALL_INDEX = (torch.uint8, torch.int8, torch.int16)
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_PLAIN_OR_NONE = (type(None), *_PLAIN)


class CrossEntropyOutput(NamedTuple):
    """What was asked for; None for the rest. Gradients flow to the loss alone."""

    loss: torch.Tensor
    lse: torch.Tensor | None = None  # [...] log-sum-exp; 0 for ignored rows
    entropy: torch.Tensor | None = None  # [...] in nats; 0 for ignored rows
    predicted: torch.Tensor | None = None  # [...] argmax; -1 for ignored rows and rows without a finite softmax
    row_counts: torch.Tensor | None = None  # [3] rows counted, ignored, with a target out of range


def _layout(input: torch.Tensor, target: torch.Tensor, class_dim: int | None) -> torch.Tensor:
    """The input with its classes last, as `target` has the other dimensions."""
    if not isinstance(input, torch.Tensor) or not isinstance(target, torch.Tensor):
        wrong, name = (target, "target") if isinstance(input, torch.Tensor) else (input, "input")
        raise InvalidArgument(f"{name}: expected a torch.Tensor, got {type(wrong).__name__}")
    dim = input.dim()
    if dim == 0:
        raise InvalidArgument("input: expected at least the dimension of the classes, got a tensor without dimensions")
    if input.is_nested or target.is_nested:
        raise InvalidArgument("input: nested tensors are not supported; pass input.values() and target.values()")
    if target.dtype.is_floating_point:
        raise InvalidArgument(
            f"target: expected class indices, got {target.dtype}; probabilities of the classes are not supported here, "
            "use torch.nn.functional.cross_entropy"
        )
    if class_dim is not None and not -dim <= class_dim < dim:
        raise InvalidArgument(f"class_dim: {class_dim} is not a dimension of an input of {dim} dimensions")
    shape, undecided = target.shape, dim > 2 and class_dim is None
    if undecided:
        class_dim = 1 if shape == input.shape[:1] + input.shape[2:] else -1
    logits = input if class_dim is None or class_dim in (-1, dim - 1) else input.movedim(class_dim, -1)
    if shape != logits.shape[:-1]:
        wanted = f"{tuple(logits.shape[:-1])}"
        if undecided:
            wanted = f"{tuple(input.shape[:1] + input.shape[2:])} or {wanted}"
        raise InvalidArgument(
            f"target: shape {tuple(shape)} does not fit an input of {tuple(input.shape)}: expected {wanted}"
        )
    return logits


def _of_class(
    weight: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor, spec: Spec, split: Split | None
) -> torch.Tensor:
    """weight[target] of every row; 1 where the target is no class, which the loss then sees by itself."""
    classes = logits.shape[-1] if spec.classes is None else spec.classes
    if split is not None:
        classes = split.offsets[-1]
    if weight.dim() != 1 or weight.shape[0] != classes:
        raise InvalidArgument(f"weight: expected one for each of {classes} classes, got shape {tuple(weight.shape)}")
    if not weight.dtype.is_floating_point:
        raise InvalidArgument(f"weight: expected a floating type, got {weight.dtype}")
    if spec.label_smoothing != 0:
        raise InvalidArgument(
            "weight: class weights together with label_smoothing are not supported, as PyTorch's formula then weights "
            "the smoothed part by every class; use torch.nn.functional.cross_entropy"
        )
    acc = torch.float64 if logits.dtype == torch.float64 else torch.float32
    inside = (targets >= 0) & (targets < classes)
    picked = weight.to(acc)[torch.where(inside, targets, 0)]
    return torch.where(inside, picked, 1)


def _refuse_gradient(**tensors: Any) -> None:
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            raise InvalidArgument(
                f"{name}: it requires a gradient, which this loss does not give; pass {name}.detach(), or multiply the "
                "losses of reduction='none' by it"
            )


def _number(denominator: Any, logits: torch.Tensor) -> Any:
    """A number as the tensor that an operator takes."""
    if denominator is None or isinstance(denominator, torch.Tensor):
        return denominator
    if isinstance(denominator, (int, float)):
        dtype = torch.float32 if isinstance(denominator, float) else torch.int64
        return torch.full((), denominator, dtype=dtype, device=logits.device)
    scalar = torch.as_tensor(denominator, device=logits.device)  # of NumPy
    return scalar.float() if scalar.dtype.is_floating_point else scalar.long()


def _is_compiled(_: torch.Tensor) -> bool:
    """torch.compiler.is_compiling(), also where Dynamo has seen the caller raise and runs that one uncompiled, to let
    it raise: a function of its own that is given a tensor is compiled even so.
    """
    return torch.compiler.is_compiling()


_MODES = getattr(torch._C, "_TorchDispatchModeKey", None)
_RECORDING = [getattr(_MODES, name) for name in ("FAKE", "PROXY", "FUNCTIONAL") if hasattr(_MODES, name)]


def _is_recorded() -> bool:
    """Whether calls are noted down instead of run: then there is no memory to hand to the C library."""
    return torch._C._len_torch_dispatch_stack() > 0 and any(torch._C._get_dispatch_mode(key) for key in _RECORDING)


def _is_traced(logits: torch.Tensor) -> bool:
    """Whether an operator must be called: a compiler, a mode or a transform looks on, or there is no plain memory."""
    return (
        torch.compiler.is_compiling()
        or type(logits) not in _PLAIN
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or torch._C._is_tracing()
        or logits.is_meta
        or logits._is_zerotensor()
    )


def _differentiates() -> bool:
    """Whether a transform of torch.func takes a derivative."""
    functorch = torch._C._functorch
    kinds = {interpreter.key() for interpreter in functorch.get_interpreter_stack() or ()}
    return bool(kinds & {functorch.TransformType.Grad, functorch.TransformType.Jvp})


# Dynamo asks once for each graph, which holds for the transforms around it. This is what
# torch.compiler.assume_constant_result sets, but that imports all of the compiler.
_differentiates._dynamo_marked_constant = True


def _looked_on(spec: Spec, wrappers: tuple) -> Spec:
    """The options where a mode or a transform runs operators, outside of torch.compile."""
    # The slices of vmap share memory, whose first change would spoil the rest.
    keep = wrappers or torch._C._are_functorch_transforms_active() or not TELLS_OF_HOOKS or saved_tensors_are_hooked()
    return spec._replace(overwrite=False) if spec.overwrite and keep else spec


def cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int | None = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    mask: torch.Tensor | None = None,
    row_weights: torch.Tensor | None = None,
    denominator: Any = None,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    logit_scale: float = 1.0,
    classes: int | None = None,
    class_dim: int | None = None,
    empty_mean_is_nan: bool = False,
    overwrite_logits: bool = False,
    fused: bool = False,
    process_group: Any = None,
    class_offsets: Sequence[int] | None = None,
    return_lse: bool = False,
    return_entropy: bool = False,
    return_predicted: bool = False,
    return_row_counts: bool = False,
) -> torch.Tensor | CrossEntropyOutput:
    """torch.nn.functional.cross_entropy of class indices, with two numbers a row kept for backward.

    As in PyTorch
      input            logits: (C), (N, C) or (N, C, d1, ...); also (..., C), told apart by the shape of the target.
                       float32, float16, bfloat16, on the CPU also float64; any strides; never copied
      target           class indices: (), (N), (N, d1, ...) or (...). int64, int32 or smaller
      weight           (C) one for each class, without label_smoothing; must not require a gradient
      ignore_index     targets that do not count; None: all count
      reduction        "mean" (divided by the sum of the weights of the rows that count), "sum" or "none"
      label_smoothing  in [0, 1]
      size_average, reduce  deprecated, as in PyTorch

    Beyond it
      mask             shape of the target, bool, uint8, int32, int64 or float32: rows where it is 0 do not count
      row_weights      shape of the target, float32 (float64 for float64 logits): factors of the rows' losses, in the
                       divisor of "mean" too; must not require a gradient
      denominator      a number or a tensor [] of float32, int32 or int64: divides "sum" or "mean" instead; 0 gives 0
      z_loss           weight of lse^2, added to each row's loss
      softcap          logits become softcap * tanh(logits / softcap); 0: off
      logit_scale      logits are multiplied by it first
      classes          real classes, where the last ones are padding. Default: all
      class_dim        dimension of the classes. Default: 1 where the target's shape allows it, as in PyTorch, else -1;
                       -1 with process_group
      empty_mean_is_nan  "mean" over no rows is NaN, as in PyTorch; otherwise 0. Gradients are 0 either way
      overwrite_logits  backward writes the gradient over the logits instead of into new memory. It then runs once, and
                       the logits' values are lost; whoever else needs them in backward gets PyTorch's error. Logits
                       that share memory with each other (expanded, unfolded) are refused. Under hooks on saved tensors
                       (checkpointing, offloading) and under vmap new memory is used all the same; a graph of
                       torch.compile with such hooks around it is refused instead. Logits that such a graph computes
                       keep their values where it returns them; their memory is written to where nothing else needs it.
                       Before PyTorch 2.12 torch.compile uses new memory for an input of the graph that is a leaf, such
                       as a parameter
      fused            forward writes the gradient in the same pass as the loss, and backward gives it away: once.
                       An upstream gradient other than 1 then scales it in place, which rounds it a second time, unless
                       by a power of two: give the factors of the loss as `denominator` or `row_weights` instead. With
                       overwrite_logits the logits' values are lost in forward. Of float16 logits, whose gradients a
                       loss scaler lifts out of what float16 rounds to 0, backward makes the gradient, as without
                       `fused`; so it does for tensors without memory, their subclasses, and under a TorchDispatchMode,
                       vmap, functionalize and torch.jit.trace. Under torch.compile it is refused
      process_group    a group of torch.distributed over whose ranks the vocabulary is split (tensor parallelism): each
                       rank gives its columns of the same rows, in rank order, and gets their gradient; targets are
                       global, and all else is the same on every rank, like the loss, which has the same bits on all.
                       One all-gather of 12 to 24 bytes a row in forward, none in backward
      class_offsets    with process_group: rank r holds the classes from class_offsets[r] to class_offsets[r + 1] in its
                       first columns. Default: all ranks hold equally many columns, those beyond `classes` are padding;
                       the same all-gather then has 16 bytes more of each rank, to check it, and raises on all of them.
                       On CUDA the host waits for that once for each layout; if a later call breaks with it, ranks to
                       which theirs is not new get a NaN loss instead, as the others do where one raises because of its
                       mask, weights, denominator or type of logits. What one rank alone refuses earlier (the options,
                       the shapes and the type of the target) leaves the others waiting for it
      return_lse, return_entropy, return_predicted, return_row_counts
                       return a CrossEntropyOutput with these beside the loss; they carry no gradient

    Returns the loss in float32 (float64 for float64 logits), whatever 16-bit type the logits have; arithmetic is
    float32, so autocast changes nothing here and casts nothing. The gradient has the type of the logits.

    Backward may run again (retain_graph) unless the logits were overwritten; second derivatives are refused. Where the
    logits need no gradient, nothing is kept. Calls enqueue on the current stream, never synchronise, and can be
    captured in a CUDA graph once the same call has run outside.

    A DTensor as input may be replicated, or sharded along its last dimension, which are then the classes, over one
    dimension of its mesh, as torch.chunk cuts, which is checked as without class_offsets; the loss is a plain tensor,
    the same on every rank of it. The other arguments may then, and beside plain logits, be replicated DTensors. What a
    functional collective has not finished yet (AsyncCollectiveTensor) is waited for, outside of torch.compile.

    Under DDP and FSDP, which average the gradients of their ranks, the mean over the tokens of all ranks is
    reduction="sum" with denominator=tokens_of_all_ranks / ranks, a tensor on the device.

    Under vmap, and for a batch of upstream gradients (is_grads_batched=True, vectorize=True), the slices are computed
    one after the other. Not supported: torch.func.grad, vjp, jvp and what is made of them, forward-mode AD, nested
    tensors; with process_group or fused=True also a batch of upstream gradients.

    Differences from PyTorch: a target that is out of range gives a NaN loss and gradient 0, and is counted in
    row_counts[2], where PyTorch stops the program; probabilities as targets, and class weights with label_smoothing,
    are refused.

    Raises libxent.InvalidArgument (a ValueError) for bad arguments, libxent.Error where the device cannot be used.
    """
    if size_average is not None or reduce is not None:
        reduction = torch.nn._reduction.legacy_get_string(size_average, reduce)
    plain = type(input) in _PLAIN and type(target) in _PLAIN and type(mask) in _PLAIN_OR_NONE
    plain = plain and type(weight) in _PLAIN_OR_NONE and type(row_weights) in _PLAIN_OR_NONE
    is_dtensor = not plain and _parallel.is_dtensor(input)
    wrappers: tuple = ()
    if process_group is not None or class_offsets is not None or is_dtensor:
        if fused or _is_compiled(input):
            raise InvalidArgument("process_group: not supported with fused=True, nor under torch.compile")
        if _is_recorded():
            raise InvalidArgument("process_group: not supported under FakeTensorMode, make_fx and functionalize")
        if is_dtensor:
            if process_group is not None or class_offsets is not None or class_dim not in (None, -1, input.dim() - 1):
                raise InvalidArgument("input: a DTensor says itself how its classes, the last dimension, are split")
            wrappers = (input,)
            input, process_group, class_offsets = _parallel.local_of(input)
        if class_dim is None or is_dtensor:
            class_dim = -1  # by shape a rank's part could be taken for another layout than the whole
    if not ((plain and type(denominator) in _PLAIN_OR_NONE) or _is_compiled(input)):
        if _parallel.is_under_way(input):
            wrappers = (*wrappers, input)
            input = _parallel.waited(input)
        target, mask = whole(target, "target"), whole(mask, "mask")
        weight, row_weights = whole(weight, "weight"), whole(row_weights, "row_weights")
        denominator = whole(denominator, "denominator")
    logits = _layout(input, target, class_dim)
    if classes is not None and type(classes) is not int:
        classes = integer("classes", classes)
    if target.dtype not in _INDEX:
        if target.dtype not in _SMALL_INDEX:
            raise InvalidArgument(f"target: expected class indices of int64 or int32, got {target.dtype}")
        target = target.long()
    records = torch.is_grad_enabled()
    spec = Spec(
        ignore_index if ignore_index is None or type(ignore_index) is int else integer("ignore_index", ignore_index),
        reduction if type(reduction) is str else reduction_of(reduction),
        label_smoothing if type(label_smoothing) is float else real("label_smoothing", label_smoothing),
        z_loss if type(z_loss) is float else real("z_loss", z_loss),
        softcap if type(softcap) is float else real("softcap", softcap),
        logit_scale if type(logit_scale) is float else real("logit_scale", logit_scale),
        classes,
        bool(empty_mean_is_nan) and reduction == "mean",
        bool(overwrite_logits and records and logits.requires_grad),
    )
    wants = Wants(bool(return_lse), bool(return_entropy), bool(return_predicted), bool(return_row_counts))
    arguments = (logits, target, weight, mask, row_weights, denominator, spec, wants, fused, wrappers)
    split = None
    if process_group is not None or class_offsets is not None:
        if type(logits) not in _PLAIN or logits.is_meta:
            raise InvalidArgument(
                f"process_group: expected logits with memory of their own, got {type(logits).__name__}"
            )
        split = _parallel.split_of(logits, target, process_group, class_offsets, spec, wants, is_dtensor)
    if split is None:
        return _loss(*arguments, None)
    with split.gather:  # the other ranks wait for this one, whatever is refused before its turn
        return _loss(*arguments, split)


def _loss(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    mask: torch.Tensor | None,
    row_weights: torch.Tensor | None,
    denominator: Any,
    spec: Spec,
    wants: Wants,
    fused: bool,
    wrappers: tuple,
    split: Split | None,
) -> torch.Tensor | CrossEntropyOutput:
    records = torch.is_grad_enabled()
    if split is not None and spec.classes is not None:
        spec = spec._replace(classes=None)  # the offsets tell
    if records and not (weight is None and row_weights is None and denominator is None):
        _refuse_gradient(weight=weight, row_weights=row_weights, denominator=denominator)
    if weight is not None:
        of_class = _of_class(weight, logits, target, spec, split)
        if row_weights is not None:
            if row_weights.shape != target.shape or row_weights.dtype != of_class.dtype:  # a product would adapt them
                raise InvalidArgument(
                    f"row_weights: expected shape {tuple(target.shape)} and {of_class.dtype}, got shape "
                    f"{tuple(row_weights.shape)} and {row_weights.dtype}"
                )
            of_class = row_weights * of_class
        row_weights = of_class
    if split is not None:
        _parallel.refuse_early(logits, target, row_weights, denominator, spec)
    if spec.overwrite:
        check_overwritable(logits)
    traced = split is None and _is_traced(logits)
    compiled = traced and _is_compiled(logits)
    if traced and _differentiates():
        raise InvalidArgument(
            "libxent.torch.cross_entropy: torch.func.grad, vjp, jvp and what is made of them (jacrev, hessian, ...) "
            "are not supported; use autograd (requires_grad_(), torch.autograd.grad)"
        )
    if not compiled:
        refuse_tangents(logits, row_weights, denominator)
        logits = logits.resolve_neg()
    arguments = (logits, target, mask, row_weights, denominator, spec, wants)
    if traced:
        if not compiled:
            spec = _looked_on(spec, wrappers)
        elif fused and records and logits.requires_grad:
            raise InvalidArgument("fused: not supported under torch.compile; leave it out")
        elif spec.overwrite and not TELLS_OF_HOOKS:
            raise InvalidArgument("overwrite_logits: under torch.compile this needs a newer PyTorch; leave it out")
        outputs = _ops.traced_cross_entropy(
            logits, target, mask, row_weights, _number(denominator, logits), spec, wants
        )
    elif records and logits.requires_grad:
        # A factor of the loss, as of a loss scaler, could not restore what float16 has rounded to 0 before.
        if fused and logits.dtype != torch.float16:
            outputs = FusedCrossEntropy.apply(*arguments, wrappers)
        else:
            outputs = CrossEntropy.apply(*arguments, wrappers, split)
    else:
        result = _plans.forward(*arguments, split, False)
        outputs = (result.loss, result.lse, result.entropy, result.predicted, result.row_counts)
    return CrossEntropyOutput(*outputs) if True in wants else outputs[0]
