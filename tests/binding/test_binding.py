"""Binding a transform to a model: what it checks, that it stays cheap, and how arrays are named."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import slalom as sl
from slalom._loop.binding.binding import named_arrays, named_leaves
from table import rows

model = {"a": jnp.ones(3), "b": jnp.ones((2, 2))}


checks = []


class Counted(sl.AbstractStatelessTransform):
    """Counts how often it is checked."""

    def warnings(self, params):
        checks.append(params)
        return ()

    def apply(self, updates, params, context):
        return updates


def test_an_equal_pair_is_checked_once_and_every_binding_warns():
    tx = sl.adam(0.0124)
    first, second = (sl.Optimizer(Counted() | tx, model) for _ in range(2))
    assert len(checks) == 1
    held = [x.unsafe_buffer_pointer() for opt in (first, second) for x in jax.tree.leaves(opt)]
    assert len(set(held)) == len(held)
    pairs = [
        (tx, model | {"a": jnp.ones(4)}),
        (tx, model | {"a": jnp.ones(3, jnp.bfloat16)}),
        (tx, {"c": model["a"], "b": model["b"]}),
        (sl.adam(0.0125), model),
        (sl.adam(0.0124, b1=0.8), model),
        (sl.adam(0.0124, nesterov=True), model),
    ]
    for number, (other, params) in enumerate(pairs, 2):
        sl.Optimizer(Counted() | other, params)
        assert len(checks) == number

    ascending = sl.Scale(-1.0).mask(sl.where.path("a"))
    twice = sl.sgd(0.1) | sl.sgd(0.1)
    for _ in range(2):
        with pytest.raises(ValueError, match="would ascend"):
            sl.Optimizer(ascending, model)
        with pytest.warns(UserWarning, match="both flip the sign"):
            sl.Optimizer(twice, model)
        with pytest.warns(UserWarning, match=r"is -0\.1, so each step ascends .* Write 0\.1\."):
            sl.Optimizer(sl.sgd(-0.1), model)
    sl.Optimizer(sl.ScaleByLearningRate(0.1, flip_sign=False), model)


def test_traced_numbers_are_constants():
    jaxpr = jax.make_jaxpr(lambda m: jax.tree.leaves(sl.Optimizer(sl.adam(1e-3), m)))(model)
    names = {eqn.primitive.name for eqn in jaxpr.eqns}
    assert names <= {"broadcast_in_dim", "gt", "select_n", "jit"}


DECAY, RATE = sl.AddDecayedWeights(0.1), sl.ScaleByLearningRate(0.1)
A, B = sl.where.path("a"), sl.where.path("b")


def test_only_decays_and_cautious_links_after_the_learning_rate_are_warned_of():
    for tx, where in (
        (sl.adam(0.1) | DECAY.mask(A), "'mask.add_decayed_weights' comes after 'scale_by_learning"),
        ((sl.adam(0.1) | DECAY).if_finite(), "'if_finite.add_decayed_weights' comes after 'if_fin"),
        (sl.adamw(0.1) | DECAY, "'add_decayed_weights_2' comes after 'scale_by_learning_rate'"),
        (sl.adam(0.1).only(A) | DECAY.mask(A), "'mask.add_decayed_weights' comes after 'only'"),
    ):
        with pytest.warns(UserWarning, match="they grow.*`sl.SubtractDecayedWeights`") as caught:
            sl.Optimizer(tx, model)
        assert [str(w.message).startswith(where) for w in caught] == [True]
    with pytest.warns(UserWarning, match="'cautious' comes after .*, so it drops the entries that"):
        sl.Optimizer(sl.adam(0.1) | sl.Cautious(), model)

    # Every warning is an error here.
    for tx in (
        sl.ScaleByAdam() | DECAY | sl.Cautious() | RATE,
        RATE.mask(A) | DECAY.mask(B) | RATE.mask(B),
        sl.Scale(-1.0) | DECAY | sl.Scale(-0.1),
        sl.adam(0.1) | sl.SubtractDecayedWeights(0.1),
        sl.ScaleByAdam() | DECAY | sl.Scale(lambda n: -0.1),
    ):
        sl.Optimizer(tx, model)


def names(opt):
    return list(named_arrays(opt.arrays))


def test_leaves_are_named_by_their_full_paths_which_two_never_share():
    model = eqx.nn.MLP(2, 1, 3, 1, key=jax.random.key(0))
    schedule = sl.schedules.linear(init_value=0.1, end_value=0.0, transition_steps=5)
    tx = sl.named_chain(clip=sl.ClipByGlobalNorm(1.0)) | sl.sgd(schedule, momentum=0.9)
    assert names(sl.Optimizer(tx, model)) == [
        "clip.max_norm",
        "trace.decay",
        "scale_by_learning_rate.learning_rate.init_value",
        "scale_by_learning_rate.learning_rate.end_value",
        "scale_by_learning_rate.learning_rate.transition_steps",
        "scale_by_learning_rate.learning_rate.transition_begin",
        "trace.trace.layers.0.weight",
        "trace.trace.layers.0.bias",
        "trace.trace.layers.1.weight",
        "trace.trace.layers.1.bias",
        "count",
    ]
    both = {"opt": sl.Optimizer(tx, model), "n": 1}
    assert [name for name, _ in named_leaves(both)][:2] == ["n", "opt.clip.max_norm"]

    tx = sl.AddNoise(0.1, 0.5) | sl.named_chain(count=sl.Scale(-0.1))
    found = names(sl.Optimizer(tx, {"w": jnp.ones(2)}))
    assert found == [
        "add_noise.eta",
        "add_noise.gamma",
        "add_noise.key_2",
        "count.step_size",
        "add_noise.key",
        "count",
    ]

    noisy = sl.AddNoise(0.1, 0.5, key=0) | sl.sgd(0.1)
    tx = sl.adam(0.1).partition({sl.where.path("b"): noisy}, names=("bias",))
    opt = sl.Optimizer(tx, {"w": jnp.ones(2), "b": jnp.ones(2)})
    assert "partition.bias.add_noise.key_2" in names(opt)  # the other one is its state


@rows()
def test_every_leaf_has_a_name_of_its_own(row):
    opt = row.opt
    assert len(names(opt)) == len(jax.tree.leaves(opt))
    # A driven number is read from the schedule's state, and a plain function has no numbers.
    if not row.name.startswith("Drive") and row.name != "EveryK, scheduled":
        # A scheduled number has leaves for the numbers of its schedule.
        found = [f"{leaf}." for leaf in names(opt)]
        for path in opt.hyperparams:
            assert any(leaf.startswith(f"{path}.") for leaf in found)


def test_names_survive_mapping_and_jax_tells_them():
    opt = sl.Optimizer(sl.adam(0.1), {"w": jnp.ones(2)})
    assert names(jax.tree.map(jnp.copy, opt)) == names(opt)

    opt = sl.Optimizer(sl.adam(0.1), {"w": jnp.ones(2)})

    def halve(opt, _):
        return jax.tree.map(lambda x: x.astype(jnp.float16), opt), None

    with pytest.raises(TypeError, match=r"arrays[.]state[.]0[.]mu[.]w has type float32\[2\]"):
        jax.lax.scan(halve, opt, length=2)
