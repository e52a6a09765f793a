"""Dynamic scaling of the loss."""

import copy

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import slalom as sl
from helpers import assert_same_bits, drawn, slow_except

START = 2.0**15
params = {"w": jnp.array([1.0, -2.0]), "b": jnp.ones(())}
GOOD = {"w": jnp.array([0.5, 0.25]), "b": jnp.ones(())}
BAD = {"w": jnp.array([jnp.inf, 0.25]), "b": jnp.ones(())}


def halving(n):
    return 0.1 / 2.0 ** n.astype(jnp.float32)


def scaled(grads, opt):
    return jax.tree.map(lambda g: g * opt.loss_scale, grads)


@pytest.fixture(scope="module")
def step():
    return jax.jit(lambda params, opt, grads: opt.step(params, scaled(grads, opt)))


# --- the rule -----------------------------------------------------------------------------------


def torch_scales(initial, interval, finite):
    """The scale after each step, by `torch.amp.GradScaler` on the CPU."""
    torch = pytest.importorskip("torch", reason="the reference is torch.amp.GradScaler")
    scaler = torch.amp.GradScaler("cpu", init_scale=initial, growth_interval=interval)
    weight = torch.nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([weight], lr=0.125)
    scales, weights = [], []
    for is_finite in finite:
        optimizer.zero_grad()
        scaler.scale(weight * (1.0 if is_finite else float("inf"))).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        weights.append(weight.item())
    return scales, weights


def own_scales(initial, interval, finite):
    tx = sl.sgd(0.125).scale_loss(initial, growth_interval=interval)

    def body(carry, is_finite):
        weight, opt = carry
        grad = jnp.where(is_finite, opt.loss_scale, jnp.inf)
        weight, opt = opt.step(weight, grad)
        return (weight, opt), (opt.loss_scale, weight)

    weight = jnp.ones(())
    carry = weight, sl.Optimizer(tx, weight)
    (_, opt), (scales, weights) = jax.lax.scan(body, carry, jnp.array(finite))
    return scales.tolist(), weights.tolist(), opt


def by_the_rule(scale, interval, finite):
    """The scale after each step, written out."""
    scales, in_a_row = [], 0
    for is_finite in finite:
        in_a_row = in_a_row + 1 if is_finite else 0
        if not is_finite:
            scale = scale / 2
        elif in_a_row == interval:
            scale, in_a_row = scale * 2, 0
        scales.append(scale)
    return scales


FINITE = np.random.default_rng(0).uniform(size=200) < 0.7


def test_the_scale_and_the_clock_follow_the_rule():
    scales, weights, opt = own_scales(8.0, 3, FINITE)
    assert scales == by_the_rule(8.0, 3, FINITE)
    assert weights == (1 - 0.125 * np.cumsum(FINITE)).tolist()
    assert int(opt.metrics["total_notfinite"]) == np.sum(~FINITE)
    assert int(opt.state.count) == np.sum(FINITE)


@pytest.mark.slow
@drawn(st.lists(st.booleans(), min_size=24, max_size=24), st.integers(1, 3), examples=6)
def test_the_scale_and_the_parameters_follow_grad_scaler(finite, interval):
    scales, weights, _ = own_scales(8.0, interval, finite)
    assert (scales, weights) == torch_scales(8.0, interval, finite)


@pytest.mark.slow
def test_the_scale_stays_within_normal_numbers():
    scales, _, _ = own_scales(2.0**-125, 1, [False] * 3)
    assert scales == [2.0**-126] * 3
    scales, weights, _ = own_scales(2.0**125, 1, [True] * 3)
    assert scales == [2.0**126] * 3
    assert weights == [0.875, 0.75, 0.625]


@pytest.mark.slow
def test_a_skipped_step_changes_neither_parameters_nor_state_nor_clock(step):
    opt = sl.Optimizer(sl.adam(halving).scale_loss(), params)
    once = step(params, opt, GOOD)
    skipped = step(*once, BAD)
    assert_same_bits(skipped[0], once[0])
    assert_same_bits(skipped[1].state.inner, once[1].state.inner)
    assert float(skipped[1].loss_scale) == START / 2
    assert not bool(skipped[1].has_updated)
    assert skipped[1].metrics.to_dict() == {
        "scale_loss.loss_scale": START / 2,
        "scale_loss.last_finite": False,
        "scale_loss.total_notfinite": 1,
    }
    (rate,) = (v for k, v in skipped[1].hyperparams.items() if k.endswith("learning_rate"))
    assert rate == jnp.float32(0.05)
    # With powers of two the scale leaves no trace.
    plain = sl.Optimizer(sl.adam(halving), params)
    model, plain = plain.step(params, GOOD)
    assert_same_bits(step(*skipped, GOOD)[0], plain.step(model, GOOD)[0])


INSIDE = {
    "clipped": lambda tx: sl.ClipByGlobalNorm(0.1) | tx,
    "stored": lambda tx: tx.store("int8", min_size=1),
    "clipped and stored": lambda tx: (sl.ClipByGlobalNorm(0.1) | tx).store("int8", min_size=1),
    "clipped and written": lambda tx: (sl.ClipByGlobalNorm(0.1) | tx).write("kahan"),
    "clipped in a mask": lambda tx: sl.ClipByGlobalNorm(0.1).mask(sl.where.path("w")) | tx,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", INSIDE)
def test_what_is_inside_sees_gradients_that_are_not_scaled(step, name):
    tx = INSIDE[name](sl.adamw(0.1))
    plain, state = (
        (params, sl.Optimizer(tx, params)),
        (params, sl.Optimizer(tx.scale_loss(), params)),
    )
    for grads in (GOOD, jax.tree.map(lambda g: -0.5 * g, GOOD)):
        plain = plain[1].step(plain[0], grads)
        state = step(*state, grads)
    assert_same_bits((state[0], state[1].state.inner), (plain[0], plain[1].state))


@pytest.mark.slow
def test_state_is_stored_inside_and_outside(step):
    inside = params, sl.Optimizer(sl.adam(0.1).store("int8", min_size=1).scale_loss(), params)
    outside = params, sl.Optimizer(sl.adam(0.1).scale_loss().store("int8", min_size=1), params)
    for grads in (GOOD, BAD, GOOD):
        inside, outside = step(*inside, grads), step(*outside, grads)
    assert int(outside[1].metrics["total_notfinite"]) == 1
    for a, b in zip(*map(jax.tree.leaves, (inside[0], outside[0])), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3)


SCRATCH = {
    "clipped": (sl.ClipByGlobalNorm(1.0) | sl.adamw(1e-3), 0.01),
    # The codes are decoded leaf by leaf: at most 3.5 bytes per parameter, of 4.
    "clipped and stored": ((sl.ClipByGlobalNorm(1.0) | sl.adamw(1e-3)).store("int8"), 0.875),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRATCH)
def test_no_gradient_is_written_to_memory_to_divide_it(name):
    tx, most = SCRATCH[name]
    model = {f"w{i}": jax.ShapeDtypeStruct((1536, 1024), jnp.float32) for i in range(8)}
    opt = sl.Optimizer(tx.scale_loss(), model)
    step = jax.jit(lambda model, opt, grads: opt.step(model, grads), donate_argnums=(0, 1))
    memory = step.lower(model, opt, model).compile().memory_analysis()
    assert memory.temp_size_in_bytes <= most * 8 * 1536 * 1024 * 4


def test_the_scale_is_1_without_the_wrapper():
    opt = sl.Optimizer(sl.adam(0.1), params)
    assert opt.loss_scale.dtype == jnp.float32
    assert float(opt.loss_scale) == 1


# --- in a training step -------------------------------------------------------------------------


class Uses(sl.AbstractTransform):
    """Records what the context holds."""

    needs = ("value", "grad", "value_fn")

    def init(self, params):
        return jnp.zeros(3)

    def update(self, updates, state, params=None, context=None):
        total = sum(map(jnp.sum, jax.tree.leaves(context.grad)))
        return updates, jnp.stack([context.value, total, context.value_fn(params)])


def quadratic(model, x):
    return x * (model["w"] ** 2).sum(), {"seen": x}


@pytest.mark.parametrize("microbatches", slow_except([None, 2], None))
def test_a_training_step_returns_and_passes_on_what_is_not_scaled(microbatches):
    def loss_fn(model, x):
        loss, aux = quadratic(model, x.mean())
        return loss, x.size * 1.0, aux

    options = {"has_aux": True, "has_weight": True, "microbatches": microbatches}
    x, model = jnp.array([1.0, 3.0]), {"w": params["w"]}
    opt = sl.Optimizer((Uses() | sl.sgd(0.125)).scale_loss(), model)
    new, after, (loss, weight, aux) = sl.train_step(loss_fn, **options)(model, opt, x)
    assert (float(loss), float(weight), float(aux["seen"].mean())) == (10, 2, 2)
    np.testing.assert_array_equal(after.state_of(Uses), [10, -4, 10])
    np.testing.assert_array_equal(new["w"], model["w"] * 0.5)


@pytest.mark.slow
def test_a_line_search_finds_the_same_rates_as_without():
    step, models = sl.train_step(lambda model: jnp.sum(model["w"] ** 4) + model["b"] ** 2), []
    for tx in (sl.lbfgs(), sl.lbfgs().scale_loss(4.0)):
        model, opt = params, sl.Optimizer(tx, params)
        for _ in range(3):
            model, opt, _ = step(model, opt)
        models.append(model)
    assert_same_bits(*models)


def tiny_gradients(model, x, y):
    """A loss whose gradients float16 cannot hold."""
    prediction = (x @ model["w"] + model["b"]).astype(jnp.float32)
    return 1e-3 * jnp.mean((1e-2 * (prediction - y.astype(jnp.float32))) ** 2)


def trained(tx, compute_dtype, steps=60):
    x = jax.random.normal(jax.random.key(0), (64, 3))
    y = x @ jnp.array([1.0, -0.5, 0.25]) + 0.5
    step = sl.train_step(tiny_gradients, compute_dtype=compute_dtype)
    model = {"w": jnp.zeros(3), "b": jnp.zeros(())}
    opt = sl.Optimizer(tx, model)
    for _ in range(steps):
        model, opt, loss = step(model, opt, x, y)
    return float(loss / tiny_gradients({"w": jnp.zeros(3), "b": jnp.zeros(())}, x, y)), opt


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The loss is computed in float16")
def test_a_model_in_float16_trains_with_it_and_not_without():
    tx = sl.adam(0.1)
    without, _ = trained(tx, "float16")
    scaled, opt = trained(tx.scale_loss(2.0**40, growth_interval=30), "float16")
    exact, _ = trained(tx, None)
    assert without > 0.5
    assert scaled < 2e-3
    assert exact < 2e-3
    assert int(opt.metrics["total_notfinite"]) > 0
    assert float(opt.loss_scale) < 2.0**40


def test_calls_of_a_training_step_compile_once():
    traces = 0

    @sl.train_step(compute_dtype="float16", donate="all")
    def step(model, x):
        nonlocal traces
        traces += 1
        return (model["w"] * x).astype(jnp.float32).sum()

    model = jax.tree.map(jnp.copy, params)
    opt = sl.Optimizer(sl.adam(0.1).scale_loss(growth_interval=2), model)
    # The second one overflows.
    for x in (1.0, 60000.0, 1.0, 1.0):
        model, opt, loss = step(model, opt, jnp.array(x))
    assert traces == 1
    assert opt.metrics.to_dict()["scale_loss.total_notfinite"] == 1
    assert loss.dtype == jnp.float32


# --- with others --------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_window_outside_keeps_one_scale_and_is_skipped_as_a_whole(step):
    tx = sl.sgd(0.125).scale_loss(growth_interval=1).every_k(2)
    state = params, sl.Optimizer(tx, params)
    scales = []
    for grads in (GOOD, BAD, GOOD, GOOD):
        state = step(*state, grads)
        scales.append(float(state[1].loss_scale) / START)
    assert scales == [1, 0.5, 0.5, 1]
    expected = jax.tree.map(lambda p, g: p - 0.125 * g, params, GOOD)
    assert_same_bits(state[0], expected)


@pytest.mark.slow
def test_a_window_inside_skips_single_mini_batches(step):
    tx = sl.sgd(0.125).every_k(2).scale_loss(growth_interval=2)
    state = params, sl.Optimizer(tx, params)
    scales, minis = [], []
    for grads in (GOOD, BAD, GOOD):
        state = step(*state, grads)
        scales.append(float(state[1].loss_scale) / START)
        minis.append(int(state[1].metrics["mini_step"]))
    assert scales == [1, 0.5, 0.5]
    assert minis == [1, 1, 0]
    expected = jax.tree.map(lambda p, g: p - 0.125 * g, params, GOOD)
    assert_same_bits(state[0], expected)


AROUND = {
    "only": lambda tx: tx.only(sl.where.path("w")),
    "average": lambda tx: tx.average(),
    "lookahead": lambda tx: tx.lookahead(2, 0.5),
    "schedule_free": lambda tx: tx.schedule_free(),
    "write": lambda tx: tx.write("master"),
    "project": lambda tx: tx.project(sl.projections.l2_ball(2.0)),
    "drive": lambda tx: tx.drive({"learning_rate": sl.schedules.ReduceOnPlateau(0.1)}),
    "split_complex": lambda tx: tx.split_complex(),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", AROUND)
def test_what_may_be_outside_may_as_well_be_inside(name):
    around = AROUND[name]
    results = []
    for tx in (around(sl.rmsprop(0.1).scale_loss()), around(sl.rmsprop(0.1)).scale_loss()):
        state = params, sl.Optimizer(tx, params)
        for grads in (GOOD, BAD if name != "only" else GOOD, GOOD):
            state = state[1].step(state[0], scaled(grads, state[1]), value=jnp.ones(()))
        model, opt = state
        results.append((model, opt.eval_params(model), opt.loss_scale))
    assert_same_bits(*results)


@pytest.mark.slow
def test_parameters_that_are_not_updated_do_not_count(step):
    tx = sl.sgd(0.125).scale_loss().only(sl.where.path("b"))
    model, opt = step(params, sl.Optimizer(tx, params), BAD)
    assert float(model["b"]) == 0.875
    assert float(opt.loss_scale) == START


@pytest.mark.slow
def test_reset_and_rebind_keep_the_scale(step):
    opt = sl.Optimizer(sl.adam(0.1).scale_loss(), params)
    model, opt = step(params, opt, BAD)
    assert float(opt.reset(model).loss_scale) == START / 2
    assert float(opt.reset(model, where=sl.where.path("w")).loss_scale) == START / 2
    again, report = opt.rebind(model, tx=sl.adam(0.1).scale_loss(growth_interval=3))
    assert float(again.loss_scale) == START / 2
    assert not report.dropped
    begun, _ = sl.Optimizer(sl.adam(0.1), params).rebind(model, tx=sl.adam(0.1).scale_loss())
    assert float(begun.loss_scale) == START


@pytest.mark.slow
def test_runs_under_vmap_have_a_scale_each():
    def run(rate, factor):
        opt = sl.Optimizer(sl.sgd(rate).scale_loss(), params)
        return opt.step(params, jax.tree.map(lambda g: factor * opt.loss_scale * g, GOOD))

    models, opt = eqx.filter_vmap(run)(jnp.array([0.5, 0.25]), jnp.array([1.0, 1e38]))
    np.testing.assert_array_equal(opt.loss_scale, [START, START / 2])
    np.testing.assert_array_equal(models["b"], [0.5, 1])
    plain = eqx.filter_vmap(lambda rate: sl.Optimizer(sl.sgd(rate), params))(jnp.ones(2))
    np.testing.assert_array_equal(plain.loss_scale, [1, 1])


@pytest.mark.slow
def test_the_scale_is_saved(tmp_path, step):
    opt = sl.Optimizer(sl.adam(0.1).scale_loss(), params)
    model, opt = step(params, opt, BAD)
    sl.checkpoint.save(tmp_path / "file", model=model, opt=opt)
    like = sl.Optimizer(sl.adam(0.1).scale_loss(), params)
    loaded = sl.checkpoint.load(tmp_path / "file", model=params, opt=like)
    assert_same_bits(loaded["opt"].state, opt.state)


def test_the_scale_can_be_read_after_a_donation():
    model = jax.tree.map(jnp.copy, params)
    opt = sl.Optimizer(sl.sgd(0.1).scale_loss(), model)
    before = opt.loss_scale
    sl.train_step(lambda model: model["b"])(model, opt)
    assert float(before) == START
    with pytest.raises(ValueError, match="donated"):
        _ = opt.loss_scale


def test_numbers_print_and_compare_as_given():
    tx = sl.wrappers.ScaleLoss(sl.sgd(0.1), np.float32(8), 5)
    assert repr(tx) == "sl.ScaleByLearningRate(0.1).scale_loss(8.0, growth_interval=5)"
    assert tx == copy.deepcopy(tx) == sl.sgd(0.1).scale_loss(8, 5)


@pytest.mark.slow
def test_without_a_norm_it_needs_no_scratch_memory():
    big = {"a": jnp.ones((256, 512)), "b": jnp.ones((256, 512))}
    size = sum(x.nbytes for x in big.values())
    for tx in (sl.adamw(0.1).scale_loss(), sl.adamw(0.1).scale_loss().every_k(2)):
        opt = sl.Optimizer(tx, big)
        step = jax.jit(lambda p, opt, g: opt.step(p, g), donate_argnums=(0, 1))
        program = step.lower(big, opt, big).compile()
        assert program.memory_analysis().temp_size_in_bytes < 0.01 * size
