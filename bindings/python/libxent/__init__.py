# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""Softmax cross-entropy for large vocabularies, on NumPy, PyTorch, JAX and CuPy arrays without a copy.

    loss = libxent.cross_entropy(logits, targets)
    loss, grad = libxent.loss_and_grad(logits, targets)

`Plan` is the interface close to C: options decided once, forward and backward apart, outputs of the caller.
"""

from ._call import Result
from ._functional import cross_entropy, loss_and_grad
from ._library import Context, Error, InvalidArgument, backends, version
from ._plan import Plan, PlanInfo
from ._ranks import Communicator

__all__ = [
    "Communicator",
    "Context",
    "Error",
    "InvalidArgument",
    "Plan",
    "PlanInfo",
    "Result",
    "backends",
    "cross_entropy",
    "loss_and_grad",
    "version",
]
