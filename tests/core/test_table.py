"""Every row of the table has every property that an optimizer promises, exact resume included.

`tests/table/__init__.py` says which rows run when. The tests of one row run one after the other,
and share its optimizer and its program.
"""

import copy
import dataclasses
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import slalom as sl
from helpers import assert_close, assert_same_bits, kind_of, known, transforms_in
from table import BUT_RECIPES, EVERYTHING, ONE_OF_EACH_KIND, PER_EXAMPLE, WRAPPERS, rows
from table.row import COMPLEX, make_grads, make_params, pointers

WITH_PER_EXAMPLE = EVERYTHING | PER_EXAMPLE
MIXED = (jnp.bfloat16, jnp.float32, jnp.float16)


def test_no_public_transform_is_missing_from_the_table():
    public = {
        name
        for name, value in (vars(sl) | vars(sl.contrib)).items()
        if isinstance(value, type)
        and issubclass(value, sl.AbstractTransform)
        and not name.startswith("Abstract")
    }
    rows = {part.split(" ")[0] for name in WITH_PER_EXAMPLE for part in name.split(", ")}
    assert public - rows == set()


@rows(everyday=EVERYTHING)
def test_a_traced_step_returns_what_it_was_given(row):
    params = {"w": jnp.ones((2, 3)), "b": jnp.ones(2)}

    def step(params):
        opt = sl.Optimizer(row.tx, params)
        return (params, opt), opt.step(params, params, **known(params, params))

    before, after = jax.eval_shape(step, params)
    assert jax.tree.structure(after) == jax.tree.structure(before)
    assert jax.tree.leaves(after) == jax.tree.leaves(before)


def scan_four(params, opt, grads, check=lambda before, after: None):
    """A scan of four iterations, of which the first two step."""

    def step(params, opt):
        after = opt.step(params, grads, **known(params, grads))
        check((params, opt), after)
        return after

    def body(carry, _):
        carry = jax.lax.cond(carry[1].count < 2, step, lambda *same: same, *carry)
        return carry, carry[1].has_updated

    return jax.lax.scan(body, (params, opt), length=4)[0]


@rows()
def test_types_hold_where_scan_and_cond_carry_an_optimizer_in_float64(row, x64, typechecked):
    params = make_params((jnp.float64, jnp.float32, jnp.bfloat16))
    opt = sl.Optimizer(row.tx, params)

    def check(before, after):
        assert jax.tree.structure(after) == jax.tree.structure(before)
        for x, y in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
            assert (x.shape, x.dtype, x.weak_type) == (y.shape, y.dtype, y.weak_type)

    # Tracing tells all but where the arrays lie, which is no matter of their dtypes.
    jax.eval_shape(lambda p, o: scan_four(p, o, make_grads(params), check), params, opt)


@rows()
def test_copied_and_pickled_optimizers_are_the_same(row):
    copies = [copy.deepcopy(row.opt)]
    if "lambda" not in repr(row.tx):  # Python pickles no lambda
        copies.append(pickle.loads(pickle.dumps(row.opt)))
    for again in copies:
        assert again.binding == row.opt.binding
        assert hash(again.binding) == hash(row.opt.binding)
        assert eqx.tree_equal(again.arrays, row.opt.arrays)


@rows(WITH_PER_EXAMPLE, everyday=(*ONE_OF_EACH_KIND, *PER_EXAMPLE))
def test_shapes_alone_are_enough_to_plan(row):
    transforms = row.tx, row.opt.transform
    opts = jax.eval_shape(lambda: [sl.Optimizer(tx, row.params) for tx in transforms])
    assert [*map(jax.tree.structure, opts)] == 2 * [jax.tree.structure(row.opt)]


@rows(WITH_PER_EXAMPLE, everyday=(*ONE_OF_EACH_KIND, *PER_EXAMPLE))
def test_a_tree_without_any_leaf_is_stepped_over(row):
    nothing = {"hole": None}

    def update():
        context = sl.Context(step=0, **known(nothing, nothing))
        return row.tx.update(nothing, row.tx.init(nothing), nothing, context)[0]

    assert jax.eval_shape(update) == nothing


@rows(WITH_PER_EXAMPLE, everyday=(*ONE_OF_EACH_KIND, *PER_EXAMPLE), ci=EVERYTHING)
def test_the_code_it_prints_makes_it_again(row):
    if "lambda" in repr(row.tx):
        pytest.skip("a function has no code to print")
    assert eval(repr(row.tx), {"sl": sl}) == row.tx


# A dimension and a number of entries that no int32 holds. Nothing is allocated.
LARGE = {"a matrix": (2**16, 2**16), "a vector": (2**31 + 8,)}
DIVIDES = ("adafactor", "stable_adamw", "adam_mini", "Cautious")
# A matrix with a row for each parameter is refused, and JAX sorts no more than an int32 counts.
SOLVED_WHOLE = (
    *("ScaleByLbfgs, in a box", "ScaleBySelfScaledBroyden", "ScaleBySelfScaledBroyden, plain"),
    *("ss_broyden", "ScaleByGaussNewton, momentum", "ScaleByGaussNewton, qr"),
    "ScaleByLevenbergMarquardt, columns",
)


@rows([name for name in EVERYTHING if name not in SOLVED_WHOLE], everyday=DIVIDES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_leaf_may_have_more_entries_than_an_int_counts(row):
    def step(params):
        grads = make_grads(params)
        opt = sl.Optimizer(row.tx, params)
        return opt.step(params, grads, **known(params, grads))[0]

    for shape in LARGE.values():
        params = {"w": jax.ShapeDtypeStruct(shape, jnp.float32)}
        assert jax.eval_shape(step, params) == params


def assert_added_is_stepped(params, updated, stepped):
    (updates, by_update), (after, by_step) = updated, stepped
    for added, p in zip(
        jax.tree.leaves(sl.apply_updates(params, updates)), jax.tree.leaves(after), strict=True
    ):
        # Updates are rounded to the parameter's dtype before they are added, and the sum again.
        unit = max(float(jnp.finfo(p.dtype).eps), 5e-7)
        np.testing.assert_allclose(*sl.tree.widened((added, p)), rtol=2 * unit, atol=2 * unit)
    assert_close(by_update, by_step, rtol=1e-6)


@rows(WITH_PER_EXAMPLE, ci=PER_EXAMPLE)
def test_step_returns_what_it_was_given(row):
    steps = row.mixed
    assert kind_of((steps.params, steps.opt)) == steps.before
    assert steps.compilations == 1
    assert all(jnp.all(jnp.isfinite(p)) for p in jax.tree.leaves(steps.params))
    if row.name in COMPLEX:
        assert steps.params["z"].dtype == jnp.complex64


@rows()
def test_no_buffer_stands_twice_so_everything_can_be_donated(row):
    for own in (row.mixed.pointers, pointers((row.params, row.opt))):
        assert len(set(own)) == len(own)


@rows()
def test_update_then_add_is_step(row):
    if not row.returns_updates:
        pytest.skip("`opt.update` is refused, as `test_writing.py` tests")
    assert_added_is_stepped(row.mixed.start, row.mixed.updated, row.mixed.stepped)


@rows(BUT_RECIPES, everyday=())
def test_update_then_add_is_step_outside_of_jit_and_without_donation(row):
    if not row.returns_updates:
        pytest.skip("`opt.update` is refused, as `test_writing.py` tests")
    params = make_params(MIXED)
    grads = make_grads(params)
    opt = sl.Optimizer(row.tx, params)
    updated = opt.update(params, grads, **known(params, grads))
    stepped = opt.step(params, grads, **known(params, grads))
    assert kind_of(stepped) == kind_of((params, opt))
    assert_added_is_stepped(params, updated, stepped)


@rows(BUT_RECIPES, everyday=(), ci=("Partition",))
def test_a_scan_takes_the_same_steps(row):
    params, opt = row.params, row.opt
    grads = make_grads(params)
    scanned, last = jax.jit(scan_four)(params, opt, grads)
    step = jax.jit(lambda params, opt: opt.step(params, grads, **known(params, grads)))
    twice, _ = step(*step(params, opt))
    assert int(last.count) == 2
    assert_close(scanned, twice, rtol=1e-5, atol=1e-6)


@rows(WRAPPERS, everyday=())
def test_observing_changes_no_bit(row):
    params = row.params
    grads = make_grads(params)

    def run(tx):
        trained, opt = params, sl.Optimizer(tx, params)
        for _ in range(3):
            trained, opt = opt.step(trained, grads, **known(trained, grads))
        return trained, opt.eval_params(trained)

    assert_same_bits(run(recorded(row.tx)), run(row.tx))


def recorded(tx):
    """A transform with `.record()` as far outside as it may be: not around `.scale_loss()`."""
    if not any(transforms_in(tx, sl.wrappers.ScaleLoss)):
        return tx.record()
    is_scaled = isinstance(tx, sl.wrappers.ScaleLoss)
    return dataclasses.replace(tx, inner=(tx.inner.record() if is_scaled else recorded(tx.inner)))


mesh = Mesh(np.array(jax.devices()), ("data",))


@rows(everyday=(), ci=ONE_OF_EACH_KIND)
def test_step_leaves_everything_where_it_lies_on_a_mesh(row):
    everywhere = NamedSharding(mesh, PartitionSpec())
    params = jax.tree.map(lambda p: jax.device_put(np.asarray(p), everywhere), make_params())
    grads = make_grads(params)
    opt = sl.Optimizer(row.tx, params)
    assert all(leaf.sharding == everywhere for leaf in jax.tree.leaves(opt))
    assert kind_of(opt.step(params, grads, **known(params, grads))) == kind_of((params, opt))


@rows(BUT_RECIPES, everyday=())
def test_vmap_over_runs_equals_the_runs(row):
    grads = make_grads(make_params())
    scales = jnp.array([1.0, 2.0])
    # In units of small columns the first step is so long that the second one depends on rounding in
    # float32. In float64 they agree to 1e-9.
    steps = 1 if row.name == "ScaleByLevenbergMarquardt, columns" else 2

    def run(scale):
        params = jax.tree.map(lambda p: p * scale, make_params())
        opt = sl.Optimizer(row.tx, params)
        for _ in range(steps):
            params, opt = opt.step(params, grads, **known(params, grads))
        return params

    together = jax.jit(jax.vmap(run))(scales)
    alone = jax.jit(lambda: run(scales[1]))()
    # A solve with the matrix of three examples multiplies rounding errors by its condition number.
    solves = any("residuals" in part.needs for part in transforms_in(row.tx))
    rtol, atol = (1e-3, 1e-4) if solves else (1e-5, 1e-6)
    assert_close(jax.tree.map(lambda x: x[1], together), alone, rtol=rtol, atol=atol)


@rows(BUT_RECIPES, everyday=("EveryK", "Mechanize"), ci=("ScaleByZoomLinesearch",))
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("created", [False, True], ids=["switched on", "switched off"])
def test_an_optimizer_steps_when_x64_is_switched_or_says_so(created, row):
    params = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
    grads = make_grads(params)
    with jax.enable_x64(created):
        opt = sl.Optimizer(row.tx, params)

    def step(params, opt):
        return opt.step(params, grads, **known(params, grads))

    with jax.enable_x64(not created):
        message = "This optimizer was created with x64"
        try:
            jax.eval_shape(step, params, opt)
        except (TypeError, ValueError) as error:
            message = str(error)
        assert message.startswith("This optimizer was created with x64")
        opt, _ = opt.rebind(params)
        jax.eval_shape(step, params, opt)


@rows(everyday=(), ci=ONE_OF_EACH_KIND)
def test_a_whole_model_gives_what_its_arrays_give(row):
    model = eqx.nn.MLP(2, 1, 3, 1, key=jax.random.key(0))
    arrays = eqx.filter(model, eqx.is_inexact_array)
    grads = jax.tree.map(jnp.ones_like, arrays)

    stepped, opt = sl.Optimizer(row.tx, model).step(model, grads, **known(model, grads))
    expected, filtered = sl.Optimizer(row.tx, arrays).step(arrays, grads, **known(arrays, grads))

    assert stepped.activation is model.activation
    assert eqx.tree_equal(eqx.filter(stepped, eqx.is_inexact_array), expected)
    assert eqx.tree_equal(opt.state, filtered.state)


STEPS = 5
MODEL = {
    "w": jnp.linspace(-1, 1, 6).reshape(2, 3),
    "b": jnp.linspace(0.5, 1, 3).astype(jnp.bfloat16),
    "frozen": jnp.arange(3),
}


def loss_fn(model, x):
    hidden = jnp.tanh(x @ model["w"].astype(jnp.float32))
    return jnp.mean((hidden - model["b"].astype(jnp.float32)[None]) ** 2)


def batch(n):
    return jax.random.normal(jax.random.fold_in(jax.random.key(1), n), (4, 2))


def residual(model, x):
    """That of which `loss_fn` is the mean square, for rules that linearize it."""
    return jnp.tanh(x @ model["w"].astype(jnp.float32)) - model["b"].astype(jnp.float32)


def loss_for(tx):
    needs = {name for part in transforms_in(tx) for name in part.needs}
    if "terms" in needs:
        return lambda model, x: {"first": loss_fn(model, x), "second": jnp.sum(model["b"]) ** 2}
    return sl.LeastSquares(residual) if "residuals" in needs else loss_fn


ROWS = BUT_RECIPES | PER_EXAMPLE


def erased(x):
    """Zeros in the place of an array, whatever its dtype."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        words = jnp.zeros_like(jax.random.key_data(x))
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
    return jnp.zeros_like(x)


def steps(step, model, opt, start):
    """The model and the optimizer after each step."""
    history = []
    for n in range(start, STEPS):
        logits = jnp.full((1, 1), 150.0 + n)  # which only `sl.contrib.QKClip` reads
        model, opt, _ = step(model, opt, batch(n), context={"max_logits": logits})
        history.append((model, opt))
    return history


@rows(ROWS, everyday=("EveryK", "AddNoise"), ci=("Drive", "nested", *PER_EXAMPLE))
def test_a_row_resumes_bit_for_bit(row, tmp_path):
    step = sl.train_step(loss_for(row.tx), donate=False)
    start = sl.Optimizer(row.tx, MODEL)
    whole = steps(step, MODEL, start, 0)
    # Every step is a place to stop; some of them are inside of a window of accumulation.
    for stop in (1, 2, 3):
        stopped = dict(zip(("model", "opt"), whole[stop - 1], strict=True))
        path = tmp_path / f"{stop}.safetensors"
        sl.checkpoint.save(path, **stopped, step=stop)
        # Not one number of the new program is that of the old one.
        fresh = jax.tree.map(erased, {"model": MODEL, "opt": start})
        loaded = sl.checkpoint.load(path, **fresh, step=0, hyperparams="file")
        assert loaded.report.fits
        assert loaded["step"] == stop
        assert_same_bits({name: loaded[name] for name in stopped}, stopped)
        assert kind_of(loaded["opt"]) == kind_of(stopped["opt"])
        assert_same_bits(steps(step, loaded["model"], loaded["opt"], stop)[-1], whole[-1])
