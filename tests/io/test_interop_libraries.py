"""Optimizers in the loops of other libraries, and examples of Optax that move as the originals.

Another port is `examples/dqn.py`.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slalom as sl
from helpers import (
    assert_close,
    assert_same_bits,
    gradients,
    lenient,
    mlp,
    optax_trajectory,
    params_of,
    slalom_trajectory,
    trajectory,
)
from slalom.interop import to_optax

x = jnp.linspace(-1, 1, 8).reshape(4, 2)
y = jnp.sin(x.sum(axis=1, keepdims=True))
kernels = sl.where.path("**.kernel")


@pytest.fixture(autouse=True)
def usual_rules():
    """These libraries are written for JAX's default promotion."""
    with lenient():
        yield


def nnx_model():
    nnx = pytest.importorskip("flax.nnx", reason="needs flax: pip install flax")

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(2, 3, rngs=rngs)
            self.second = nnx.Linear(3, 1, rngs=rngs)

        def __call__(self, x):
            return self.second(jnp.tanh(self.first(x)))

    return nnx, Model(nnx.Rngs(0))


def nnx_loss(model):
    return jnp.mean((model(x) - y) ** 2)


def arrays_of(nnx, model):
    return nnx.as_pure(nnx.state(model, nnx.Param))


@pytest.mark.slow
def test_an_nnx_optimizer_steps_as_an_optimizer_of_slalom():
    nnx, model = nnx_model()
    tx = sl.adamw(0.1, decay_where=kernels).average(0.9)
    params = arrays_of(nnx, model)
    graph, _ = nnx.split(model)
    optimizer = nnx.Optimizer(model, to_optax(tx), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        loss, grads = nnx.value_and_grad(nnx_loss)(model)
        optimizer.update(model, grads, value=loss)

    ours = sl.train_step(lambda params: nnx_loss(nnx.merge(graph, params)), donate=False)
    opt = sl.Optimizer(tx, params)
    for _ in range(3):
        step(model, optimizer)
        params, opt, _ = ours(params, opt)
    assert_close(arrays_of(nnx, model), params, rtol=1e-5)

    state = optimizer.opt_state
    average = sl.interop.eval_params(state, nnx.state(model, nnx.Param))
    assert_close(nnx.as_pure(average), opt.eval_params(params), rtol=1e-5)
    # The state has variables, so it is sharded as the parameters are.
    assert isinstance(state.inner_state.average["first"]["kernel"], nnx.OptVariable)
    assert sl.interop.hyperparams(state)["learning_rate"] == np.float32(0.1)

    optimizer.opt_state = sl.interop.with_hyperparams(state, learning_rate=0.0)
    before = arrays_of(nnx, model)
    step(model, optimizer)
    assert_same_bits(arrays_of(nnx, model), before)

    # As nnx calls it, but by hand.
    graph, params = nnx.split(model, nnx.Param)
    grads = jax.grad(lambda params: nnx_loss(nnx.merge(graph, params)))(params)
    tx = to_optax(tx)
    state = tx.init(params)
    updates, after = tx.update(grads, state, params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    optax.apply_updates(params, updates)


def train_state(tx):
    linen = pytest.importorskip("flax.linen", reason="needs flax: pip install flax")
    from flax.training.train_state import TrainState

    model = linen.Dense(1)
    params = model.init(jax.random.key(0), x)["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def linen_grads(state, params):
    return jax.grad(lambda p: jnp.mean((state.apply_fn({"params": p}, x) - y) ** 2))(params)


def linen_step(state):
    return state.apply_gradients(grads=linen_grads(state, state.params))


@pytest.mark.slow
def test_a_train_state_steps_as_an_optimizer_of_slalom():
    tx = sl.ClipByGlobalNorm(1.0) | sl.adamw(sl.schedules.linear(0.1, 0.0, 9), decay_where=kernels)
    state = train_state(optax.chain(optax.identity(), to_optax(tx)))
    params, opt = state.params, sl.Optimizer(tx, state.params)
    step = jax.jit(linen_step)
    for _ in range(3):
        params, opt = opt.step(params, linen_grads(state, params))
        state = step(state)
    assert_close(state.params, params, rtol=1e-5)
    assert sl.interop.hyperparams(state)["learning_rate"] == opt.hyperparams["learning_rate"]


@pytest.mark.slow
def test_flax_saves_and_restores_the_state_by_name():
    serialization = pytest.importorskip("flax.serialization", reason="needs flax")

    tx = to_optax(sl.AddNoise(0.01, 0.55, key=3) | sl.adam(0.1))
    state = linen_step(train_state(tx))
    changed = sl.interop.with_hyperparams(state, learning_rate=0.2)
    names = serialization.to_state_dict(changed.opt_state)
    assert {"scale_by_adam.mu.kernel", "scale_by_learning_rate.learning_rate"} <= names.keys()
    restored = serialization.from_bytes(train_state(tx), serialization.to_bytes(changed))
    assert_same_bits(linen_step(restored).params, linen_step(changed).params)
    assert_same_bits(restored.opt_state, changed.opt_state)
    other = train_state(to_optax(sl.sgd(0.1)))
    with pytest.raises(ValueError, match=r"another transform or other parameters \(missing: \[\]"):
        serialization.from_bytes(other, serialization.to_bytes(changed))


def test_orbax_saves_and_restores_the_state(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint", reason="needs orbax-checkpoint")
    params = {"w": jnp.ones((2, 3)), "b": jnp.zeros(3)}
    tx = to_optax(sl.adamw(0.1))
    _, state = tx.update(params, tx.init(params), params)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", tx.init(params))
    assert_same_bits(restored, state)


@pytest.mark.slow
@pytest.mark.parametrize("jit", [True, False])
def test_optimistix_minimizes(jit):
    optx = pytest.importorskip("optimistix", reason="needs optimistix: pip install optimistix")

    def fn(point, args):
        return jnp.sum((point["a"] - 1.0) ** 2) + (point["b"] + 2.0) ** 2

    def minimum(tx):
        solver = optx.OptaxMinimiser(tx, rtol=1e-4, atol=1e-4)
        start = {"a": jnp.zeros(2), "b": jnp.zeros(())}
        return optx.minimise(fn, solver, start, max_steps=300).value

    run = eqx.filter_jit(minimum) if jit else minimum
    assert_close(run(to_optax(sl.adam(0.1))), run(optax.adam(0.1)), atol=1e-3)
    if jit:  # a rule that uses `value`, `grad` and `value_fn`
        found = run(to_optax(sl.lbfgs()))
        np.testing.assert_allclose(found["b"], -2.0, atol=1e-3)


@pytest.mark.slow
def test_numpyro_infers():
    numpyro = pytest.importorskip("numpyro", reason="needs numpyro: pip install numpyro")
    from numpyro import distributions
    from numpyro.infer import SVI, Trace_ELBO
    from numpyro.infer.autoguide import AutoDelta

    def model(data):
        mean = numpyro.sample("mean", distributions.Normal(0.0, 1.0))
        numpyro.sample("data", distributions.Normal(mean, 1.0), obs=data)

    def run(tx):
        svi = SVI(model, AutoDelta(model), tx, Trace_ELBO())
        result = svi.run(jax.random.key(0), 20, jnp.arange(3.0), progress_bar=False)
        return result.params, result.losses

    assert_close(run(to_optax(sl.adam(0.1))), run(optax.adam(0.1)), rtol=1e-4)


STEPS = 5


def last(history):
    return jax.tree.map(lambda h: h[-1], history)


def by_function(tx, params, grads):
    """The loop of the original in the functional core."""

    def step(params, state, grads, n):
        updates, state = tx.update(grads, state, params, sl.Context(step=n))
        return sl.apply_updates(params, updates), state

    return trajectory(step, params, tx.init(params), (grads, jnp.arange(STEPS)))[0]


def assert_moves_as(original, start, params):
    assert jax.tree.structure(params) == jax.tree.structure(original)
    columns = zip(*map(jax.tree.leaves, (last(params), last(original), start)), strict=True)
    for ours, theirs, begin in columns:
        assert ours.dtype == theirs.dtype
        distance = float(jnp.max(jnp.abs(theirs - begin)))
        # 2e-5 of the distance moved, since optax rounds b2 before it corrects the bias; and where
        # that is less than a unit in the last place of the parameter itself, two of these.
        np.testing.assert_allclose(ours, theirs, rtol=2.4e-7, atol=2e-5 * distance)


NET = {"linear": {"w": jnp.full((3, 2), 2.0), "b": jnp.ones(2)}, "norm": {"scale": jnp.ones(3)}}
LAYERS = {
    "dense": {"weight": jnp.ones((2, 3)), "bias": jnp.zeros(3)},
    "head": {"weight": jnp.ones((3, 1)), "bias": jnp.zeros(1)},
}
PAIR = ({"w": jnp.ones((2, 2)), "b": jnp.ones(2)}, [jnp.ones(3), jnp.ones(())])
NAMES = ("generator", "discriminator")


def mask_fn(p):
    return jax.tree.map(lambda x: x.ndim != 1, p)


def is_bias(path, param):
    del param
    return "bias" in path


def label_fn(params):
    return jax.tree.map_with_path(lambda path, _: path[-1].key, params)


bias_or_weight = label_fn(LAYERS)
bias_tx, weight_tx = sl.Scale(-0.01), sl.Scale(-0.001)
only_biases = sl.where.regex("bias$")

# What a page computes, on which parameters, and the forms in which Slalom has it.
EXAMPLES = {
    "custom optimizer with chaining": (
        optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.add_decayed_weights(weight_decay=1e-4),
            optax.scale_by_adam(b1=0.9, b2=0.999),
            optax.scale(-0.001),
        ),
        {"w": jnp.ones((10, 5)), "b": jnp.zeros((5,))},
        [
            sl.ClipByGlobalNorm(1.0)
            | sl.AddDecayedWeights(weight_decay=1e-4)
            | sl.ScaleByAdam(b1=0.9, b2=0.999)
            | sl.Scale(-0.001)
        ],
    ),
    "Adam for the weights, gradient descent for the biases": (
        optax.partition({"w": optax.adam(1.0), "b": optax.sgd(1.0)}, label_fn),
        {
            "linear_1": {"w": jnp.zeros((5, 6)), "b": jnp.zeros(5)},
            "linear_2": {"w": jnp.zeros((6, 1)), "b": jnp.zeros(1)},
        },
        [
            sl.partition({"w": sl.adam(1.0), "b": sl.sgd(1.0)}, label_fn),
            sl.adam(1.0).partition({sl.where.path("**.b"): sl.sgd(1.0)}),
        ],
    ),
    "a prefix of labels": (
        optax.partition({"generator": optax.adam(0.1), "discriminator": optax.adam(0.5)}, NAMES),
        PAIR,
        [sl.partition({"generator": sl.adam(0.1), "discriminator": sl.adam(0.5)}, NAMES)],
    ),
    # The link on its own, in front of gradient descent.
    "decay of matrices only": (
        optax.chain(optax.masked(optax.add_decayed_weights(0.001), mask_fn), optax.sgd(0.1)),
        NET,
        [
            sl.AddDecayedWeights(0.001).mask(where) | sl.sgd(0.1)
            for where in (
                *(mask_fn, mask_fn(NET), sl.where.ndim(min=2)),
                *(~sl.where.ndim(1), sl.where.path("**.w")),
            )
        ],
    ),
    "AdamW without decay of biases and norms": (
        optax.adamw(0.1, weight_decay=0.5, mask=mask_fn),
        NET,
        [
            sl.adamw(0.1, weight_decay=0.5, decay_where=where)
            for where in (mask_fn, mask_fn(NET), sl.where.ndim(min=2))
        ],
    ),
    "another rate for the biases": (
        optax.partition(
            {"bias": optax.scale(-0.01), "weight": optax.scale(-0.001)}, bias_or_weight
        ),
        LAYERS,
        [
            weight_tx.partition({sl.where.leaf(is_bias): bias_tx}),
            weight_tx.partition({sl.where.path("**.bias"): bias_tx}, names=("bias",)),
            sl.partition({"bias": bias_tx, "weight": weight_tx}, bias_or_weight),
            weight_tx.mask(~only_biases) | bias_tx.mask(only_biases),
        ],
    ),
    # The page's `apply_every(5, adam)`, which Optax itself spells `MultiSteps`.
    "accumulation": (
        optax.MultiSteps(optax.adam(0.001), every_k_schedule=5),
        {"w": jnp.ones((2, 2)), "b": jnp.zeros(2)},
        [sl.adam(0.001).every_k(5)],
    ),
    "a scheduled b1 beside a constant b2": (
        optax.chain(
            optax.inject_hyperparams(optax.scale_by_adam)(
                b1=optax.linear_schedule(0.1, 0.9, 100), b2=0.99
            ),
            optax.scale(-0.01),
        ),
        {"w": jnp.ones(3)},
        [sl.ScaleByAdam(b1=sl.schedules.linear(0.1, 0.9, 100), b2=0.99) | sl.Scale(-0.01)],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_moves_as_the_original(name):
    original, params, forms = EXAMPLES[name]
    grads = gradients(params, STEPS)
    moved, _ = optax_trajectory(original, params, grads)
    assert_moves_as(moved, params, by_function(forms[0], params, grads))
    for tx in forms:
        assert_moves_as(moved, params, slalom_trajectory(tx, params, grads)[0])


@pytest.mark.slow
def test_labels_are_prefixes_and_some_parameters_are_not_optimized():
    original, _, (ours,) = EXAMPLES["a prefix of labels"]
    models = (mlp(0), mlp(1))
    params, grads = params_of(models), gradients(models, STEPS)
    moved, opt = slalom_trajectory(ours, models, grads)
    assert_moves_as(optax_trajectory(original, params, grads)[0], params, moved)
    rates = opt.hyperparams
    assert rates["generator.scale_by_learning_rate.learning_rate"] == np.float32(0.1)
    assert rates["discriminator.scale_by_learning_rate.learning_rate"] == 0.5

    # The page wraps `partition` with `masked`, which would add raw gradients to the others.
    params = {name: {"w": jnp.ones((5, 6)), "b": jnp.ones(5)} for name in ("linear_1", "linear_2")}
    grads = gradients(params, STEPS)
    first, second = params.values()
    labels = {sl.where.path("**.w"): "w", sl.where.path("**.b"): "b"}
    by_name = sl.partition({"w": sl.adam(1.0), "b": sl.sgd(1.0)}, labels)
    original = optax.partition({"w": optax.adam(1.0), "b": optax.sgd(1.0)}, {"w": "w", "b": "b"})
    whole, _ = optax_trajectory(original, first, grads["linear_1"])
    only = by_name.only(sl.where.path("linear_1.**"))
    stepped, opt = slalom_trajectory(only, params, grads)
    assert_moves_as(whole, first, stepped["linear_1"])
    assert_same_bits(last(stepped["linear_2"]), second)
    assert opt.state_of("partition.w.scale_by_adam").mu["linear_2"]["w"] is None
