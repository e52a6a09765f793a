"""Real and imaginary parts as parameters of their own."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl
from helpers import assert_close, gradients, params_of, slalom_trajectory

params = {
    "b": jnp.array([0.5, -1.0]),
    "w": jnp.array([[1 + 2j, 3 - 1j], [0.5j, -2.0]], jnp.complex64),
}


def halves(tree):
    """The same parameters as a user would write them without complex numbers."""
    return {"b": tree["b"], "w": {"real": tree["w"].real, "imag": tree["w"].imag}}


def novograd_of(path):
    return sl.sgd(0.1).partition({sl.where.path(path): sl.novograd(0.1)})


# Around the halves, and on them: there, a glob has to name both.
ON_HALVES = {
    "signs": (sl.rprop(0.1), sl.rprop(0.1)),
    "norms": (sl.ClipByGlobalNorm(1.0) | sl.lamb(0.1), sl.ClipByGlobalNorm(1.0) | sl.lamb(0.1)),
    "only": (sl.adam(0.1).only(sl.where.ndim(2)), sl.adam(0.1).only(sl.where.ndim(2))),
    "paths": (novograd_of("w"), novograd_of("w.*")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_HALVES)
def test_it_is_the_inner_transform_on_the_halves(name):
    tx, on_halves = ON_HALVES[name]
    grads = gradients(params, 3)
    whole, _ = slalom_trajectory(tx.split_complex(), params, grads)
    apart, _ = slalom_trajectory(on_halves, halves(params), halves(grads))
    assert whole["w"].dtype == jnp.complex64
    assert_close(halves(whole), apart, rtol=1e-6)


def test_halves_have_the_names_of_their_parameters_and_the_context_is_split():
    own = {"w": jnp.array([1 + 1j], jnp.complex64)}
    stepped, _ = sl.Optimizer(sl.sgd(1e-9).split_complex(), own).step(own, own)
    updates, _ = sl.Optimizer(sl.sgd(1e-9).split_complex(), own).update(own, own)
    assert stepped["w"] == own["w"]
    np.testing.assert_allclose(updates["w"], [-1e-9 - 1e-9j], rtol=1e-6)

    tx = sl.adam(0.1).only(sl.where.path("w")).split_complex()
    opt = sl.Optimizer(tx, params)
    assert jax.tree.leaves(opt.state_of("scale_by_adam").mu["b"]) == []
    assert opt.state_of("scale_by_adam").mu["w"].imag.shape == (2, 2)
    table = opt.describe(params).to_dict()
    assert table["w"]["state_bytes"] == 2 * 2 * 16
    assert table["w"]["learning_rate"] == pytest.approx(0.1)
    assert table["w"]["transform"].count("scale_by_adam") == 1
    assert table["b"]["state_bytes"] == 0
    with pytest.raises(ValueError, match=r"sl.where.path\('w.real'\) matches no parameter"):
        sl.Optimizer(sl.adam(0.1).only(sl.where.path("w.real")).split_complex(), params)

    def loss(model):
        return jnp.sum(jnp.abs(model["w"]) ** 2) + jnp.sum(model["b"])

    opt = sl.Optimizer(Watch().split_complex() | sl.sgd(0.1), params)
    _, opt = opt.step(params, params, grad=params, per_param={"scale": params}, value_fn=loss)
    np.testing.assert_allclose(opt.state_of("watch"), loss(params), rtol=1e-6)


@pytest.mark.slow
def test_layers_are_known_and_start_anew_by_both_halves():
    layer = eqx.nn.Linear(3, 2, dtype=jnp.complex64, key=jax.random.key(0))
    own = params_of(layer)
    tx = sl.UnitwiseClip(0.1).split_complex() | sl.Scale(-1.0)
    made, _ = tx.update(own, tx.init(own), own)
    np.testing.assert_allclose(jnp.linalg.norm(made.weight.real, axis=1), 0.1, rtol=1e-5)
    one = sl.adam(0.1).only(sl.where.type(eqx.nn.Linear, owner=True)).split_complex()
    assert sl.Optimizer(one, own).state_of("scale_by_adam").mu.weight.real.shape == (2, 3)

    opt = sl.Optimizer((sl.adam(0.1) | sl.ScaleByNovograd()).split_complex(), params)
    _, opt = opt.step(params, params)
    after = opt.reset(params, sl.where.path("w"))
    adam = after.state_of("scale_by_adam")
    np.testing.assert_array_equal(adam.age, [1, 0, 0])
    np.testing.assert_array_equal(adam.mu["w"].imag, 0)
    assert jnp.all(adam.mu["b"] != 0)
    stepped, _ = after.step(params, params)
    assert jnp.all(jnp.isfinite(stepped["w"]))


class Watch(sl.AbstractTransform):
    """Shows what a transform sees of the context."""

    needs = ("value_fn", "grad", "per_param")

    def init(self, params):
        return jnp.zeros(())

    def update(self, updates, state, params=None, context=None):
        structure = jax.tree.structure(params)
        assert jax.tree.structure(context.grad) == structure
        assert jax.tree.structure(context.per_param["scale"]) == structure
        assert not any(jnp.iscomplexobj(x) for x in jax.tree.leaves(context.grad))
        return updates, jnp.asarray(context.value_fn(params), jnp.float32)


def test_what_writes_parameters_goes_around():
    made = {"outer": sl.adam(0.1).lookahead(2, 0.5), "average": sl.adam(0.1).average().every_k(2)}
    for name, tx in made.items():
        with pytest.raises(ValueError) as error:  # noqa: PT011  the whole text is compared
            tx.split_complex()
        assert str(error.value) == (
            f"{name.title()} writes parameters itself, so it cannot be used inside "
            f"`.split_complex()`. Change the order: `tx.split_complex().{name}(...)` instead of "
            f"`tx.{name}(...).split_complex()`."
        )
    sl.Optimizer(sl.adam(0.1).split_complex().lookahead(2, 0.5), params)
