"""Rules and recipes walk the paths that torch.optim and pytorch-optimizer walk."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl
from helpers import assert_close, gradients, nested_dict, slalom_trajectory

STEPS = 20
pytestmark = pytest.mark.slow


def torch_trajectory(make, options, params, grads):
    """The parameters after each step of an optimizer for PyTorch, stacked."""
    torch = pytest.importorskip("torch", reason="PyTorch is in no extra")
    leaves, structure = jax.tree.flatten(params)
    tensors = [torch.nn.Parameter(torch.tensor(np.asarray(x))) for x in leaves]
    optimizer = make(tensors, **options)
    history = []
    for n in range(STEPS):
        for tensor, g in zip(tensors, jax.tree.leaves(grads), strict=True):
            tensor.grad = torch.tensor(np.asarray(g[n]))
        optimizer.step()
        history.append([x.detach().numpy().copy() for x in tensors])
    return structure.unflatten([np.stack(column) for column in zip(*history, strict=True)])


NAG = sl.sgd(0.1, 0.9, nesterov=True)
RPROP = sl.rprop(0.1, 0.6, 1.5, 0.05, 0.2)
rmsprop = functools.partial(sl.rmsprop, 0.01, 0.9, eps_in_sqrt=False)
TORCH = [
    ("SGD", NAG, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    # Weight decay as a part of the gradient.
    ("SGD", sl.AddDecayedWeights(0.1) | sl.sgd(0.1), {"lr": 0.1, "weight_decay": 0.1}),
    ("Adam", sl.AddDecayedWeights(0.1) | sl.adam(0.01), {"lr": 0.01, "weight_decay": 0.1}),
    ("Adam", sl.adam(0.01, 0.8, 0.95, 1e-3), {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-3}),
    ("AdamW", sl.adamw(0.01, weight_decay=0.1), {"lr": 0.01, "weight_decay": 0.1}),
    ("Adamax", sl.adamax(0.01, 0.8, 0.9, 1e-2), {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-2}),
    # PyTorch divides the root, not what it adds ε to, by 1 − β₂ᵗ: ε counts for more there.
    ("RAdam", sl.radam(0.01), {"lr": 0.01}),
    ("RAdam", sl.radam(0.01, 0.8, 0.9, 1e-12), {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-12}),
    ("Adagrad", sl.adagrad(0.1, 0.0, 0.0), {"lr": 0.1}),
    ("Adadelta", sl.adadelta(0.5, 0.8, 1e-5), {"lr": 0.5, "rho": 0.8, "eps": 1e-5}),
    ("Adadelta", sl.adadelta(weight_decay=0.1), {"lr": 1.0, "weight_decay": 0.1}),
    ("Rprop", RPROP, {"lr": 0.1, "etas": (0.6, 1.5), "step_sizes": (0.05, 0.2)}),
    ("RMSprop", rmsprop(momentum=0.9), {"lr": 0.01, "alpha": 0.9, "momentum": 0.9}),
    ("RMSprop", rmsprop(centered=True), {"lr": 0.01, "alpha": 0.9, "centered": True}),
]


@pytest.mark.parametrize(("rule", "ours", "options"), TORCH, ids=[row[0] for row in TORCH])
def test_same_path_as_torch(rule, ours, options):
    torch = pytest.importorskip("torch", reason="PyTorch is in no extra")
    params = nested_dict(jax.random.key(0))
    grads = gradients(params, STEPS)
    found, _ = slalom_trajectory(ours, params, grads)
    theirs = torch_trajectory(getattr(torch.optim, rule), options, params, grads)
    assert_close(found, theirs, rtol=1e-5, atol=1e-6)


PACKAGE = [
    ("MADGRAD", sl.contrib.madgrad(0.05 + 1e-6), {"lr": 0.05}),
    ("LaProp", sl.contrib.laprop(0.05, 0.8, 0.95), {"lr": 0.05, "betas": (0.8, 0.95)}),
    ("MARS", sl.contrib.mars(0.05, weight_decay=0.1), {"lr": 0.05, "weight_decay": 0.1}),
    ("MARS", sl.contrib.mars(0.05, 0.8, 0.9, 0.3), {"lr": 0.05, "betas": (0.8, 0.9), "gamma": 0.3}),
    ("StableAdamW", sl.stable_adamw(0.05), {"lr": 0.05, "weight_decay": 0.2}),
    (
        "StableAdamW",
        sl.stable_adamw(0.05, 0.5, 0.9, 0.1, 0.0),
        {"lr": 0.05, "betas": (0.5, 0.9), "eps": 0.1, "weight_decay": 0.0},
    ),
]


@pytest.mark.parametrize(("rule", "ours", "options"), PACKAGE, ids=[row[0] for row in PACKAGE])
def test_same_path_as_pytorch_optimizer(rule, ours, options, x64):
    package = pytest.importorskip("pytorch_optimizer", reason="pytorch-optimizer is in no extra")
    params = nested_dict(jax.random.key(0))
    growth = 1.0 + jnp.arange(STEPS) ** 2 / 40
    if rule == "StableAdamW":  # which clips in some steps where gradients grow
        options = options | {"kahan_sum": False}
    else:
        # The first change of MARS is 0 in Slalom, and the gradient there: after zeros, both are 0.
        growth = growth.at[0].set(0.0)
    if rule == "MARS":
        options = options | {"optimize_1d": True}
    grads = jax.tree.map(
        lambda g: g * growth.reshape(STEPS, *[1] * (g.ndim - 1)), gradients(params, STEPS)
    )
    found, _ = slalom_trajectory(ours, params, grads)
    expected = torch_trajectory(getattr(package, rule), options, params, grads)
    # The package computes LaProp's step sizes in float32, and corrects the bias of ε in MARS.
    rtol = 1e-6 if rule in ("LaProp", "MARS") else 1e-9
    assert_close(found, expected, rtol=rtol, atol=rtol / 10)


def test_adam_mini_divides_by_heads_as_pytorch_optimizer_does(x64):
    torch = pytest.importorskip("torch", reason="PyTorch is in no extra")
    package = pytest.importorskip("pytorch_optimizer", reason="pytorch-optimizer is in no extra")
    attention = eqx.nn.MultiheadAttention(2, 4, key=jax.random.key(0))
    grads = gradients(attention, STEPS)
    found, _ = slalom_trajectory(sl.contrib.adam_mini(0.05, weight_decay=0.1), attention, grads)

    def make(tensors):
        layer = torch.nn.Linear(4, 4, bias=False, dtype=torch.float64)
        layer.weight = tensors[0]
        model = torch.nn.ModuleDict({"wq": layer})
        return package.AdamMini(model, 0.05, num_embeds=4, num_heads=2)

    weight, own_grads = attention.query_proj.weight, grads.query_proj.weight
    expected = torch_trajectory(make, {}, weight, own_grads)
    # The package computes in float32.
    assert_close(found.query_proj.weight, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", [(3, 5), (5, 3)])
def test_galore_projects_the_shorter_side_as_pytorch_optimizer_does(shape, x64):
    package = pytest.importorskip("pytorch_optimizer", reason="pytorch-optimizer is in no extra")
    start = jnp.asarray(np.random.default_rng(1).standard_normal(shape))
    grads = gradients(start, STEPS)
    # Once in all of these steps, since the package has another rhythm.
    found, opt = slalom_trajectory(sl.contrib.galore(0.05, 2, scale=0.7), start, grads)
    state = opt.state_of(sl.contrib.ScaleByGalore)
    assert [x.shape for x in jax.tree.leaves((state.projector, state.mu))] == [(1, 3, 2), (1, 2, 5)]

    def make(tensors):
        group = {"params": tensors, "rank": 2, "update_proj_gap": 200, "scale": 0.7}
        group["projection_type"] = "std"
        return package.GaLore([group], lr=0.05, betas=(0.9, 0.999), eps=1e-12)

    assert_close(found, torch_trajectory(make, {}, start, grads), rtol=1e-5, atol=1e-6)
