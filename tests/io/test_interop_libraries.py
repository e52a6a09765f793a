"""`sl.interop.to_optax` in the libraries that accept a transform of Optax."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slalom as sl
from helpers import assert_close, assert_same_bits, lenient
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


def test_models_with_changing_nnx_variables_are_refused():
    nnx, model = nnx_model()
    model.norm = nnx.BatchNorm(1, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"'norm.mean' is an `nnx.BatchStat`.* `nnx.Optimizer\("):
        sl.Optimizer(sl.sgd(0.1), model)


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
