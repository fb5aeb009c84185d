# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""The cross-entropy losses of other libraries, by their own signatures, through libxent.

    TransformerEngine  parallel_cross_entropy
    NeMo Automodel     MaskedCrossEntropy, ChunkedCrossEntropy
    Megatron-LM        vocab_parallel_cross_entropy
    transformers       ForCausalLMLoss, patch_causal_lm
    Liger-Kernel       LigerCrossEntropyLoss, liger_cross_entropy

None of these libraries is needed or imported. Where one is known to give wrong numbers, the right ones are given, and
the docstring says so. In all of them the loss is float32 (float64 for float64 logits), logits and labels are left as
they are unless overwriting is asked for, targets that are no class give NaN instead of whatever lies in memory, and
arguments that libxent does not support are refused with libxent.InvalidArgument (a ValueError).
"""

from ._automodel import ChunkedCrossEntropy, MaskedCrossEntropy
from ._huggingface import ForCausalLMLoss, patch_causal_lm
from ._liger import CrossEntropyOutput, LigerCrossEntropyLoss, liger_cross_entropy
from ._megatron import vocab_parallel_cross_entropy
from ._transformer_engine import parallel_cross_entropy

__all__ = [
    "ChunkedCrossEntropy",
    "CrossEntropyOutput",
    "ForCausalLMLoss",
    "LigerCrossEntropyLoss",
    "MaskedCrossEntropy",
    "liger_cross_entropy",
    "parallel_cross_entropy",
    "patch_causal_lm",
    "vocab_parallel_cross_entropy",
]
