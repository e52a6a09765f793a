"""Small models, deterministic gradients and whole trajectories, shared by the tests."""

import contextlib
import functools
import re

import equinox as eqx
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxtyping import config as jaxtyping_config

import slalom as sl

SLOW, EXHAUSTIVE = pytest.mark.slow, pytest.mark.exhaustive
ONE_IN = 32
"""How many cases of a product there are for each one in CI."""


def slow_except(values, *everyday):
    """Values to parametrize with: all but those named run in CI."""
    return [pytest.param(v, marks=() if v in everyday else SLOW) for v in values]


def sampled(values, *everyday, turn=0):
    """Values of a product: those named run every day, one in `ONE_IN` of the others in CI.

    `turn` says where it begins. The others are exhaustive.
    """
    kept = [v for v in values if v not in everyday]
    chosen = kept[turn::ONE_IN]
    marks = [() if v in everyday else SLOW if v in chosen else EXHAUSTIVE for v in values]
    return [pytest.param(v, marks=m) for v, m in zip(values, marks, strict=True)]


def transforms_in(value, kind=sl.AbstractTransform):
    """All transforms of a kind that a transform consists of, itself included, outermost first."""
    if isinstance(value, kind):
        yield value
    if isinstance(value, eqx.Module):
        value = vars(value)
    for inner in value.values() if isinstance(value, dict) else value:
        if isinstance(inner, eqx.Module | dict | tuple | list):
            yield from transforms_in(inner, kind)


class ScaleByTemperature(sl.AbstractStatelessTransform):
    """Needs an entry of its own in the context, and no parameters."""

    needs = ("temperature",)

    def apply(self, updates, params, context):
        temperature = context.extra["temperature"]
        return jax.tree.map(lambda u: u * temperature, updates)


class Falling(sl.schedules.AbstractStatefulSchedule):
    """Is 0.5 · 0.75ⁿ in step n, and needs nothing of the context."""

    def init(self):
        return jnp.ones(())

    def update(self, state, context):
        return state * 0.75

    def value(self, state):
        return 0.5 * state


def drawn(*strategies, examples, **settings):
    """Runs a test on examples that Hypothesis draws, the same ones in every run."""

    def decorate(test):
        repeat = hypothesis.settings(
            max_examples=examples, deadline=None, derandomize=True, **settings
        )
        return repeat(hypothesis.given(*strategies)(test))

    return decorate


def nested_dict(key, dtype=None):
    """Parameters as a dict of dicts and a list: a matrix, a vector and a scalar."""
    keys = jax.random.split(key, 3)
    return {
        "dense": {
            "weight": jax.random.normal(keys[0], (3, 2), dtype),
            "bias": jax.random.normal(keys[1], (2,), dtype),
        },
        "scales": [jax.random.normal(keys[2], (), dtype)],
    }


def mlp(key=0, *, depth=1, **options):
    """An Equinox model with hidden layers: callable, with functions and ints inside."""
    key = jax.random.key(key) if isinstance(key, int) else key
    return eqx.nn.MLP(2, 1, 4, depth, key=key, **options)


def mean_square(model, x, y):
    """A mean over a batch."""
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


class Counting:
    """A function that counts how often Python runs it, which is how often it is traced."""

    def __init__(self, function):
        functools.update_wrapper(self, function)
        self.traces = 0

    def __call__(self, *args, **keywords):
        self.traces += 1
        return self.__wrapped__(*args, **keywords)


def params_of(model):
    """The floating and complex arrays of a model, with `None` at everything else."""
    return eqx.filter(model, eqx.is_inexact_array)


def gradients(model, n, seed=0, dtype=None):
    """A fixed sequence of `n` gradients, stacked on a first axis: normal, so nowhere zero."""
    random = np.random.default_rng(seed)

    def normal(x):
        drawn = random.standard_normal((n, *x.shape))
        if jnp.iscomplexobj(x):
            drawn = drawn + 1j * random.standard_normal((n, *x.shape))
        return jnp.asarray(drawn, x.dtype if dtype is None else dtype)

    return jax.tree.map(normal, params_of(model))


def at(tree, i):
    """An entry of each array along its first axis."""
    return jax.tree.map(lambda x: x[i], tree)


def trajectory(step, params, state, inputs):
    """Runs `step(params, state, *input) -> (params, state)` in one `lax.scan`.

    `inputs` is a tuple of trees with a first axis of time. Returns the parameters after each
    step, stacked, and the last state. Called outside of `jax.jit` it compiles once.
    """

    def body(carry, given):
        carry = step(*carry, *given)
        return carry, carry[0]

    (_, state), history = jax.lax.scan(body, (params, state), inputs)
    return history, state


def slalom_trajectory(tx, model, grads, **known):
    """The parameters after each `opt.step`, and the last optimizer.

    `tx` is a transform, or an optimizer already bound to `model`. `known` holds what else each
    step is given, stacked: `value`, `weight` and so on.
    """
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def step(params, opt, grads, known):
        model, opt = opt.step(eqx.combine(params, static), grads, **known)
        return params_of(model), opt

    return trajectory(step, params, bound(tx, model), (grads, known))


def bound(tx, model):
    """An optimizer of the model, which `tx` may already be."""
    return tx if isinstance(tx, sl.Optimizer) else sl.Optimizer(tx, model)


def after_steps(tx, n, model, grads, **known):
    """The model and the optimizer after `n` calls of `opt.step`."""
    opt = bound(tx, model)
    for _ in range(n):
        model, opt = opt.step(model, grads, **known)
    return model, opt


def after_training(step, tx, n, model, *batch, **known):
    """What the last of `n` calls of a training step returns."""
    opt = bound(tx, model)
    for _ in range(n):
        model, opt, loss = step(model, opt, *batch, **known)
    return model, opt, loss


@contextlib.contextmanager
def unchecked():
    """Without checks of types, which take most of the time of tracing."""
    before = jaxtyping_config.jaxtyping_disable
    jaxtyping_config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping_config.update("jaxtyping_disable", before)


@contextlib.contextmanager
def lenient():
    """The promotion rules that other libraries are written for."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def updates_of(tx, grads, params=None):
    """The updates of a transform for gradients stacked on a first axis; parameters stay."""
    if params is None:
        params = jax.tree.map(lambda g: jnp.zeros_like(g[0]), grads)

    def step(state, given):
        n, g = given
        updates, state = tx.update(g, state, params, sl.Context(step=n))
        return state, updates

    clock = jnp.arange(len(jax.tree.leaves(grads)[0]))
    return jax.lax.scan(step, tx.init(params), (clock, grads))[1]


def optax_trajectory(tx, model, grads, **known):
    """The parameters after each update and `optax.apply_updates`, and the last state.

    `known` holds what else each update is given, stacked.
    """

    def step(params, state, grads, known):
        with lenient():
            updates, state = tx.update(grads, state, params, **known)
            return optax.apply_updates(params, updates), state

    params = params_of(model)
    with lenient():
        return trajectory(step, params, tx.init(params), (grads, known))


def kind_of(tree):
    """Structure, and shapes, dtypes, weak types and shardings of all arrays."""
    leaves, structure = jax.tree.flatten(tree)
    arrays = [x for x in leaves if eqx.is_array(x)]
    return structure, [(x.shape, x.dtype, x.weak_type, x.sharding) for x in arrays]


def distance(history, other):
    """The greatest difference of two trees of equal structure, over all leaves."""
    pairs = zip(jax.tree.leaves(history), jax.tree.leaves(other), strict=True)
    wide = [(np.asarray(a), np.asarray(b)) for a, b in pairs]
    wide = [(a.astype(_widest(a)), b.astype(_widest(b))) for a, b in wide]
    return max(float(np.max(np.abs(a - b))) for a, b in wide)


def _widest(x):
    return np.complex128 if np.iscomplexobj(x) else np.float64


def assert_same_bits(left, right):
    """Equal structure, dtypes and bits; keys by their words, and functions by identity."""
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        if not eqx.is_array_like(a):
            assert a is b
            continue
        a, b = jnp.asarray(a), jnp.asarray(b)
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), f"{a} is not {b}"


def assert_close(ours, theirs, **tolerance):
    """Two trees of equal structure whose arrays are close, as NumPy says."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        if eqx.is_array_like(a):
            np.testing.assert_allclose(a, b, **tolerance)


def assert_same_path(ours, theirs, start, of_distance):
    """Two trajectories apart by at most a fraction of the way they went from `start`."""
    moved = distance(theirs, jax.tree.map(lambda h, s: jnp.broadcast_to(s, h.shape), theirs, start))
    apart = distance(ours, theirs)
    assert apart <= of_distance * moved, f"{apart / moved:.2e} of the distance {moved:.3g} apart"


def loss_of_any(params):
    """A loss of any tree of arrays, with gradients near 0.5."""
    leaves = [x.real.astype(float) for x in jax.tree.leaves(params) if eqx.is_inexact_array(x)]
    return sum((jnp.sum(0.5 * x + 0.05 * x**2) for x in leaves), jnp.ones(()))


def residual_of_any(params, x):
    """Two residuals of any tree of arrays."""
    leaves = [v for v in jax.tree.leaves(params) if eqx.is_inexact_array(v)]
    real = sum((jnp.sum(v.real.astype(float)) for v in leaves), jnp.zeros(()))
    imaginary = sum((jnp.sum(v.imag.astype(float)) for v in leaves), jnp.zeros(()))
    return jnp.stack([x * real - 1, x * imaginary + jnp.tanh(real)])


def known(params, grads):
    """The optional arguments of `opt.step`; few rules look at them."""
    residuals = sl.LeastSquares(residual_of_any).on(jnp.linspace(0.5, 1, 3))
    # The row of `sl.contrib.QKClip` reads arrays of this shape as queries and keys.
    layers = sum(np.shape(x) == (2, 3) for x in jax.tree.leaves(params))
    return {
        "value": loss_of_any(params),
        "grad": grads,
        "value_fn": loss_of_any,
        "residuals": residuals,
        "terms": sl.combine.Terms(jnp.array([1.0, 2.0]), jnp.array([[2.0, -1.0], [-1.0, 3.0]])),
        "max_logits": jnp.full((layers, 1), 200.0),
    }


def compiled_step(tx, params):
    """The program of a step that reuses the memory of parameters and optimizer."""
    step = jax.jit(lambda p, opt, g: opt.step(p, g), donate_argnums=(0, 1))
    return step.lower(params, sl.Optimizer(tx, params), params).compile()


def kernels(tx, shapes):
    """How many different fused loops XLA makes of a step on parameters of these shapes."""
    params = {f"w{i}": jax.ShapeDtypeStruct(shape, jnp.float32) for i, shape in enumerate(shapes)}
    text = compiled_step(tx, params).as_text()
    bodies = re.findall(r"^%fused_computation.*?^}", text, re.MULTILINE | re.DOTALL)
    names = r", metadata=\{.*?\}|%[\w.-]+|[\w.]+:|/\*.*?\*/"
    return len({re.sub(names, "", body) for body in bodies})


def outside_of_conditionals(text):
    """The entry computation of a program and everything that it calls outside of conditionals."""
    bodies = dict(re.findall(r"^%?([\w.\-]+) \([^\n]*\{\n(.*?)^\}", text, re.M | re.S))
    seen, todo, out = set(), [text[text.index("ENTRY") :]], []
    while todo:
        body = todo.pop()
        out.append(body)
        for line in body.splitlines():
            if " conditional(" in line:
                continue
            for name in re.findall(r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)", line):
                if name not in seen and name in bodies:
                    seen.add(name)
                    todo.append(bodies[name])
    # Names in metadata would count as uses otherwise.
    return re.sub(r"metadata=\{[^}]*\}", "", "\n".join(out))


def public(name, *default):
    """What has this name in `sl` or in `sl.contrib`."""
    return getattr(sl if name in vars(sl) else sl.contrib, name, *default)
