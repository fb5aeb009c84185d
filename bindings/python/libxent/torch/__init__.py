# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""libxent for PyTorch (2.4 or newer): the cross-entropy loss with autograd.

    from libxent.torch import cross_entropy    # instead of torch.nn.functional.cross_entropy
    from libxent.torch import CrossEntropyLoss  # instead of torch.nn.CrossEntropyLoss

`libxent.torch.compat` has the signatures of other libraries.
"""

import torch

if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 4):
    raise ImportError(f"libxent.torch: PyTorch 2.4 or newer is needed, this is {torch.__version__}")

from ._functional import CrossEntropyOutput, cross_entropy
from ._module import CrossEntropyLoss

__all__ = ["CrossEntropyLoss", "CrossEntropyOutput", "cross_entropy"]
