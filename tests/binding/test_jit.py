"""One compile, no forced wait, safe donation, readable runtime errors."""

import dataclasses
import gc
import pickle
import subprocess
import sys
import weakref
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.tree_util import Partial

import slalom as sl
from helpers import Counting, after_training, mean_square, slow_except
from slalom._loop.binding.binding import named_arrays

x, y = jnp.ones((4, 2)), jnp.zeros((4, 2))


def make_model(seed=0):
    return eqx.nn.MLP(2, 2, 8, 1, key=jax.random.key(seed))


tx = (sl.ClipByGlobalNorm(1.0) | sl.adamw(1e-2)).every_k(2)


@pytest.mark.slow
def test_a_step_leaks_no_tracer_and_stays_on_the_device_of_the_model():
    opt = sl.Optimizer(sl.sgd(0.1), START)

    @jax.jit
    def run(model, opt, scale):
        return opt.step(model, model, value_fn=lambda m: jnp.sum(m["w"]) * scale)

    with jax.checking_leaks():
        run(START, opt, jnp.float32(2.0))

    device = jax.devices()[2]
    model = {"w": jax.device_put(np.ones(2, np.float32), device)}
    opt = sl.Optimizer(tx, model)
    model, opt = opt.step(model, model)
    assert {d for leaf in jax.tree.leaves(opt) for d in leaf.devices()} == {device}


class Scaled(eqx.Module):
    """A loss that carries a number, and counts its traces. It compares equal to others."""

    scale: jax.Array | float
    traces: list = eqx.field(static=True, default_factory=list)

    def __call__(self, model, x, y):
        self.traces.append(x.shape)
        return mean_square(model, x, y) * (10 if self.scale is True else self.scale)

    def method(self, model, x, y):
        return self(model, x, y)


@pytest.mark.slow
def test_losses_have_programs_of_their_own_that_are_forgotten_with_them():
    loss, model = Scaled(1), make_model()
    opt = sl.Optimizer(tx, model)
    first, second = sl.train_step(loss.method), sl.train_step(loss.method)
    model, opt, _ = first(model, opt, x, y)
    del first
    model, opt, _ = second(model, opt, x, y)
    second(model, opt, x[:2], y[:2])
    assert loss.traces == [(4, 2), (2, 2)]

    model = make_model()
    opt = sl.Optimizer(tx, model)
    losses = [Scaled(scale) for scale in (1, True)]
    assert losses[0] == losses[1]
    one, ten = (sl.train_step(loss, donate=False)(model, opt, x, y)[2] for loss in losses)
    np.testing.assert_allclose(ten, 10 * one, rtol=1e-6)

    model, loss_fn = make_model(), Counting(mean_square)
    step = sl.train_step(loss_fn)
    step(model, sl.Optimizer(tx, model), x, y)
    alive = weakref.ref(loss_fn)
    del step, loss_fn
    jax.clear_caches()
    gc.collect()
    assert alive() is None


@dataclasses.dataclass
class Weighted:
    """A loss without a hash, which equals others."""

    weight: float
    traces: list = dataclasses.field(default_factory=list)

    def __call__(self, model):
        self.traces.append(self.weight)
        return self.weight * jnp.sum(model["w"])


@pytest.mark.parametrize("as_loss", [lambda x: x, lambda x: x.__call__])
def test_losses_without_a_hash_are_told_apart_by_identity_and_forgotten(as_loss):
    opt = sl.Optimizer(sl.sgd(0.1), START)
    losses = [Weighted(1.0), Weighted(1.0)]
    for loss in (*losses, *losses):
        sl.train_step(as_loss(loss), donate=False)(START, opt)
    assert [loss.traces for loss in losses] == [[1.0], [1.0]]
    alive = weakref.ref(losses[0])
    del losses, loss
    gc.collect()
    assert alive() is None


def scaled(traces, scale, model, x, y, shift=0.0):
    return Scaled(scale + shift, traces.list)(model, x, y)


class Traces:
    """A static argument that a loss may write to."""

    def __init__(self):
        self.list = []


CARRIERS = {
    "module": lambda traces, scale: Scaled(scale, traces.list),
    "bound method": lambda traces, scale: Scaled(scale, traces.list).method,
    "functools.partial": lambda traces, scale: partial(scaled, traces, scale),
    "keywords": lambda traces, scale: partial(partial(scaled, traces, jnp.zeros(())), shift=scale),
    "partial of a method": lambda traces, scale: partial(Scaled(scale, traces.list).method, y=y),
    "jax.tree_util.Partial": lambda traces, scale: Partial(scaled, traces, scale),
    "jax's partial of a module": lambda traces, scale: Partial(Scaled(scale, traces.list), y=y),
    "eqx.Partial": lambda traces, scale: eqx.Partial(scaled, traces, scale),
}


@pytest.mark.parametrize("name", slow_except(CARRIERS, "bound method", "functools.partial"))
def test_another_loss_of_the_same_structure_does_not_compile_again(name):
    traces, model = Traces(), make_model()
    opt = sl.Optimizer(sl.sgd(0.1), model)
    args = (x,) if "of a" in name else (x, y)
    steps = [sl.train_step(CARRIERS[name](traces, jnp.float32(s)), donate=False) for s in (1, 2)]
    losses = [step(model, opt, *args)[2] for step in steps]
    assert len(traces.list) == 1
    np.testing.assert_allclose(losses[1], 2 * losses[0], rtol=1e-6)


def test_partial_losses_name_their_arguments_and_another_value_fn_compiles_nothing():
    def loss_fn(scale, model, x, y):
        return scale * mean_square(model, x, y)

    model = make_model()
    opt = sl.Optimizer(sl.sgd(0.1), model)
    loss_fn = partial(loss_fn, jnp.float32(2.0))
    step = sl.train_step(loss_fn, microbatches=2, batch_args=("x", "y"), donate=False)
    np.testing.assert_allclose(step(model, opt, x, y)[2], loss_fn(model, x, y), rtol=1e-6)

    traces, counts = [], []

    def value_fn(scale, model):
        traces.append(scale)
        return scale * jnp.sum(model**2)

    model = jnp.ones(2)
    opt = sl.Optimizer(sl.sgd(1.0) | sl.ScaleByBacktrackingLinesearch(3), model)
    for scale in jnp.array([1.0, 2.0]):
        opt.step(model, 2 * model, grad=2 * model, value=1.0, value_fn=partial(value_fn, scale))
        counts.append(len(traces))
    assert counts[0] == counts[1]


def test_without_a_loss_it_decorates_and_it_is_pickled_as_its_loss_and_options():
    @sl.train_step(has_aux=True, donate=False)
    def step(model, x, y):
        return mean_square(model, x, y), x

    model = make_model()
    _, _, (loss, aux) = step(model, sl.Optimizer(sl.sgd(0.1), model), x, y)
    np.testing.assert_allclose(loss, mean_square(model, x, y), rtol=1e-6)
    assert eqx.tree_equal(aux, x)

    step = pickle.loads(pickle.dumps(sl.train_step(sum_of, donate=False)))
    assert repr(step) == "sl.train_step(sum_of, donate=False)"


def test_static_arguments_are_not_mixed_up_across_types():
    seen = []

    def loss_fn(model, flag):
        seen.append(flag)
        return jnp.sum(model["w"] ** 2)

    opt = sl.Optimizer(sl.sgd(0.1), START)
    step = sl.train_step(loss_fn, donate=False)
    for flag in (1, True, 1.0, 1):
        step(START, opt, flag)
    assert [(type(flag), flag) for flag in seen] == [(int, 1), (bool, True), (float, 1.0)]


AT_THE_END = """
import json, jax.numpy as jnp, slalom as sl

class Settings:
    __eq__ = lambda self, other: True
    __hash__ = lambda self: len(json.dumps([]))

@sl.train_step
def step(model, settings):
    return jnp.sum(model)

step(jnp.ones(2), sl.Optimizer(sl.sgd(0.1), jnp.ones(2)), Settings())
"""


@pytest.mark.slow
def test_python_ends_in_silence_where_the_hash_of_an_argument_needs_a_module():
    done = subprocess.run([sys.executable, "-c", AT_THE_END], capture_output=True, check=True)
    assert done.stderr == b""


@pytest.mark.slow
def test_a_call_returns_before_its_work_is_done_also_beside_a_runtime_check():
    # About half a second of work, where a call that does not wait takes a millisecond.
    def loss_fn(model, matrix):
        matrix = jax.lax.fori_loop(0, 500, lambda _, m: jnp.tanh(m @ matrix), matrix)
        return jnp.sum(model["w"] * matrix)

    model, matrix = {"w": jnp.ones((256, 256))}, jnp.eye(256)
    step = sl.train_step(loss_fn, donate=False)
    opt = sl.Optimizer(sl.sgd(0.1), model)
    step(model, opt, matrix)[2].block_until_ready()  # compiled
    assert not step(model, opt, matrix)[2].is_ready()

    def loss_fn(model, checked):
        loss = jnp.sum(model["w"] ** 2)
        return eqx.error_if(loss, loss > 9, "too large") if checked else loss

    step = sl.train_step(loss_fn, donate=False)
    for checked in (True, False):
        step(START, sl.Optimizer(sl.sgd(0.1), START), checked)
    signatures = [*step._program.signatures.values()][-2:]
    assert [one.compiled is one.checked for one in signatures] == [True, False]


@pytest.mark.slow
def test_by_default_the_model_is_kept():
    model = best = make_model()
    before = jax.tree.map(jnp.copy, eqx.filter(model, eqx.is_array))
    opt = sl.Optimizer(tx, model)
    step = sl.train_step(mean_square)
    model, new_opt, _ = step(model, opt, x, y)
    model, new_opt, _ = step(model, new_opt, x, y)
    assert eqx.tree_equal(eqx.filter(best, eqx.is_array), before)
    state = list(named_arrays(opt.arrays).items())[len(jax.tree.leaves(opt.transform)) :]
    kept = [name for name, leaf in state if not leaf.is_deleted()]
    assert kept == ["every_k.updated"]  # written without being read, so JAX drops the argument
    with pytest.raises(ValueError, match=r"opt\.every_k.*(\n.*)+donate=False"):
        step(best, opt, x, y)
    step(best, new_opt, x, y)  # `best` goes on being a model like any other
    step(model, sl.Optimizer(tx, model), x, y)


@pytest.mark.slow
def test_donation_changes_no_number_and_learning_rates_share_a_program():
    model = {"w": jnp.linspace(-1, 1, 4).reshape(2, 2)}

    def loss_fn(model):
        return jnp.sum(model["w"] ** 2)

    def run(donate, opt):
        step = sl.train_step(loss_fn, donate=donate)
        stepped, opt, loss = after_training(step, opt, 4, model)
        return stepped, jax.tree.leaves(opt), loss

    opt = sl.Optimizer(tx, model)
    copied = run(False, opt)
    assert eqx.tree_equal(run(False, opt), copied)  # everything can be used again
    assert eqx.tree_equal(run("opt", opt), copied)
    assert eqx.tree_equal(run("all", sl.Optimizer(tx, model)), copied)

    loss, model = Counting(mean_square), make_model()

    def train_briefly(learning_rate):
        # It donates nothing in a trace.
        return after_training(sl.train_step(loss), sl.adam(learning_rate), 5, model, x, y)[2]

    rates = jnp.logspace(-4, -1, 8)
    losses = eqx.filter_vmap(train_briefly)(rates)
    assert loss.traces <= 2  # once with the model as it is, once batched
    np.testing.assert_allclose(losses[3], train_briefly(rates[3]), rtol=1e-5)


@pytest.mark.parametrize("donate", ["opt", "all"])
def test_donated_memory_is_written_in_place(donate):
    model = {f"layer{i}": jnp.full((256, 256), 0.01) for i in range(2)}
    opt = sl.Optimizer(sl.adamw(1e-3), model)

    def loss_fn(model, x):
        for w in model.values():
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    step = sl.train_step(loss_fn, donate=donate)
    program = step.lower(model, opt, jnp.ones((2, 256))).compile()
    size = sum(w.nbytes for w in model.values())
    state = sum(leaf.nbytes for leaf in jax.tree.leaves(opt.arrays[1:]))
    donated = state + size * (donate == "all")
    assert 0.99 * donated <= program.memory_analysis().alias_size_in_bytes <= 1.01 * donated
    if donate == "opt":
        # Moments have the shapes of parameters: new parameters must not take their buffers.
        assert "f32[256,256]{1,0} copy(" not in program.as_text()


def test_what_is_not_trained_or_stands_twice_is_not_donated():
    model = {"w": jnp.ones(2), "frozen": jnp.ones(3), "key": jax.random.key(0), "n": jnp.array(3)}
    batch = jnp.ones(2)
    opt = sl.Optimizer(sl.adam(1e-2), model, trainable=sl.where.path("w"))
    step = sl.train_step(
        lambda model, batch: jnp.sum(model["w"] * batch) + model["frozen"].sum(), donate="all"
    )
    new, new_opt, _ = step(model, opt, batch)
    assert model["w"].is_deleted()
    for kept in (model["frozen"], model["n"], batch, jax.tree.leaves(opt)[0]):
        assert not kept.is_deleted()
    assert new["frozen"] is model["frozen"]
    assert jax.tree.leaves(new_opt)[0] is jax.tree.leaves(opt)[0]

    def loss_fn(model, target):
        return jnp.mean((jax.vmap(model)(x) - jax.vmap(target)(x) - 1) ** 2)

    model = make_model()
    step = sl.train_step(loss_fn)
    new, _, loss = step(model, sl.Optimizer(sl.sgd(0.1), model), model)
    assert float(loss) == 1.0
    assert jnp.all(jnp.isfinite(jax.vmap(model)(x)))
    assert not eqx.tree_equal(new, model)


def test_a_runtime_check_fails_with_its_own_message():
    def loss_fn(model):
        loss = jnp.sum(model["w"] ** 2)
        return eqx.error_if(loss, loss > 1, "the loss is too large")

    opt = sl.Optimizer(sl.sgd(0.1), START)
    step = sl.train_step(loss_fn)
    for _ in range(2):
        with pytest.raises(eqx.EquinoxRuntimeError, match="the loss is too large"):
            step(START, opt)
    assert not START["w"].is_deleted()
    small, _, loss = step({"w": jnp.full(2, 0.5)}, opt)
    np.testing.assert_allclose(loss, 0.5)
    np.testing.assert_allclose(small["w"], 0.4)

    with pytest.raises(ValueError, match="invalid literal"):  # where NumPy's arrays are donated
        sl.train_step(lambda model: jnp.sum(model["w"]) * int("x"))(START, jax.device_get(opt))

    refuse = sl.Stateless(lambda u, p: eqx.error_if(u, u["w"][0] > 0, "uphill"))
    with pytest.raises(eqx.EquinoxRuntimeError, match="uphill"):
        sl.Optimizer(refuse, START).step(START, START)


def test_programs_that_pile_up_are_forgotten(monkeypatch):
    monkeypatch.setattr("slalom._loop.programs.program.MOST_SIGNATURES", 2)
    traced = []
    step = sl.train_step(lambda model, name: traced.append(name) or jnp.sum(model), donate=False)
    step._program.signatures.clear()
    for name in "abcac":
        step(jnp.ones(2), sl.Optimizer(sl.sgd(0.1), jnp.ones(2)), name)
    assert traced == ["a", "b", "c", "a"]


class Tensor:
    """An array of another library."""

    def __init__(self, values):
        self.values = values

    def __array__(self, dtype=None, copy=None):
        if self.values is None:
            raise TypeError("it is on another device.")
        return np.asarray(self.values, dtype)


@pytest.mark.parametrize("how", ["step", "scan", "lower"])
def test_tensors_of_other_libraries_are_arrays(how):
    traced = []

    @partial(sl.train_step, donate=False)
    def step(model, x):
        traced.append(x.shape)
        return jnp.sum(model["w"] * x)

    opt = sl.Optimizer(sl.sgd(0.1), START)
    call = step if how == "step" else getattr(step, how)
    for scale in (1, 2, 3):
        values = np.full((1, 2) if how == "scan" else 2, scale, np.float32)
        found, expected = call(START, opt, Tensor(values)), call(START, opt, values)
        if how != "lower":
            np.testing.assert_array_equal(found[0]["w"], expected[0]["w"])
    assert traced == [(2,)]
    with pytest.raises(TypeError, match=r"'args.0' of type .*Tensor .* it is on another device\."):
        call(START, opt, Tensor(None))
    if how != "lower":
        with pytest.raises(TypeError, match=r"'args.0' is an array of dtype object.*`x.astype"):
            call(START, opt, np.full((1, 2), None))


def sum_of(model):
    return jnp.sum(model)


def sum_of_entries(model, *functions):
    return jnp.sum(model["w"])


START = {"w": jnp.ones(2)}


def step_with(model, *functions, take=lambda step, *args: step(*args), **options):
    step = sl.train_step(sum_of_entries, **options)
    take(step, model, sl.Optimizer(sl.sgd(0.1), model), *functions)


CAPTURED = {
    "step": lambda f: sl.Optimizer(sl.sgd(0.1), START).step(START, START, value_fn=f),
    "model": lambda f: sl.Optimizer(sl.sgd(0.1), START | {"f": f}).update(
        START | {"f": f}, START | {"f": None}
    ),
    "keep_best": lambda f: sl.KeepBest(START | {"f": f}).update(START | {"f": f}, 1.0),
    "train_step, model": lambda f: step_with(START | {"f": f}),
    "train_step, argument": lambda f: step_with(START, f),
    "train_step, option": lambda f: step_with(START, transform_grads=lambda g: (f(g), g)[1]),
    "scan": lambda f: step_with(START, f, take=lambda step, *args: step.scan(*args, length=2)),
    "minimize": lambda f: sl.minimize(f, sl.sgd(0.1), START, max_steps=1),
    "minimize, stop": lambda f: sl.minimize(
        sum_of_entries, sl.sgd(0.1), START, max_steps=1, stop=lambda m, loss: f(m) < 0
    ),
    "minimize, callback": lambda f: sl.minimize(
        sum_of_entries, sl.sgd(0.1), START, max_steps=1, callback=lambda *_: f(START)
    ),
    "schedule": lambda f: one_step(sl.adam(lambda step: f(START))),
    "default": lambda f: one_step(sl.adam(by_default(held_by(f))[0])),
    "keyword": lambda f: one_step(sl.adam(by_default(held_by(f))[1])),
    "partial": lambda f: one_step(sl.adam(partial(rate, held_by(f)))),
    "method": lambda f: one_step(sl.adam(Rate(held_by(f)).at)),
    "condition": lambda f: one_step(sl.adam(0.1).when(lambda c, u: f(START) > 0, otherwise="zero")),
    "stateless": lambda f: one_step(sl.Stateless(lambda u, p: (f(u), u)[1]) | sl.sgd(0.1)),
    "only": lambda f: one_step(sl.adam(0.1).every_k(2).only(sl.where.leaf(lambda p, x: bool(f)))),
    "decay_where": lambda f: one_step(sl.adamw(0.1, decay_where=lambda m: {"w": bool(f)})),
    "labels": lambda f: one_step(sl.partition({1: sl.sgd(0.1)}, lambda m: {"w": int(bool(f))})),
    "from_optax": lambda f: one_step(
        sl.interop.from_optax(optax.stateless(lambda u, p: (f(u), u)[1])) | sl.sgd(0.1)
    ),
    "trainable": lambda f: one_step(sl.sgd(0.1), trainable=lambda m: {"w": bool(f)}),
    "static": lambda f: one_step(sl.sgd(0.1), eqx.nn.Lambda(f), eqx.nn.Linear(1, 1, key=KEY)),
}
KEY = jax.random.key(0)


def one_step(tx, *model, **options):
    model = model or START
    grads = eqx.filter(model, eqx.is_inexact_array)
    opt = sl.Optimizer(tx, model, **options)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    opts = opt, opt.reset(model), opt.rebind(model)[0], opt.shard_state(mesh)[0]
    for opt in opts:
        opt.eval_params(opt.step(model, grads)[0])
    _ = opt.has_updated, opt.loss_scale, opt.hyperparams, opt.metrics, opt.describe(model)


def rate(x, step):
    return jnp.sum(x)


def by_default(x):
    return (lambda step, x=x: rate(x, step)), (lambda step, *, x=x: rate(x, step))


@dataclasses.dataclass(eq=False)
class Rate:
    x: np.ndarray

    def at(self, step):
        return rate(self.x, step)


def held_by(function):
    return function.__closure__[0].cell_contents


def capturing(data):
    return lambda model: jnp.sum(model["w"] * data)


EVERYDAY = "step", "keep_best", "train_step, argument", "minimize, callback", "schedule", "only"


@pytest.mark.parametrize("who", slow_except(CAPTURED, *EVERYDAY))
def test_programs_keep_no_function_and_nothing_that_it_captured(who):
    data = np.ones(2)
    CAPTURED[who](capturing(data))
    kept = weakref.ref(data)
    del data
    gc.collect()
    assert kept() is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*compiled three times")
def test_training_steps_that_were_dropped_leave_nothing_in_jax():
    def count():
        for _ in range(3):
            sl.train_step(lambda model: jnp.sum(model["w"] ** 2))(START, sl.Optimizer(tx, START))
        gc.collect()
        modules = (str(type(x).__module__).partition(".")[0] for x in gc.get_objects())
        return sum(module in ("jax", "jaxlib") for module in modules)

    count()
    assert count() == count()


TRACED = []


def note(updates, params):
    TRACED.append(updates["w"].shape)
    return updates


def test_programs_of_optimizers_die_with_these_and_serve_those_made_next(monkeypatch):
    monkeypatch.setattr("slalom._loop.programs.compiled.MOST_KEPT", 2)
    make = lambda: sl.Stateless(note) | sl.sgd(0.1)  # noqa: E731

    def train(size, tx):
        model = {"w": jnp.ones(size)}
        opt = sl.Optimizer(tx, model)
        opt.step(model, model)
        return weakref.ref(opt.binding.family)

    families = [train(size, make()) for size in range(1, 5)]
    gc.collect()
    assert [family() is None for family in families] == [True, True, False, False]
    train(4, make())
    assert TRACED == [(1,), (2,), (3,), (4,)]

    captured = []
    tx = sl.Stateless(lambda u, p: (captured.append(u), u)[1]) | sl.sgd(0.1)
    for _ in range(2):
        train(1, tx)
    assert len(captured) == 1
