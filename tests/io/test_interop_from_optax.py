"""`sl.interop.from_optax`: the same bits as Optax, with what Slalom offers around it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import slalom as sl
from helpers import (
    after_steps,
    assert_close,
    assert_same_bits,
    gradients,
    lenient,
    loss_of_any,
    mlp,
    optax_trajectory,
    sampled,
    slalom_trajectory,
    slow_except,
    trajectory,
)
from slalom.interop import from_optax

matrices = sl.where.ndim(min=2)
params = {
    "w": jnp.linspace(-1, 1, 6, dtype=jnp.float32).reshape(2, 3),
    "b": (jnp.linspace(0.5, 1, 3, dtype=jnp.float32), jnp.asarray(0.25, jnp.float32)),
}
ones = jax.tree.map(jnp.ones_like, params)

schedule = optax.linear_schedule(0.1, 0.0, 10)
decayed = {"w": True, "b": (False, True)}
groups = {"w": "slow", "b": "fast"}

ALIASES = {
    name: getattr(optax, name)(0.1)
    for name in [
        *("adabelief", "adadelta", "adagrad", "adam", "adamax", "adamaxw", "adamw", "adan"),
        *("amsgrad", "fromage", "lamb", "lars", "lion", "nadam", "nadamw", "novograd"),
        *("optimistic_adam_v2", "optimistic_gradient_descent", "radam", "rmsprop", "rprop"),
        *("sgd", "sign_sgd", "signum", "sm3", "yogi"),
    ]
}
OTHERS = {
    "noisy_sgd": optax.noisy_sgd(0.1, key=jax.random.key(3)),
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=2),
    "adamw, masked and scheduled": optax.adamw(schedule, mask=decayed),
    "polyak_sgd": optax.polyak_sgd(),
    "lbfgs": optax.lbfgs(),
    "backtracking": optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(8)),
    "partition": optax.partition({"slow": optax.sgd(0.1), "fast": optax.adam(0.1)}, groups),
    "masked": optax.chain(optax.masked(optax.trace(0.9), decayed), optax.scale(-0.1)),
    "flatten": optax.flatten(optax.adam(0.1)),
    "MultiSteps": optax.MultiSteps(optax.adam(0.1), 2),
    "apply_if_finite": optax.apply_if_finite(optax.adam(0.1), 2),
    "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(0.1, b1=schedule),
    "reduce_on_plateau": optax.chain(optax.adam(0.1), optax.contrib.reduce_on_plateau()),
    "schedule_free": optax.contrib.schedule_free_adamw(0.1),
    "prodigy": optax.contrib.prodigy(0.1),
    "muon": optax.contrib.muon(0.1),
    "dadapt_adamw": optax.contrib.dadapt_adamw(0.1),
    "mechanic": optax.contrib.mechanize(optax.adam(0.1)),
    "cocob": optax.contrib.cocob(),
}
EVERYTHING = ALIASES | OTHERS
# The others have states of other forms, so all of them run.
TIERS = [*sampled(ALIASES), *slow_except(OTHERS, "adamw, masked and scheduled")]


@pytest.mark.parametrize("name", TIERS)
def test_every_transform_steps_as_in_optax(name):
    gt = EVERYTHING[name]
    # The SM3 of Optax has no rule for numbers.
    start = params["w"] if name == "sm3" else params
    tx = from_optax(gt)
    if isinstance(gt, optax.MultiSteps):
        gt = gt.gradient_transformation()
    gt = optax.with_extra_args_support(gt)

    def known(grads, value):
        more = {"grad": grads, "value_fn": loss_of_any} if "value_fn" in tx.needs else {}
        return {"value": value, **more}

    def ours(params, opt, grads, value):
        return opt.step(params, grads, **known(grads, value))

    def theirs(params, state, grads, value):
        updates, state = gt.update(grads, state, params, **known(grads, value))
        return optax.apply_updates(params, updates), state

    def run(step, state):
        inputs = (gradients(start, 4), jnp.linspace(1.0, 2.0, 4))
        return jax.jit(lambda state: trajectory(step, start, state, inputs)[0])(state)

    with lenient():
        expected = run(theirs, jax.tree.map(jnp.asarray, gt.init(start)))
        assert_same_bits(run(ours, sl.Optimizer(tx, start)), expected)


@pytest.mark.parametrize("dtype", slow_except([jnp.bfloat16, jnp.float16], jnp.bfloat16))
def test_half_precision_steps_as_in_optax(dtype):
    half = jax.tree.map(lambda p: p.astype(dtype), params)
    grads = gradients(half, 3)
    ours, _ = slalom_trajectory(from_optax(optax.sgd(0.1, momentum=0.9)), half, grads)
    theirs, _ = optax_trajectory(optax.sgd(0.1, momentum=0.9), half, grads)
    # XLA may keep more digits between two operations in half precision.
    assert {x.dtype for x in jax.tree.leaves(ours)} == {jnp.dtype(dtype)}
    wide = (jax.tree.map(np.float32, each) for each in (ours, theirs))
    assert_close(*wide, rtol=float(jnp.finfo(dtype).eps))


def test_state_keeps_its_dtypes_where_updates_are_wider():
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    found = []
    for tx in (from_optax(optax.sgd(0.1, momentum=0.9)), sl.sgd(0.1, momentum=0.9)):
        # What clips returns, and what is accumulated, is float32.
        model, opt = after_steps((sl.Clip(9.0) | tx).every_k(2), 4, half, half)
        assert opt.state_of("every_k").accumulated["w"].dtype == jnp.float32
        found.append(jax.tree.map(np.float32, model))
    assert_close(*found, rtol=float(jnp.finfo(jnp.bfloat16).eps))
    _, opt = after_steps(from_optax(optax.contrib.prodigy(0.1)).every_k(2), 2, half, half)
    assert opt.state_of("from_optax").estim_lr.shared.dtype == jnp.bfloat16

    # Optax reads moments that are stored in fewer bits in the dtype that it made them in.
    tx = from_optax(optax.apply_if_finite(optax.trace(0.9), 2)).store("bfloat16", min_size=1)
    _, opt = sl.Optimizer(tx, params).update(params, params)
    wanted = jax.tree.map(lambda p, half: 0.9 * half.astype(p.dtype) + p, params, half)
    assert_close(opt.update(params, params)[0], wanted, rtol=1e-6)


@pytest.mark.slow
def test_training_steps_take_whole_models_and_both_directions_undo_each_other():
    search = from_optax(optax.lbfgs())
    assert search.needs == ("value", "grad", "value_fn")
    clipped = sl.ClipByGlobalNorm(1.0) | from_optax(optax.adamw(0.01))
    for tx, model in ((clipped, mlp()), (search, params)):
        step = sl.train_step(loss_of_any)
        model, opt, before = step(model, sl.Optimizer(tx, model))
        model, opt, after = step(model, opt)
        assert after < before
    with pytest.raises(TypeError, match=r"FromOptax \('from_optax'\) needs 'value'"):
        opt.step(model, ones)

    grads = gradients(params, 3)
    for tx in (from_optax(optax.adamw(0.1)), sl.adamw(0.1)):
        there = from_optax(sl.interop.to_optax(tx))
        left, opt = slalom_trajectory(there, params, grads)
        right, _ = slalom_trajectory(tx, params, grads)
        assert_close(left, right, rtol=1e-6)
    assert sl.interop.hyperparams(opt.state)["learning_rate"] == np.float32(0.1)


WRAPPED = {
    "mask": lambda tx: tx.mask(matrices) | sl.Scale(2.0),
    "only": lambda tx: tx.only(matrices),
    "partition": lambda tx: tx.partition({matrices: sl.sgd(0.5)}),
    "every_k": lambda tx: tx.every_k(2),
    "if_finite": lambda tx: tx.if_finite(),
    "average": lambda tx: tx.average(),
    "lookahead": lambda tx: tx.lookahead(2, 0.5),
    "record": lambda tx: tx.record(),
    "store": lambda tx: tx.store("int8", min_size=1),
    "when": lambda tx: tx.when(lambda context, updates: context.step != 1, otherwise="zero"),
}


@pytest.mark.parametrize("name", slow_except(WRAPPED, "mask"))
def test_wrappers_treat_it_as_a_transform_of_slalom(name):
    grads = gradients(params, 4)
    # Both compute the same in every bit.
    link = (optax.trace(0.9), sl.Trace(0.9))
    whole = (optax.sgd(0.1, momentum=0.9), sl.sgd(0.1, momentum=0.9))
    theirs, ours = link if name == "mask" else whole
    wrap = WRAPPED[name]
    left, opt = slalom_trajectory(wrap(from_optax(theirs)), params, grads)
    right, rival = slalom_trajectory(wrap(ours), params, grads)
    assert_close(left, right, rtol=1e-6)
    assert opt.has_updated == rival.has_updated
    assert_close(opt.eval_params(params), rival.eval_params(params), rtol=1e-6)


def test_extra_arguments_are_declared_by_name_or_by_the_signature():
    def scale(updates, state, params=None, **extra_args):
        return jax.tree.map(lambda u: u * extra_args["loss"], updates), state

    gt = optax.GradientTransformationExtraArgs(optax.init_empty_state, scale)
    with pytest.raises(TypeError, match="No transform uses 'loss'"):
        sl.Optimizer(from_optax(gt), params).update(params, ones, loss=jnp.asarray(3.0))
    opt = sl.Optimizer(from_optax(gt, needs=["loss"]), params)
    updates, _ = opt.update(params, ones, loss=jnp.asarray(3.0))
    assert_same_bits(updates, jax.tree.map(lambda g: 3 * g, ones))
    with pytest.raises(TypeError, match="needs 'loss'"):
        opt.update(params, ones)

    # Masks and partitions cut them like the parameters.
    def multiply(updates, state, params=None, *, scales, **extra_args):
        del params, extra_args
        return jax.tree.map(jnp.multiply, updates, scales), state

    gt = optax.GradientTransformationExtraArgs(optax.init_empty_state, multiply)
    scales = jax.tree.map(lambda p: jnp.full_like(p, 3.0), params)
    for tx in (
        from_optax(gt),
        from_optax(gt).only(matrices),
        from_optax(gt).partition({matrices: from_optax(gt)}),
        (from_optax(gt) | sl.Scale(1.0)).mask(matrices),
    ):
        updates, _ = sl.Optimizer(tx, params).update(params, ones, per_param={"scales": scales})
        np.testing.assert_array_equal(updates["w"], 3 * ones["w"])
    with pytest.raises(TypeError, match="needs 'scales'"):
        sl.Optimizer(from_optax(gt), params).update(params, ones)


def test_injected_hyperparameters_are_live():
    gt = optax.inject_hyperparams(optax.adam)(0.1, b1=optax.linear_schedule(0.9, 0.8, 4))
    opt = sl.Optimizer(sl.Clip(1.0) | from_optax(gt), params)
    assert opt.hyperparams["from_optax.learning_rate"] == np.float32(0.1)
    assert "from_optax.b1" not in opt.hyperparams  # Optax computes it from its own count
    # Other numbers stay in their closures.
    assert dict(sl.Optimizer(from_optax(optax.adam(0.1)), params).hyperparams) == {}
    updates, _ = opt.update(params, ones)
    half, after = opt.with_hyperparams(learning_rate=0.05).update(params, ones)
    assert_same_bits(half, jax.tree.map(lambda u: u / 2, updates))
    assert after.state_of("from_optax").hyperparams["learning_rate"] == np.float32(0.05)

    # They may become schedules.
    gt = optax.inject_hyperparams(optax.sgd)(0.1)
    tx = from_optax(gt).drive({"learning_rate": sl.schedules.ReduceOnPlateau(0.2, patience=1)})
    updates, _ = sl.Optimizer(tx, params).update(params, ones, value=jnp.asarray(1.0))
    np.testing.assert_allclose(updates["w"], np.float32(-0.2))
    opt = sl.Optimizer(from_optax(gt), params)
    opt = opt.with_hyperparams(learning_rate=sl.schedules.linear(1.0, 0.0, 4))
    _, opt = opt.update(params, ones)
    np.testing.assert_allclose(opt.update(params, ones)[0]["w"], -0.75)


def fresh(gt, **options):
    return sl.Optimizer(from_optax(gt), params, **options)


def test_reset_restarts_moments_and_training_steps_donate_none_of_a_closure():
    _, opt = fresh(optax.adam(schedule)).update(params, ones)
    adam, rate = opt.reset(params).state
    assert (adam.count.shared, rate.count) == (0, 1)
    assert not np.any(adam.mu.params["w"])
    message = r"'from_optax.0.count.shared' is shared by several parameters"
    with pytest.raises(ValueError, match=message):
        opt.reset(params, sl.where.path("w"))

    grads = {"w": ones["w"], "b": (None, None)}
    _, opt = fresh(optax.adam(0.1), trainable=matrices).update(params, grads)
    mu = opt.state[0].mu.params["w"]
    opt, report = opt.rebind(params, trainable=None)
    assert_same_bits(opt.state[0].mu.params["w"], mu)
    assert "from_optax.0.mu.params.w" in report.carried
    assert "from_optax.0.mu.params.b.0" in report.new

    gt = optax.GradientTransformation(lambda params: params, lambda u, state, params: (u, state))
    start = jax.tree.map(jnp.copy, params)
    opt = sl.Optimizer(from_optax(gt) | sl.sgd(0.1), start)
    sl.train_step(loss_of_any)(params, opt)
    assert all(x.is_deleted() for x in jax.tree.leaves(opt.state))
    assert not any(x.is_deleted() for x in jax.tree.leaves(start))

    key = jax.random.key(3)
    tx = from_optax(optax.noisy_sgd(0.1, key=key))
    sl.train_step(loss_of_any)(start, sl.Optimizer(tx, start))
    assert not key.is_deleted()


def test_checkpoints_continue_bit_for_bit(tmp_path):
    gt = optax.inject_hyperparams(optax.adamw)(0.1)
    model, opt = fresh(gt).with_hyperparams(learning_rate=0.2).step(params, ones)
    sl.checkpoint.save(tmp_path / "run", model=model, opt=opt)
    loaded = sl.checkpoint.load(tmp_path / "run", model=params, opt=fresh(gt), hyperparams="file")
    assert_same_bits(loaded["opt"].step(loaded["model"], ones), opt.step(model, ones))


def test_it_prints_what_it_wraps_and_arrays_like_parameters_are_moments():
    adamw = "<chain(scale_by_adam, masked(add_decayed_weights), scale)>"
    tx = from_optax(optax.adamw(0.1, mask=decayed)).every_k(2)
    assert repr(tx) == f"sl.interop.from_optax({adamw}).every_k(2)"
    injected = from_optax(optax.inject_hyperparams(optax.sgd)(0.1))
    assert repr(injected) == ("sl.interop.from_optax(<inject_hyperparams(sgd)>, learning_rate=0.1)")
    several = from_optax(optax.MultiSteps(optax.scale(2.0), 2))
    assert repr(several) == "sl.interop.from_optax(<MultiSteps(scale)>)"

    row = fresh(optax.inject_hyperparams(optax.adam)(0.1)).describe(params).to_dict()["w"]
    found = row["state_bytes"], row["transform"], row["learning_rate"]
    assert found == (2 * params["w"].nbytes, "from_optax", np.float32(0.1))

    state = fresh(optax.adam(0.1)).state_of("from_optax")
    mapped = sl.map_params(lambda leaf, p: p, state, params, other=lambda leaf: None)
    assert_same_bits((mapped[0].mu.params, mapped[0].nu.params), (params, params))
    assert mapped[0].count.shared is None

    masked = fresh(optax.masked(optax.adam(0.1), decayed)).state
    new = sl.map_params(lambda leaf, p: p, masked, params)
    assert_same_bits(new.inner_state[0].mu.params, {"w": params["w"], "b": (None, params["b"][1])})

    factored = fresh(optax.adafactor(0.1, min_dim_size_to_factor=2)).state
    mapped = sl.map_params(lambda leaf: None, factored)
    assert_same_bits(mapped[0].v_row, factored[0].v_row)
    # A single array has moments, but a single number has none.
    tx = from_optax(optax.adam(0.1))
    assert tx.init(jnp.ones(3))[0].mu.params.shape == (3,)
    assert tx.init(jnp.ones(()))[0].mu.shape == ()


def test_any_callable_is_an_update():
    def update(factor, updates, state, params=None, *, value, other):
        del params
        return jax.tree.map(lambda u: factor * value * other * u, updates), state

    class Update:
        def __call__(self, updates, state, params=None):
            del params
            return jax.tree.map(lambda u: 6 * u, updates), state

    partial = functools.partial(update, 2.0, other=1.0)
    gt = optax.GradientTransformationExtraArgs(optax.init_empty_state, partial)
    chained = optax.chain(gt, optax.scale(1.0))
    simple = optax.GradientTransformation(optax.init_empty_state, Update())
    # Optax's closures go by the function that made them, here this test.
    for given, name, needs in (
        (gt, "test_any_callable_is_an_update", ("value",)),
        (chained, "chain(test_any_callable_is_an_update, scale)", ("value",)),
        (simple, "test_any_callable_is_an_update", ()),
    ):
        tx = from_optax(given)
        assert repr(tx) == f"sl.interop.from_optax(<{name}>)"
        assert tx.needs == needs
        updates, _ = sl.Optimizer(tx, params).update(params, ones, value=jnp.asarray(3.0))
        assert_same_bits(updates, jax.tree.map(lambda g: 6 * g, ones))


def test_what_is_no_transform_and_a_state_that_changes_are_refused():
    for given, message in (
        (optax.adam, r"Call it first: `adam\(...\)`"),
        (sl.adam(0.1), "one of Slalom already: use it as it is"),
        (0.1, r"takes an `optax.GradientTransformation`, such as `optax.adam\(1e-3\)`, got 0.1"),
        (
            optax.chain(optax.clip(1.0), optax.lookahead(optax.sgd(0.1), 5, 0.5)),
            r"from_optax\(inner\).lookahead\(sync_period",
        ),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            from_optax(given)
    with pytest.raises(TypeError, match=r"`needs=\('value',\)`"):
        from_optax(optax.adam(0.1), needs="value")

    def update(updates, state, params=None):
        return updates, {"count": state["count"], "more": state["count"]}

    gt = optax.GradientTransformation(lambda params: {"count": jnp.zeros(())}, update)
    with pytest.raises(TypeError, match=r"same structure as `init`.*'more' is in the new state"):
        fresh(gt).update(params, ones)
