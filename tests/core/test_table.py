"""Every row of the table has every property that an optimizer promises.

Most of the time goes to compiling. So the tests of one row run one after the other and share its
program, on leaves of mixed dtypes. Properties that need programs of their own are tested without
recipes, which are chains of rules, and each on a fourth of the other rows.
"""

import contextlib
import copy
import dataclasses
import functools
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import config as jaxtyping_config

import slalom as sl
from helpers import assert_same_bits, kind_of, known, slow_except, unoptimized
from slalom._core.state.walk import parts, transforms
from table import (
    BUT_RECIPES,
    EVERYTHING,
    PER_EXAMPLE,
    QUICK,
    WRAPPERS,
    every_fourth,
    everyday,
)

QUICK_ROWS = pytest.mark.parametrize("tx", [EVERYTHING[name] for name in QUICK], ids=list(QUICK))
SINGLE = (jnp.float32,) * 3
MIXED = (jnp.bfloat16, jnp.float32, jnp.float16)

COMPLEX = {
    name: tx
    for name, tx in EVERYTHING.items()
    # bfloat16 moments cannot hold a complex mean of squares' mean: the twin of bfloat16 is wider.
    if "dtypes" not in name
    # Complex numbers are neither above nor below zero.
    and "Nonnegative" not in name
    # Rprop compares signs, which complex numbers have no two of: `test_adaptive.py` has its error.
    and "rprop" not in name.lower()
    # The diagonal of a complex Hessian has no sign: their own tests have the errors.
    and not {"sophia", "ivon"} & set(name.lower().replace("scaleby", "").split())
}


def rows_from(first):
    names = every_fourth(BUT_RECIPES, first)
    return pytest.mark.parametrize("tx", [EVERYTHING[name] for name in names], ids=names)


def make_params(dtypes=SINGLE):
    a, b, c = dtypes
    return {
        "w": jnp.linspace(-1, 1, 6).reshape(2, 3).astype(a),
        "b": (jnp.linspace(0.5, 1, 3).astype(b), jnp.asarray(0.25, c)),
        "empty": jnp.zeros((0, 2), a),
        "hole": None,
    }


def make_grads(params):
    return jax.tree.map(lambda p: (p * 0 + 0.5).astype(p.dtype), params)


@contextlib.contextmanager
def unchecked():
    """Without checks of types, which take a quarter of the time."""
    jaxtyping_config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping_config.update("jaxtyping_disable", False)


def pointers(tree):
    return [x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree) if x.size]


def returns_updates(tx):
    """Whether half-precision parameters have updates that can be added to them."""
    policies = [
        part.module.policy for part in parts(tx) if isinstance(part.module, sl.wrappers.Write)
    ]
    return set(policies) <= {"nearest"}


class TwoSteps:
    """An update and two steps by one program, and how everything was before them."""

    def __init__(self, tx, params, *, donate=False):
        grads = make_grads(params)
        opt = sl.Optimizer(tx, params)
        self.before = kind_of((params, opt))
        self.pointers = pointers((params, opt))
        self.start = jax.tree.map(jnp.copy, params)

        def both(params, opt):
            updated = None
            if returns_updates(tx):
                updated = opt.update(params, grads, **known(params, grads))
            return updated, opt.step(params, grads, **known(params, grads))

        program = jax.jit(both, donate_argnums=(0, 1) if donate else ())
        self.updated, self.stepped = program(params, opt)
        _, (self.params, self.opt) = program(*jax.tree.map(jnp.copy, self.stepped))
        self.compilations = program._cache_size()


class Row:
    """A row of the table, and what its tests share."""

    def __init__(self, name):
        self.name = name
        self.tx = EVERYTHING[name]

    @functools.cached_property
    def mixed(self):
        """Two steps on leaves of several dtypes, which give away their memory."""
        # Compiling takes as long as there are leaves: the others are among those of the slow tests.
        params = make_params((jnp.bfloat16, jnp.float32, jnp.float32))
        params["b"] = params["b"][1:]
        del params["empty"]
        if self.name in COMPLEX:
            params["z"] = jnp.array([[1 + 2j, 3 - 1j]], jnp.complex64)
        with unoptimized(), unchecked():  # the test of `scan` and `cond` checks the types
            return TwoSteps(self.tx, params, donate=True)


@pytest.fixture(scope="module", params=everyday(list(EVERYTHING)))
def row(request):
    return Row(request.param)


def test_no_public_transform_is_missing_from_the_table():
    public = {
        name
        for name, value in vars(sl).items()
        if isinstance(value, type)
        and issubclass(value, sl.AbstractTransform)
        and not name.startswith("Abstract")
    }
    rows = {part.split(" ")[0] for name in EVERYTHING | PER_EXAMPLE for part in name.split(", ")}
    assert public - rows == set()


def assert_nothing_changed_but_values(steps):
    assert kind_of((steps.params, steps.opt)) == steps.before
    assert steps.compilations == 1
    assert all(jnp.all(jnp.isfinite(p)) for p in jax.tree.leaves(steps.params))


def assert_added_is_stepped(params, updated, stepped):
    (updates, by_update), (after, by_step) = updated, stepped
    for added, p in zip(
        jax.tree.leaves(sl.apply_updates(params, updates)), jax.tree.leaves(after), strict=True
    ):
        # Updates are rounded to the parameter's dtype before they are added, and the sum again.
        unit = max(float(jnp.finfo(p.dtype).eps), 5e-7)
        np.testing.assert_allclose(*sl.tree.widened((added, p)), rtol=2 * unit, atol=2 * unit)
    for a, b in zip(by_update.arrays, by_step.arrays, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_step_returns_what_it_was_given(row):
    assert_nothing_changed_but_values(row.mixed)


def test_complex_parameters_stay_complex_and_finite(row):
    if row.name not in COMPLEX:
        pytest.skip("this rule takes no complex numbers")
    assert row.mixed.params["z"].dtype == jnp.complex64
    assert jnp.all(jnp.isfinite(row.mixed.params["z"]))


def test_no_buffer_stands_twice_so_everything_can_be_donated(row):
    assert len(set(row.mixed.pointers)) == len(row.mixed.pointers)
    params = make_params()
    own = pointers((params, sl.Optimizer(row.tx, params)))
    assert len(set(own)) == len(own)


def test_update_then_add_is_step(row):
    if not returns_updates(row.tx):
        pytest.skip("`opt.update` is refused, as `test_writing.py` tests")
    assert_added_is_stepped(row.mixed.start, row.mixed.updated, row.mixed.stepped)


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


def test_scan_and_cond_carry_an_optimizer_in_double_precision(row, x64, typechecked):
    params = make_params((jnp.float64, jnp.float32, jnp.bfloat16))
    opt = sl.Optimizer(row.tx, params)

    def check(before, after):
        assert jax.tree.structure(after) == jax.tree.structure(before)
        for x, y in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
            assert (x.shape, x.dtype, x.weak_type) == (y.shape, y.dtype, y.weak_type)

    # Tracing tells all but where the arrays lie, which is no matter of their dtypes.
    jax.eval_shape(lambda p, o: scan_four(p, o, make_grads(params), check), params, opt)


def test_copied_and_pickled_optimizers_are_the_same(row):
    params = make_params()
    opt = sl.Optimizer(row.tx, params)
    copies = [copy.deepcopy(opt)]
    if "lambda" not in repr(row.tx):  # Python pickles no lambda
        copies.append(pickle.loads(pickle.dumps(opt)))
    for again in copies:
        assert again.binding == opt.binding
        assert hash(again.binding) == hash(opt.binding)
        assert eqx.tree_equal(again.arrays, opt.arrays)


def test_shapes_alone_are_enough_to_plan(row):
    params = make_params()
    shapes = jax.eval_shape(lambda: sl.Optimizer(row.tx, params))
    assert jax.tree.structure(shapes) == jax.tree.structure(sl.Optimizer(row.tx, params))


def test_a_tree_without_any_leaf_is_stepped_over(row):
    nothing = {"hole": None}

    def update():
        context = sl.Context(step=0, **known(nothing, nothing))
        return row.tx.update(nothing, row.tx.init(nothing), nothing, context)[0]

    assert jax.eval_shape(update) == nothing


def test_the_code_it_prints_makes_it_again(row):
    if "lambda" in repr(row.tx):
        pytest.skip("a function has no code to print")
    assert eval(repr(row.tx), {"sl": sl}) == row.tx


# --- with programs of their own ---------------------------------------------------------------


@pytest.mark.slow
@rows_from(0)
@unoptimized()
def test_update_then_add_is_step_outside_of_jit_and_without_donation(tx):
    if not returns_updates(tx):
        pytest.skip("`opt.update` is refused, as `test_writing.py` tests")
    params = make_params(MIXED)
    grads = make_grads(params)
    opt = sl.Optimizer(tx, params)
    updated = opt.update(params, grads, **known(params, grads))
    stepped = opt.step(params, grads, **known(params, grads))
    assert kind_of(stepped) == kind_of((params, opt))
    assert_added_is_stepped(params, updated, stepped)


@pytest.mark.slow
@rows_from(1)
@unoptimized()
def test_a_scan_takes_the_same_steps(tx):
    params = make_params()
    grads = make_grads(params)
    opt = sl.Optimizer(tx, params)
    scanned, last = jax.jit(scan_four)(params, opt, grads)
    step = jax.jit(lambda params, opt: opt.step(params, grads, **known(params, grads)))
    twice, _ = step(*step(params, opt))
    assert int(last.count) == 2
    for a, b in zip(jax.tree.leaves(scanned), jax.tree.leaves(twice), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("tx", WRAPPERS.values(), ids=WRAPPERS.keys())
def test_observing_changes_no_bit(tx):
    params = make_params()
    grads = make_grads(params)

    def run(tx):
        trained, opt = params, sl.Optimizer(tx, params)
        for _ in range(3):
            trained, opt = opt.step(trained, grads, **known(trained, grads))
        return trained, opt.eval_params(trained)

    assert_same_bits(run(recorded(tx)), run(tx))


def recorded(tx):
    """A transform with `.record()` as far outside as it may be: not around `.scale_loss()`."""
    if not any(isinstance(part.module, sl.wrappers.ScaleLoss) for part in transforms(tx)):
        return tx.record()
    is_scaled = isinstance(tx, sl.wrappers.ScaleLoss)
    return dataclasses.replace(tx, inner=(tx.inner.record() if is_scaled else recorded(tx.inner)))


mesh = Mesh(np.array(jax.devices()), ("data",))


@pytest.mark.slow
@QUICK_ROWS
@unoptimized()
def test_step_leaves_everything_where_it_lies_on_a_mesh(tx):
    everywhere = NamedSharding(mesh, PartitionSpec())
    params = jax.tree.map(lambda p: jax.device_put(np.asarray(p), everywhere), make_params())
    grads = make_grads(params)
    opt = sl.Optimizer(tx, params)
    assert all(leaf.sharding == everywhere for leaf in opt.arrays)
    assert kind_of(opt.step(params, grads, **known(params, grads))) == kind_of((params, opt))


@pytest.mark.slow
@rows_from(2)
@unoptimized()
def test_vmap_over_runs_equals_the_runs(tx):
    grads = make_grads(make_params())
    scales = jnp.array([1.0, 2.0])

    def run(scale):
        params = jax.tree.map(lambda p: p * scale, make_params())
        opt = sl.Optimizer(tx, params)
        for _ in range(2):
            params, opt = opt.step(params, grads, **known(params, grads))
        return params

    together = jax.jit(jax.vmap(run))(scales)
    alone = jax.jit(lambda: run(scales[1]))()
    # A solve with the matrix of three examples multiplies rounding errors by its condition number.
    solves = any("residuals" in part.module.needs for part in transforms(tx))
    rtol, atol = (1e-3, 1e-4) if solves else (1e-5, 1e-6)
    for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(a[1], b, rtol=rtol, atol=atol)


SWITCHED = ("EveryK", "Mechanize")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "name",
    slow_except(every_fourth(BUT_RECIPES, 3, *SWITCHED, "ScaleByZoomLinesearch"), *SWITCHED),
)
@pytest.mark.parametrize("created", [False, True], ids=["switched on", "switched off"])
def test_an_optimizer_steps_when_x64_is_switched_or_says_so(created, name):
    params = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
    grads = make_grads(params)
    with jax.enable_x64(created):
        opt = sl.Optimizer(EVERYTHING[name], params)

    def step(params, opt):
        return opt.step(params, grads, **known(params, grads))

    with jax.enable_x64(not created), unchecked():
        message = "This optimizer was created with x64"
        try:
            jax.eval_shape(step, params, opt)
        except (TypeError, ValueError) as error:
            message = str(error)
        assert message.startswith("This optimizer was created with x64")
        opt, _ = opt.rebind(params)
        jax.eval_shape(step, params, opt)


# A dimension and a number of entries that no int32 holds. Nothing is allocated.
LARGE = {"a matrix": (2**16, 2**16), "a vector": (2**31 + 8,)}
DIVIDES = ("adafactor", "stable_adamw", "adam_mini", "Cautious")
# A matrix with a row for each parameter is refused.
SOLVED_WHOLE = (
    "ScaleBySelfScaledBroyden",
    "ScaleBySelfScaledBroyden, plain",
    "ss_broyden",
    "ScaleByGaussNewton, momentum",
    "ScaleByGaussNewton, qr",
    "ScaleByLevenbergMarquardt, columns",
)
COUNTED = [
    name for name in EVERYTHING if name in (*BUT_RECIPES, *DIVIDES) and name not in SOLVED_WHOLE
]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", slow_except(COUNTED, *DIVIDES))
@pytest.mark.parametrize("shape", slow_except(LARGE, "a vector"))
def test_a_leaf_may_have_more_entries_than_an_int_counts(shape, name):
    def step(params):
        grads = make_grads(params)
        opt = sl.Optimizer(EVERYTHING[name], params)
        return opt.step(params, grads, **known(params, grads))[0]

    params = {"w": jax.ShapeDtypeStruct(LARGE[shape], jnp.float32)}
    with unchecked():
        assert jax.eval_shape(step, params) == params


@pytest.mark.slow
@QUICK_ROWS
def test_a_whole_model_gives_what_its_arrays_give(tx):
    model = eqx.nn.MLP(2, 1, 3, 1, key=jax.random.key(0))
    arrays = eqx.filter(model, eqx.is_inexact_array)
    grads = jax.tree.map(jnp.ones_like, arrays)

    stepped, opt = sl.Optimizer(tx, model).step(model, grads, **known(model, grads))
    expected, filtered = sl.Optimizer(tx, arrays).step(arrays, grads, **known(arrays, grads))

    assert stepped.activation is model.activation
    assert eqx.tree_equal(eqx.filter(stepped, eqx.is_inexact_array), expected)
    assert eqx.tree_equal(opt.state, filtered.state)
