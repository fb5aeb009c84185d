# SPDX-FileCopyrightText: the libxent authors
# SPDX-License-Identifier: Apache-2.0
"""libxent.torch.compat against the mathematics of what it replaces, written out in float64."""

import inspect

import libxent
import pytest

torch = pytest.importorskip("torch", minversion="2.4")

import torch.nn.functional as F  # noqa: E402
from libxent.torch import compat  # noqa: E402
from torch_cases import DEVICES, logits, targets  # noqa: E402

SIGNATURES = {
    "parallel_cross_entropy": "inp target label_smoothing=0.0 reduce_loss=False dist_process_group=None "
    "ignore_idx=-100 is_cg_capturable=False",
    "MaskedCrossEntropy": "fp32_upcast=True ignore_index=-100 reduction=sum chunk_size=None inplace_grad=False",
    "MaskedCrossEntropy.forward": "logits labels mask=None num_label_tokens=None loss_weights=None",
    "ChunkedCrossEntropy": "chunk_len=32 compile=True ignore_index=-100 reduction=sum inplace_grad=False",
    "ChunkedCrossEntropy.forward": "logits labels mask=None num_label_tokens=None",
    "vocab_parallel_cross_entropy": "vocab_parallel_logits target label_smoothing=0.0 tp_group=None",
    "ForCausalLMLoss": "logits labels vocab_size num_items_in_batch=None ignore_index=-100 shift_labels=None",
    "liger_cross_entropy": "input target weight=None size_average=None ignore_index=-100 reduce=None reduction=mean "
    "label_smoothing=0.0 lse_square_scale=0.0 softcap=None return_z_loss=False return_token_accuracy=False "
    "return_predicted_tokens=False",
    "LigerCrossEntropyLoss": "weight=None ignore_index=-100 lse_square_scale=0.0 label_smoothing=0.0 reduction=mean "
    "softcap=None return_z_loss=False return_token_accuracy=False return_predicted_tokens=False",
    "LigerCrossEntropyLoss.forward": "_input target",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    """The originals' parameters in their order, with their defaults; ours come after."""
    function = compat
    for part in name.split("."):
        function = getattr(function, part)
    have = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    for wanted, parameter in zip(SIGNATURES[name].split(), have):
        key, _, default = wanted.partition("=")
        assert parameter.name == key
        assert not default or str(parameter.default) == default


def rows(x, t, smoothing=0.0, ignore=-100):
    """Losses in float64; 0 for ignored rows."""
    logp = x.double().log_softmax(-1)
    counts = t != ignore
    nll = -logp.gather(-1, torch.where(counts, t, 0).long()[..., None])[..., 0]
    loss = (1 - smoothing) * nll - smoothing * logp.mean(-1)
    return torch.where(counts, loss, 0)


def check(call, wanted, x, upstream=None, bar=1e-5):
    """Loss and gradient of `call(x)` against those of `wanted` in float64."""
    got = call(x)
    double = x.detach().double().requires_grad_()
    expected = wanted(double)
    assert got.shape == expected.shape and got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected, rtol=2e-6, atol=2e-6)
    upstream = torch.ones_like(expected) if upstream is None else upstream.to(expected)
    x.grad = None
    got.backward(upstream.float())
    expected.backward(upstream)
    half = 0.0 if x.dtype == torch.float32 else 2.0**-8
    torch.testing.assert_close(x.grad.double(), double.grad, rtol=half + bar, atol=bar * 0.1)
    return got


def labels_of_a_longer_sequence(rng, shape, vocab, device):
    """A slice, as next-token labels often are: rows with gaps."""
    return targets(rng, (shape[0], shape[1] + 1), vocab, device=device)[:, 1:]


# ---- TransformerEngine ----


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduce", [False, True])
@pytest.mark.parametrize("overwrite", [False, True])
def test_transformer_engine(rng, device, smoothing, reduce, overwrite):
    x, t = logits(rng, (4, 6, 71), torch.bfloat16, device), labels_of_a_longer_sequence(rng, (4, 6), 71, device)
    upstream = torch.from_numpy(rng.standard_normal(() if reduce else (4, 6))).to(device)

    def wanted(x):
        loss = rows(x, t, smoothing)
        return loss.sum() / (t != -100).sum() if reduce else loss

    check(
        lambda x: compat.parallel_cross_entropy(
            x * 1, t, smoothing, reduce, None, -100, True, overwrite_input=overwrite
        ),
        wanted,
        x,
        upstream,
    )


def test_transformer_engine_s_old_name_and_refusals(rng):
    x, t = logits(rng, (4, 6, 71)), targets(rng, (4, 6), 71, ignored=0)
    t[0, :2] = 5
    with pytest.warns(FutureWarning, match="deprecated"):
        loss = compat.parallel_cross_entropy(_input=x, target=t, ignore_idx=5)
    torch.testing.assert_close(loss.double(), rows(x, t, ignore=5), rtol=2e-6, atol=2e-6)
    assert compat.parallel_cross_entropy(x, torch.full_like(t, -100), reduce_loss=True) == 0
    with pytest.raises(libxent.InvalidArgument, match="24 rows"):
        compat.parallel_cross_entropy(x, t[:3])
    with pytest.raises(TypeError):
        compat.parallel_cross_entropy(x)


# ---- Megatron ----


@pytest.mark.parametrize("formula", ["megatron", "pytorch"])
@pytest.mark.parametrize("alpha", [0.0, 0.2])
def test_megatron(rng, formula, alpha):
    x, t = logits(rng, (6, 4, 71)), targets(rng, (6, 4), 71, ignored=0)
    t[0, 0] = -1
    upstream = torch.from_numpy(rng.standard_normal((6, 4)))

    def wanted(x):
        if formula == "pytorch":
            return rows(x, t, alpha, ignore=-1)
        logp = x.log_softmax(-1)
        picked = logp.gather(-1, t.clamp(0)[..., None])[..., 0]
        others = (logp.sum(-1) - picked) / (71 - 1)  # what "all but the target" says
        return torch.where(t < 0, 0, -(1 - alpha) * picked - alpha * others)

    check(lambda x: compat.vocab_parallel_cross_entropy(x, t, alpha, smoothing_formula=formula), wanted, x, upstream)


def test_megatron_leaves_float32_logits_alone_and_refuses(rng):
    x, t = logits(rng, (6, 4, 71)), targets(rng, (6, 4), 71, ignored=0)
    before = x.detach().clone()
    compat.vocab_parallel_cross_entropy(x, t).sum().backward()
    assert x.equal(before)
    with pytest.raises(libxent.InvalidArgument, match=r"\[0, 1\)"):
        compat.vocab_parallel_cross_entropy(x, t, 1.0)
    with pytest.raises(libxent.InvalidArgument, match="at most 70/71"):
        compat.vocab_parallel_cross_entropy(x, t, 0.99)
    with pytest.raises(libxent.InvalidArgument, match="smoothing_formula"):
        compat.vocab_parallel_cross_entropy(x, t, smoothing_formula="nemo")


# ---- NeMo Automodel ----

AUTOMODEL = {
    "masked": lambda **options: compat.MaskedCrossEntropy(**options),
    "masked, chunks": lambda **options: compat.MaskedCrossEntropy(chunk_size=7, **options),
    "masked, chunks, in place": lambda **options: compat.MaskedCrossEntropy(chunk_size=7, inplace_grad=True, **options),
    "chunked": lambda **options: compat.ChunkedCrossEntropy(chunk_len=5, **options),
    "chunked, in place": lambda **options: compat.ChunkedCrossEntropy(inplace_grad=True, **options),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", AUTOMODEL)
@pytest.mark.parametrize("tokens", [None, 13, 0, "tensor"])
def test_automodel(rng, device, name, tokens):
    x, t = logits(rng, (4, 6, 71), torch.bfloat16, device), targets(rng, (4, 6), 71, device=device)
    mask = torch.from_numpy(rng.integers(0, 2, (4, 6))).to(device)
    tokens = torch.tensor(9, device=device) if tokens == "tensor" else tokens
    before = t.clone()

    def wanted(x):
        loss = (rows(x, t) * mask).sum()
        return loss * 0 if tokens is not None and tokens == 0 else loss / (1 if tokens is None else tokens)

    module = AUTOMODEL[name]()
    check(lambda x: module(x * 1, t, mask, tokens), wanted, x, torch.tensor(-2.5))
    assert t.equal(before)
    y = x.detach() * 1
    loss = module(y.requires_grad_(), t)
    loss.backward()
    assert y.equal(x) != ("in place" in name)


@pytest.mark.parametrize("name", ["masked", "chunked"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_automodel_reductions(rng, name, reduction):
    x, t = logits(rng, (4, 6, 71)), targets(rng, (4, 6), 71)

    def wanted(x):
        loss = rows(x, t)
        return loss.flatten() if reduction == "none" else loss.sum() / (t != -100).sum()

    module = AUTOMODEL[name](reduction=reduction)
    check(lambda x: module(x, t), wanted, x)
    with pytest.raises(ValueError, match="reduction is 'sum'"):
        module(x, t, num_label_tokens=3)


def test_automodel_ignore_index_and_weights(rng):
    x, t = logits(rng, (4, 6, 71)), targets(rng, (4, 6), 71)
    weights = torch.from_numpy(rng.random((4, 6)))
    for module in (compat.MaskedCrossEntropy(ignore_index=7), compat.ChunkedCrossEntropy(ignore_index=7)):
        t[1, :3] = 7
        check(lambda x, module=module: module(x, t), lambda x: (rows(x, t) * (t != 7)).sum(), x)
    module = compat.MaskedCrossEntropy()
    check(lambda x: module(x, t, loss_weights=weights), lambda x: (rows(x, t) * weights).sum(), x)


def test_automodel_refusals(rng):
    x, t = logits(rng, (4, 6, 71)), targets(rng, (4, 6), 71)
    for make, message in (
        (lambda: compat.MaskedCrossEntropy(chunk_size=0), "greater than zero; got 0"),
        (lambda: compat.MaskedCrossEntropy(chunk_size=8, reduction="mean"), "reduction='sum'"),
        (lambda: compat.MaskedCrossEntropy(chunk_size=8, fp32_upcast=False), "fp32_upcast=True"),
        (lambda: compat.ChunkedCrossEntropy(chunk_len=-1), "greater than zero"),
        (lambda: compat.MaskedCrossEntropy(chunk_size=8)(x, t.flatten()), r"logits.shape\[:-1\] == labels.shape"),
        (lambda: compat.MaskedCrossEntropy(chunk_size=8)(x, t, t.flatten()), "mask.shape == labels.shape"),
        (lambda: compat.MaskedCrossEntropy()(x, t[1:]), "labels: shape"),
        (lambda: compat.MaskedCrossEntropy()(x, t, loss_weights=torch.ones(24)), "loss_weights.shape"),
        (
            lambda: compat.MaskedCrossEntropy(reduction="mean")(x, t, loss_weights=torch.ones(4, 6)),
            "loss_weights is only",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    loss = compat.MaskedCrossEntropy(chunk_size=8, inplace_grad=True)(x * 1, t)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="runs once"):
        loss.backward()


# ---- transformers ----


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("items", [None, 17, "tensor"])
def test_causal_lm(rng, device, items):
    x, labels = logits(rng, (3, 8, 71), torch.bfloat16, device), targets(rng, (3, 8), 71, device=device)
    items = torch.tensor(17) if items == "tensor" else items

    def wanted(x):
        loss = rows(x[:, :-1], labels[:, 1:])
        return loss.sum() / ((labels[:, 1:] != -100).sum() if items is None else 17)

    options = {"overwrite_logits": True, "output_router_logits": False}
    check(lambda x: compat.ForCausalLMLoss(x * 1, labels, 71, items, **options), wanted, x)
    shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
    check(lambda x: compat.ForCausalLMLoss(x, None, 71, items, shift_labels=shifted), wanted, x)
    nothing = torch.full_like(labels, -100)
    assert compat.ForCausalLMLoss(x, nothing, 71) == 0
    assert compat.ForCausalLMLoss(x, labels, 71, torch.tensor(0)) == 0
    with pytest.raises(libxent.InvalidArgument, match="neither"):
        compat.ForCausalLMLoss(x, None, 71)


def test_a_model_of_transformers(rng):
    transformers = pytest.importorskip("transformers", minversion="4.46")
    torch.manual_seed(int(rng.integers(2**31)))
    config = transformers.LlamaConfig(
        vocab_size=101, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    ids = torch.from_numpy(rng.integers(0, 101, (2, 12)))
    labels = ids.masked_fill(torch.from_numpy(rng.random((2, 12)) < 0.3), -100)

    def step():
        model.zero_grad()
        loss = model(input_ids=ids, labels=labels, num_items_in_batch=torch.tensor(11)).loss
        loss.backward()
        return loss.detach(), [p.grad.clone() for p in model.parameters()]

    loss, grads = step()
    assert compat.patch_causal_lm(model, overwrite_logits=True) is model
    assert model.loss_function.options == {"overwrite_logits": True}
    got, ours = step()
    torch.testing.assert_close(got, loss, rtol=2e-6, atol=2e-6)
    for mine, theirs in zip(ours, grads):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    smaller = compat.patch_causal_lm(model, softcap=1.0)(input_ids=ids, labels=labels).logits
    assert smaller.shape == (2, 12, 101)
    with pytest.raises(TypeError, match="'reduction'"):
        compat.patch_causal_lm(model, reduction="sum")
    with pytest.raises(TypeError, match="loss_function"):
        compat.patch_causal_lm(torch.nn.Linear(1, 1))


# ---- Liger ----


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "lse_square_scale": 1e-2, "softcap": 8.0}], ids=str)
def test_liger(rng, device, reduction, options):
    x, t = logits(rng, (30, 71), torch.bfloat16, device), targets(rng, (30,), 71, device=device)
    upstream = torch.from_numpy(rng.standard_normal(30 if reduction == "none" else ())).to(device)

    def parts(x):
        z = options["softcap"] * torch.tanh(x / options["softcap"]) if "softcap" in options else x
        square = options.get("lse_square_scale", 0.0) * torch.where(t != -100, z.logsumexp(-1), 0) ** 2
        return rows(z, t, options.get("label_smoothing", 0.0)) + square, square

    def reduced(loss):
        return loss if reduction == "none" else loss.sum() / ((t != -100).sum() if reduction == "mean" else 1)

    plain = compat.LigerCrossEntropyLoss(reduction=reduction, **options)
    check(lambda x: plain(x, t), lambda x: reduced(parts(x)[0]), x, upstream)
    module = compat.LigerCrossEntropyLoss(
        reduction=reduction,
        return_z_loss=True,
        return_token_accuracy=True,
        return_predicted_tokens=True,
        overwrite_logits=True,
        **options,
    )
    double = x.detach().double()
    total, square = parts(double)
    got = module(x * 1, t)
    torch.testing.assert_close(got.loss.double(), reduced(total), rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(got.z_loss.double(), reduced(square), rtol=2e-5, atol=2e-6)
    right = ((double.argmax(-1) == t) & (t != -100)).double()
    right = right if reduction == "none" else right.sum() / (t != -100).sum()
    torch.testing.assert_close(got.token_accuracy.double(), right)
    assert got.predicted_tokens.equal(torch.where(t == -100, -1, double.argmax(-1)))
    assert got.loss.requires_grad and not got.z_loss.requires_grad
    empty = module(x, torch.full_like(t, -100))
    assert not empty.loss.any() and not empty.z_loss.any() and not empty.token_accuracy.any()


def test_liger_class_weights_and_refusals(rng):
    x, t, weight = logits(rng, (30, 71)), targets(rng, (30,), 71), torch.from_numpy(rng.random(71)).float()
    picked = torch.where(t >= 0, weight.double()[t.clamp(0)], 0)
    module = compat.LigerCrossEntropyLoss(weight)
    check(lambda x: module(x, t), lambda x: (rows(x, t) * picked).sum() / picked.sum(), x)
    t[t == -100] = -1
    got = compat.liger_cross_entropy(x, t, ignore_index=-1, reduction="none", return_token_accuracy=True)
    assert not got.token_accuracy[t == -1].any()
    t = t.clamp(0)
    for reduction in ("mean", "sum", "none"):
        options = {"reduction": reduction, "return_token_accuracy": True, "return_z_loss": True}
        got = compat.liger_cross_entropy(x, t, ignore_index=None, lse_square_scale=1e-2, **options)
        want = compat.liger_cross_entropy(x, t, lse_square_scale=1e-2, **options)  # no label is -100
        assert got.loss.equal(want.loss) and got.token_accuracy.equal(want.token_accuracy)
        assert got.z_loss.equal(want.z_loss)
    for make, message in (
        (lambda: compat.LigerCrossEntropyLoss(label_smoothing=1.5), "between 0.0 and 1.0"),
        (lambda: compat.LigerCrossEntropyLoss(reduction="avg"), "one of 'mean', 'sum', or 'none'"),
        (lambda: compat.LigerCrossEntropyLoss(softcap=0.0), "softcap"),
        (lambda: compat.liger_cross_entropy(x, t, weight, lse_square_scale=1e-3), "lse_square_scale"),
        (lambda: compat.liger_cross_entropy(x, t, weight, label_smoothing=0.1), "label_smoothing"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
