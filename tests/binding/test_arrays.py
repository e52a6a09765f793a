import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import slalom as sl
from helpers import assert_same_bits
from table import rows


def names(opt):
    found = jax.tree_util.tree_leaves_with_path(opt)
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in found]


def test_leaves_of_an_optimizer_are_named_by_the_path_grammar():
    model = eqx.nn.MLP(2, 1, 3, 1, key=jax.random.key(0))
    schedule = sl.schedules.linear(init_value=0.1, end_value=0.0, transition_steps=5)
    tx = sl.named_chain(clip=sl.ClipByGlobalNorm(1.0)) | sl.sgd(schedule, momentum=0.9)
    assert names(sl.Optimizer(tx, model)) == [
        "arrays.clip.max_norm",
        "arrays.trace.decay",
        "arrays.scale_by_learning_rate.learning_rate.init_value",
        "arrays.scale_by_learning_rate.learning_rate.end_value",
        "arrays.scale_by_learning_rate.learning_rate.transition_steps",
        "arrays.scale_by_learning_rate.learning_rate.transition_begin",
        "arrays.trace.trace.layers.0.weight",
        "arrays.trace.trace.layers.0.bias",
        "arrays.trace.trace.layers.1.weight",
        "arrays.trace.trace.layers.1.bias",
        "arrays.count",
    ]
    (path, _), *_ = jax.tree_util.tree_leaves_with_path({"opt": sl.Optimizer(tx, model)})
    assert jax.tree_util.keystr(path) == "['opt'].arrays.clip.max_norm"


def test_two_leaves_never_share_a_name():
    tx = sl.AddNoise(0.1, 0.5) | sl.named_chain(count=sl.Scale(-0.1))
    found = names(sl.Optimizer(tx, {"w": jnp.ones(2)}))
    assert found == [
        "arrays.add_noise.eta",
        "arrays.add_noise.gamma",
        "arrays.add_noise.key_2",
        "arrays.count.step_size",
        "arrays.add_noise.key",
        "arrays.count",
    ]


@rows(1)
def test_every_leaf_has_a_name_of_its_own(row):
    opt = row.opt
    assert len(set(names(opt))) == len(opt.arrays)
    # A driven number is read from the schedule's state, and a plain function has no numbers.
    if not row.name.startswith("Drive") and row.name != "EveryK, scheduled":
        # A scheduled number has leaves for the numbers of its schedule.
        found = [f"{leaf}." for leaf in names(opt)]
        for path in opt.hyperparams:
            assert any(leaf.startswith(f"arrays.{path}.") for leaf in found)


def test_arrays_survive_mapping():
    opt = sl.Optimizer(sl.adam(0.1), {"w": jnp.ones(2)})
    again = jax.tree.map(jnp.copy, opt)
    assert names(again) == names(opt)
    assert jax.tree.structure(again) == jax.tree.structure(opt)
    assert_same_bits(again.state, opt.state)
    assert len(opt.arrays) == len(opt.arrays[:]) == 9
    assert repr(opt.arrays).startswith("Arrays(scale_by_adam.b1, ")


def test_the_messages_of_jax_name_the_leaf():
    opt = sl.Optimizer(sl.adam(0.1), {"w": jnp.ones(2)})

    def halve(opt, _):
        return jax.tree.map(lambda x: x.astype(jnp.float16), opt), None

    with pytest.raises(TypeError, match=r"arrays[.]scale_by_adam[.]mu[.]w has type float32\[2\]"):
        jax.lax.scan(halve, opt, length=2)
