"""Buffers for small leaves: the same steps as leaf by leaf."""

import cProfile
import pstats

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl
from helpers import (
    assert_close,
    compiled_step,
    gradients,
    kernels,
    kind_of,
    nested_dict,
    transforms_in,
    unchecked,
)
from table import RULES

KEY = jax.random.key(0)

MIXED = {
    "a": jnp.array([[0.5, -1.0], [2.0, 0.25]], jnp.bfloat16),
    "b": jnp.array([1.0, -2.0, 0.5]),
    "c": jnp.array(0.75, jnp.bfloat16),
    "empty": jnp.zeros((0, 2), jnp.float16),
    "hole": None,
    "z": jnp.array([1 + 2j, -1j], jnp.complex64),
}

ELEMENTWISE = {
    name: tx for name, tx in RULES.items() if all(part.elementwise for part in transforms_in(tx))
}


BY_SUMS = {
    name: tx
    for name, tx in RULES.items()
    if name not in ELEMENTWISE
    and all(part.elementwise or part.over == "sums" for part in transforms_in(tx))
    and not any(part.selectors() for part in transforms_in(tx))
}


def test_rules_say_whether_they_may_be_joined_and_buffers_share_kernels():
    assert {name.split(",")[0] for name in BY_SUMS} == {
        *("ClipByGlobalNorm", "NormalizeByUpdateNorm", "ScaleByDAdaptAdam", "ScaleByDog"),
        *("ScaleByDowg", "ScaleByMomo", "ScaleByMomoAdam", "ScaleByPolyak", "ScaleByProdigy"),
        "ZClip",
    }
    assert {name.split(",")[0] for name in ELEMENTWISE} == {
        *("AddDecayToInitialParams", "AddDecayedWeights", "ApplyEvery", "Clip", "Ema"),
        *("Identity", "KeepParamsNonnegative", "Scale", "ScaleByAcprop", "ScaleByAdadelta"),
        *("ScaleByAdam", "ScaleByAdamax", "ScaleByAdan", "ScaleByAdemamix", "ScaleByAdopt"),
        *("ScaleByAmsgrad", "ScaleByBelief", "ScaleByCocob", "ScaleByFromage", "ScaleByLaprop"),
        *("ScaleByLearningRate", "ScaleByLearningRateWithCorrectedDecay", "ScaleByLion"),
        *("ScaleByMadgrad", "ScaleByOptimisticGradient", "ScaleByRadam", "ScaleByRms"),
        *("ScaleByRprop", "ScaleByRss", "ScaleBySchedule", "ScaleBySign"),
        *("ScaleBySimplifiedAdemamix", "ScaleByStddev", "ScaleByYogi", "SetToZero"),
        *("SubtractDecayedWeights", "Trace"),
    }

    assert repr(sl.sgd(0.1).flatten()).endswith(".flatten()")
    assert repr(sl.sgd(0.1).flatten(max_size=100)).endswith(".flatten(100)")
    with pytest.raises(ValueError, match="max_size must be at least 1"):
        sl.sgd(0.1).flatten(max_size=0)

    # After a link in front every update is float32, also of bfloat16 parameters.
    params = {k: MIXED[k] for k in "abc"}
    tx = sl.Clip(0.2) | sl.Trace(0.9).flatten()
    state = tx.init(params)
    updates, after = tx.update(jax.tree.map(jnp.ones_like, params), state)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert {u.dtype.name for u in jax.tree.leaves(updates)} == {"float32"}
    assert [u.shape for u in jax.tree.leaves(updates)] == [(2, 2), (3,), ()]

    tx = sl.adamw(1e-3).flatten()
    assert kernels(tx, [(64,)] * 8) == kernels(tx, [(64,)] * 4)


@pytest.mark.slow
def test_every_rule_gives_in_buffers_what_it_gives_in_leaves():
    model, grads = nested_dict(KEY), gradients(nested_dict(KEY), 3)
    allowed = ELEMENTWISE | BY_SUMS

    def updates_of(rule):
        def step(state, given):
            g, n = given
            now = sl.Context(step=n, value=jnp.float32(0.7))
            return rule.update(g, state, model, now)[::-1]

        steps = jnp.arange(3, dtype=jnp.int32)
        return jax.lax.scan(step, rule.init(model), (grads, steps))[1]

    forms = {"leaves": lambda tx: tx, "buffers": lambda tx: tx.flatten()}
    paths = jax.jit(
        lambda: {
            (name, form): updates_of(wrap(tx))
            for name, tx in allowed.items()
            for form, wrap in forms.items()
        }
    )()
    for name in allowed:
        leaves, buffers = paths[name, "leaves"], paths[name, "buffers"]
        assert kind_of(leaves) == kind_of(buffers), name
        # A bound that adapts is a small difference of sums, which are rounded in another order.
        rtol = 1e-4 if name.endswith("adapt_lower_bound") else 1e-5
        assert_close(leaves, buffers, rtol=rtol, atol=1e-7, err_msg=name)


def shapes_in(buffers):
    return {name: (x.dtype.name, x.shape) for name, x in buffers.together.items()}


@pytest.mark.parametrize("max_size", [None, 3])
def test_dtypes_are_kept_and_each_has_one_buffer_beside_large_leaves(max_size):
    tx = sl.adamw(0.1, weight_decay=0.1)
    flat = tx.flatten() if max_size is None else tx.flatten(max_size=max_size)
    opt, plain = sl.Optimizer(flat, MIXED), sl.Optimizer(tx, MIXED)
    mu, nu = opt.state_of("scale_by_adam").mu, opt.state_of("scale_by_adam").nu
    assert shapes_in(mu) == {
        "bfloat16": ("bfloat16", (5,) if max_size is None else (1,)),
        "complex64": ("complex64", (2,)),
        "float16": ("float32", (0,)),
        "float32": ("float32", (3,)),
    }
    assert {x.dtype.name for x in nu.together.values()} == {"float32"}
    if max_size is not None:
        assert jax.tree.leaves(jax.tree.map(jnp.shape, mu.apart)) == [2, 2]
        assert mu.apart["a"].dtype == jnp.bfloat16

    def both(models, opts, grads):
        return [opt.step(model, grads) for model, opt in zip(models, opts, strict=True)]

    grads = jax.tree.map(lambda p: p * 0.5, MIXED)
    models, opts, step = (MIXED, MIXED), (opt, plain), jax.jit(both)
    for _ in range(3):
        models, opts = zip(*step(models, opts, grads), strict=True)
    assert kind_of(models[0]) == kind_of(models[1])
    assert_close(*jax.tree.map(np.asarray, models), rtol=1e-6)


@pytest.mark.slow
def test_buffers_hold_a_bounded_number_of_leaves_and_trace_no_more():
    # XLA compiles a concatenation in a time that grows with the square of its operands.
    params = {f"w{i:03}": jnp.full(2, i, jnp.float32) for i in range(600)}
    tx = sl.Trace(0.9).flatten()
    with unchecked():
        updates, state = jax.jit(lambda p: tx.update(p, tx.init(p)))(params)
    assert shapes_in(state.inner.trace) == {
        "float32": ("float32", (512,)),
        "float32_2": ("float32", (512,)),
        "float32_3": ("float32", (176,)),
    }
    # The first update is the gradient, each in its place.
    for i, u in enumerate(updates.values()):
        assert u.tolist() == [i, i]

    clipped(8)  # what is traced once
    (few, of_few), (many, of_many) = clipped(100), clipped(200)
    assert of_many <= 2.1 * of_few
    assert len(many.eqns) <= 2.1 * len(few.eqns)

    def fusions(number):
        params = {f"w{i}": jax.ShapeDtypeStruct((8,), jnp.float32) for i in range(number)}
        tx = (sl.ClipByGlobalNorm(1.0) | sl.adamw(1e-3)).flatten()
        return compiled_step(tx, params).as_text().count(" fusion(")

    assert fusions(40) - fusions(20) == 20


class ScaleByGiven(sl.AbstractStatelessTransform):
    over = "number"

    def apply(self, updates, params, context):
        sensitivity, grad = context.per_param["sensitivity"], context.grad
        value = context.value_fn(params)
        return jax.tree.map(lambda u, s, g: u * s + g * value, updates, sensitivity, grad)


def clipped(number):
    """One step of many leaves as a program, and the number of calls in Python that trace it."""
    params = {f"w{i:04}": jax.ShapeDtypeStruct((64,), jnp.float32) for i in range(number)}
    opt = sl.Optimizer((sl.ClipByGlobalNorm(1.0) | sl.adamw(1e-3)).flatten(), params)
    profile = cProfile.Profile()
    step = jax.make_jaxpr(lambda p, opt, g: opt.step(p, g))
    program = profile.runcall(step, params, opt, params)
    return program, pstats.Stats(profile).total_calls


def test_the_context_is_joined_and_other_shapes_and_resets_are_refused():
    params = {"w": jnp.array([[1.0, 2.0]]), "b": jnp.array(3.0)}
    grads = jax.tree.map(jnp.ones_like, params)
    known = {
        "per_param": {"sensitivity": {"w": jnp.array([[4.0, 5.0]]), "b": jnp.array(6.0)}},
        "grad": params,
        "value_fn": lambda p: p["w"][0, 1] * p["b"],
    }
    tx = ScaleByGiven()
    updates, _ = sl.Optimizer(tx, params).update(params, grads, **known)
    flat, _ = sl.Optimizer(tx.flatten(), params).update(params, grads, **known)
    assert_close(flat, updates, rtol=1e-7)
    np.testing.assert_allclose(flat["w"], [[10.0, 17.0]])

    params = nested_dict(KEY)
    tx = sl.ClipByGlobalNorm(1.0) | sl.adamw(0.1, weight_decay=0.25).flatten()
    opt = sl.Optimizer(tx, params)
    assert "flatten.scale_by_learning_rate.learning_rate" in opt.hyperparams
    row = opt.describe(params).to_dict()["dense.weight"]
    assert row["learning_rate"] == jnp.float32(0.1)
    assert row["weight_decay"] == jnp.float32(0.25)
    assert row["transform"].startswith("clip_by_global_norm | flatten.scale_by_adam | flatten.add")
    params = {"a": jnp.ones((3, 2)), "b": jnp.ones(4), "large": jnp.ones(9000)}
    rows = sl.Optimizer(sl.adam(0.1).flatten(), params).describe(params).to_dict()
    for path, x in params.items():
        assert rows[path]["state_bytes"] == 2 * x.nbytes

    opt = sl.Optimizer(sl.adam(0.1).flatten(), {"w": jnp.ones((2, 3))})
    # Also of equal size.
    for shape in ((2, 2), (3, 2)):
        message = rf"'w' has shape \({shape[0]}, 2\), but .* for shape \(2, 3\)"
        with pytest.raises(ValueError, match=message):
            opt.step({"w": jnp.ones(shape)}, {"w": jnp.ones(shape)})
    opt = sl.Optimizer(sl.adam(0.1).flatten(), nested_dict(KEY))
    with pytest.raises(ValueError, match="shared by several parameters"):
        opt.reset(nested_dict(KEY), where=sl.where.ndim(2))


REFUSED = {
    "clip_by_block_rms": sl.ClipByBlockRms(1.0) | sl.adam(0.1),
    "scale_by_trust_ratio": sl.adam(0.1) | sl.ScaleByTrustRatio(),
    "scale_by_prodigy": sl.prodigy(decay_where=sl.where.ndim(2)),
    "partition": sl.adam(0.1).partition({sl.where.ndim(2): sl.sgd(0.1)}),
    "mask": sl.adamw(0.1, decay_where=sl.where.ndim(2)),
    "every_k.if_finite": sl.adam(0.1).if_finite().every_k(2),
    "outer": sl.adam(0.1).lookahead(2, 0.5),
}


@pytest.mark.parametrize("culprit", REFUSED)
def test_what_needs_a_leaf_is_refused_by_name(culprit):
    with pytest.raises(ValueError, match=r"cannot be used under `\.flatten\(\)`") as error:
        REFUSED[culprit].flatten()
    assert str(error.value) == (
        f"{culprit} cannot be used under `.flatten()`, which takes only links that act on single "
        "elements, or through sums over all of them. Flatten only those, for example "
        "`sl.ClipByBlockRms(1.0) | sl.adam(1e-3).flatten()`, and apply wrappers afterwards, as in "
        "`tx.flatten().if_finite()`."
    )
