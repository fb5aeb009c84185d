# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""Real text for tools/demo: the Python standard library's sources, as tokens of a BPE vocabulary trained on them."""

import hashlib
import pathlib
import sysconfig

import numpy as np

VOCAB = 32768
SIZE = 8_000_000  # of text, in bytes; less does not give so many tokens that stand in it twice
HELD_OUT = 20  # one file in so many
SKIP = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "ensurepip", "pydoc_data"}


def sources(limit):
    """[(path, text)] of up to `limit` bytes, the same on every run."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    found, size = [], 0
    for path in sorted(root.rglob("*.py"), key=lambda path: hashlib.sha256(path.name.encode()).digest()):
        if SKIP.isdisjoint(path.relative_to(root).parts[:-1]) and size < limit:
            text = path.read_text(encoding="utf-8", errors="replace")
            found.append((path, text))
            size += len(text)
    return root, found


def load(cache):
    """(description, training tokens, held-out tokens), from `cache` where an earlier run left them."""
    import tokenizers

    root, files = sources(SIZE)
    key = hashlib.sha256(repr([VOCAB, HELD_OUT, tokenizers.__version__]).encode())
    for _, text in files:
        key.update(text.encode("utf-8", "replace"))
    store = cache / f"tokens-{key.hexdigest()[:16]}.npz"
    size = sum(len(text) for _, text in files) / 1e6
    description = f"{len(files)} files of the Python standard library, {size:.1f} MB ({root})"
    if not store.exists():
        bpe = tokenizers.ByteLevelBPETokenizer()
        bpe.train_from_iterator((text for _, text in files), vocab_size=VOCAB, min_frequency=2, show_progress=False)
        if bpe.get_vocab_size() != VOCAB:
            raise SystemExit(f"demo: this text gives only {bpe.get_vocab_size()} of {VOCAB} tokens")
        encoded = [np.array(item.ids, np.int32) for item in bpe.encode_batch([text for _, text in files])]
        held = np.concatenate(encoded[::HELD_OUT])
        train = np.concatenate([ids for index, ids in enumerate(encoded) if index % HELD_OUT])
        cache.mkdir(parents=True, exist_ok=True)
        np.savez(store.with_suffix(".new.npz"), train=train, held=held)
        store.with_suffix(".new.npz").rename(store)
    with np.load(store) as saved:
        return description, saved["train"], saved["held"]
