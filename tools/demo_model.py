# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""The language model of tools/demo: Bengio's, written out by hand over NumPy, CuPy or PyTorch arrays.

The embeddings of the last tokens go through a tanh layer; the logits are products with the same embeddings.
"""

import numpy as np


class ArrayOps:
    """NumPy, or CuPy, which is the same in the GPU's memory."""

    def __init__(self, xp):
        self.xp, self.name = xp, xp.__name__
        self.device = "cpu" if xp is np else "cuda"

    def array(self, values):
        return self.xp.asarray(values)

    def empty(self, shape):
        return self.xp.empty(shape, self.xp.float32)

    def zeros_like(self, array):
        return self.xp.zeros_like(array)

    def matmul(self, a, b, out):
        return self.xp.matmul(a, b, out=out)

    def tanh(self, array):
        return self.xp.tanh(array)

    def column_sums(self, array):
        return array.sum(0)

    def add_rows(self, target, index, rows):
        """target[index] += rows, where an index may stand several times."""
        if self.xp is np:
            # Sorted sums: numpy.add.at is much slower.
            order = np.argsort(index, kind="stable")
            unique, start = np.unique(index[order], return_index=True)
            target[unique] += np.add.reduceat(rows[order], start, axis=0)
        else:
            self.xp.add.at(target, index, rows)

    def adam(self, value, grad, mean, square, step, rate):
        mean *= 0.9
        mean += 0.1 * grad
        square *= 0.99
        grad *= grad
        grad *= 0.01
        square += grad
        self.xp.sqrt(square, out=grad)
        grad *= 1 / (1 - 0.99**step) ** 0.5
        grad += 1e-8
        self.xp.divide(mean, grad, out=grad)
        grad *= rate / (1 - 0.9**step)
        value -= grad

    def wait(self):
        if self.device == "cuda":
            self.xp.cuda.get_current_stream().synchronize()

    def plain_loss(self, logits, targets):
        """Mean cross-entropy in float64, the way it is written on a blackboard. Returns the loss and what is kept."""
        xp = self.xp
        p = logits.astype(xp.float64)
        p -= p.max(1, keepdims=True)
        rows = xp.arange(len(p))
        picked = p[rows, targets]
        xp.exp(p, out=p)
        total = p.sum(1, keepdims=True)
        p /= total
        return float((xp.log(total[:, 0]) - picked).mean()), p

    def plain_grad(self, p, targets):
        xp = self.xp
        p[xp.arange(len(p)), targets] -= 1
        p /= len(p)
        return p.astype(xp.float32)


class TorchOps(ArrayOps):
    """PyTorch on a GPU, without its autograd."""

    name, device = "torch", "cuda"

    def __init__(self, torch):
        self.torch = torch
        torch.set_grad_enabled(False)

    def array(self, values):
        return self.torch.from_numpy(values).to("cuda")

    def empty(self, shape):
        return self.torch.empty(shape, device="cuda")

    def zeros_like(self, array):
        return self.torch.zeros_like(array)

    def matmul(self, a, b, out):
        return self.torch.matmul(a, b, out=out)

    def tanh(self, array):
        return self.torch.tanh(array)

    def add_rows(self, target, index, rows):
        target.index_add_(0, index, rows)

    def adam(self, value, grad, mean, square, step, rate):
        mean.mul_(0.9).add_(grad, alpha=0.1)
        square.mul_(0.99).addcmul_(grad, grad, value=0.01)
        scale = (square / (1 - 0.99**step)).sqrt_().add_(1e-8)
        value.addcdiv_(mean, scale, value=-rate / (1 - 0.9**step))

    def wait(self):
        self.torch.cuda.synchronize()

    def plain_loss(self, logits, targets):
        p = logits.double()
        p -= p.max(1, keepdim=True).values
        picked = p.gather(1, targets[:, None])
        p.exp_()
        total = p.sum(1, keepdim=True)
        p /= total
        return float((total.log() - picked).mean()), p

    def plain_grad(self, p, targets):
        p[self.torch.arange(len(p), device="cuda"), targets] -= 1
        p /= len(p)
        return p.float()


def choose_ops():
    """The GPU where there is one and a library for it, else NumPy."""
    try:
        import cupy

        if cupy.cuda.runtime.getDeviceCount():
            return ArrayOps(cupy)
    except Exception:  # CuPy fails in many ways where there is no driver
        pass
    try:
        import torch

        if torch.cuda.is_available():
            return TorchOps(torch)
    except ImportError:
        pass
    return ArrayOps(np)


class Model:
    def __init__(self, ops, vocab, context, width, hidden, batch, seed):
        rng = np.random.default_rng(seed)

        def normal(*shape, scale):
            return ops.array((rng.standard_normal(shape) * scale).astype(np.float32))

        self.ops = ops
        self.parameters = {
            "embedding": normal(vocab, width, scale=0.05),
            "bias": normal(vocab, scale=0.0),
            "hidden": normal(context * width, hidden, scale=(context * width) ** -0.5 * 4),
            "hidden_bias": normal(hidden, scale=0.0),
            "output": normal(hidden, width, scale=hidden**-0.5),
        }
        self.moments = {name: (ops.zeros_like(value), ops.zeros_like(value)) for name, value in self.parameters.items()}
        self.logits = ops.empty((batch, vocab))
        self.grad_embedding = ops.empty((vocab, width))
        self.step = 0

    def forward(self, context):
        """Fills and returns the logits [batch, vocab]."""
        p = self.parameters
        self.context = context
        self.x = p["embedding"][context].reshape(len(context), -1)
        self.h = self.ops.tanh(self.x @ p["hidden"] + p["hidden_bias"])
        self.u = self.h @ p["output"]
        logits = self.ops.matmul(self.u, p["embedding"].T, out=self.logits)
        logits += p["bias"]
        return logits

    def backward(self, grad, rate):
        """One step of Adam down the gradient of the logits."""
        p, ops = self.parameters, self.ops
        grad_u = grad @ p["embedding"]
        grads = {
            "embedding": ops.matmul(grad.T, self.u, out=self.grad_embedding),
            "bias": ops.column_sums(grad),
            "output": self.h.T @ grad_u,
        }
        grad_h = (grad_u @ p["output"].T) * (1 - self.h * self.h)
        grads["hidden"] = self.x.T @ grad_h
        grads["hidden_bias"] = ops.column_sums(grad_h)
        grad_x = grad_h @ p["hidden"].T
        width = p["embedding"].shape[1]
        ops.add_rows(grads["embedding"], self.context.reshape(-1), grad_x.reshape(-1, width))
        self.step += 1
        for name, value in p.items():
            ops.adam(value, grads[name], *self.moments[name], self.step, rate)
