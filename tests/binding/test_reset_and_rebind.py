"""Starting state anew, and carrying it over to other parameters and other transforms."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl
from helpers import (
    Counting,
    after_steps,
    assert_close,
    assert_same_bits,
    assert_same_path,
    known,
    mlp,
    params_of,
    sampled,
    slow_except,
)
from slalom._core.state.slots import slots
from slalom.tree.paths import leaf_paths
from table import GRADIENT_ROWS, rows
from table.row import pointers

MODEL = {"w": jnp.linspace(-1, 1, 6).reshape(2, 3), "b": jnp.ones(3), "s": jnp.asarray(0.5)}
GRADS = jax.tree.map(lambda p: 0.3 * p + 0.1, MODEL)


def steps(opt, model, n, grads=None):
    return after_steps(opt, n, model, GRADS if grads is None else grads, value=1.0)


close = functools.partial(assert_close, rtol=1e-6, atol=1e-7)


def worn_out(x):
    return ~x if x.dtype == bool else x + 1


def worn(opt):
    """The optimizer with other values in its state."""
    state = jax.tree.map(worn_out, opt.arrays.state)
    arrays = opt.arrays._replace(state=state, count=worn_out(opt.count))
    return eqx.tree_at(lambda opt: opt.arrays, opt, arrays)


def slots_of(opt):
    return slots(opt.transform, opt.state, ())


@rows()
def test_reset_makes_anew_what_belongs_to_parameters_and_rebinding_keeps_all_but_copies(row):
    model = {"a": jnp.ones((7, 11)), "b": jnp.ones((7, 11)), "c": jnp.ones(11)}
    opt = sl.Optimizer(row.tx, model)
    old = worn(opt)

    again, report = old.rebind(model, tx=old.transform)
    assert again.binding == old.binding
    assert_same_bits(again, old)
    assert (report.new, report.reshaped, report.dropped, report.renewed) == ((), (), (), ())
    # So that either may be donated.
    assert not {*pointers(again)} & {*pointers(old)}

    places = slots(opt.transform, opt.state, leaf_paths(model))
    states = (jax.tree.leaves(o.state) for o in (old, opt, old.reset(model)))
    for slot, before, fresh, after in zip(places, *states, strict=True):
        np.testing.assert_array_equal(after, before if slot.mark is None else fresh)
        if before.shape == (7, 11) and "Monitor" not in repr(row.tx):
            assert slot.mark in ("param_like", "per_param")

    # With other values, whatever depends on these starts again, and nothing else.
    loaded = jax.tree.map(lambda x: 3 * x + 1, model)
    onto, report = old.rebind(loaded)
    assert (report.new, report.reshaped, report.dropped) == ((), (), ())
    renewed = {slot.node for slot in places if slot.name in report.renewed}
    states = (jax.tree.leaves(o.state) for o in (old, opt, sl.Optimizer(row.tx, loaded), onto))
    for slot, before, start, fresh, after in zip(places, *states, strict=True):
        is_new = slot.node in renewed and slot.mark is not None
        np.testing.assert_array_equal(after, fresh if is_new else before)
        assert is_new or np.array_equal(start, fresh), slot.name


ALONE = {
    "adam": sl.adam(0.1),
    "radam": sl.radam(0.1),
    "galore": sl.contrib.galore(0.1, rank=2),
    "adabelief": sl.adabelief(0.1),
    "novograd": sl.novograd(0.1),
    "sm3": sl.sm3(0.1),
    "ema": sl.Ema(0.9) | sl.Scale(-0.1),
    "only": sl.adam(0.1).only(sl.where.path("b")),
    "partition": sl.adam(0.1).partition({sl.where.path("b"): sl.adan(0.1)}),
    "lookahead": sl.adam(0.1).lookahead(10, 0.5),
    "average": sl.adam(0.1).average(0.9),
}


@pytest.mark.parametrize("name", sampled(ALONE, "partition", "galore"))
def test_reset_parameters_step_as_fresh_ones_and_the_others_go_on(name):
    tx = ALONE[name]
    model, opt = steps(sl.Optimizer(tx, MODEL), MODEL, 3)
    reset = opt.reset(model, where=sl.where.path("b"))

    anew, opt_anew = steps(reset, model, 2)
    on, opt_on = steps(opt, model, 2)
    fresh, opt_fresh = steps(sl.Optimizer(tx, model), model, 2)

    close(anew["b"], fresh["b"])
    close((anew["w"], anew["s"]), (on["w"], on["s"]))
    assert int(opt_anew.count) == 5
    evaluated = opt_anew.eval_params(anew)
    close(evaluated["b"], opt_fresh.eval_params(fresh)["b"])
    close(evaluated["w"], opt_on.eval_params(on)["w"])


def test_a_reset_takes_a_whole_model_compiles_once_and_refuses_what_it_cannot_do():
    counted = Counting(lambda updates, params: updates)
    tx = sl.adam(0.1) | sl.Stateless(counted)
    model, opt = steps(sl.Optimizer(tx, MODEL), MODEL, 2)
    before = counted.traces
    model, opt = steps(opt.reset(model), model, 2)
    assert counted.traces == before
    steps(opt.reset(model, where=sl.where.path("b")), model, 3)
    assert counted.traces == before + 1

    model = mlp(jax.random.key(0))
    grads = jax.tree.map(jnp.ones_like, params_of(model))
    model, opt = sl.Optimizer(sl.adam(0.1), model).step(model, grads)
    before = jax.tree.map(jnp.copy, opt.state)
    adam = opt.reset(model, where=sl.where.path("layers.1.**")).state_of("scale_by_adam")
    assert_same_bits(opt.state, before)
    assert float(jnp.abs(adam.mu.layers[0].weight).sum()) > 0
    assert float(jnp.abs(adam.mu.layers[1].weight).sum()) == 0
    np.testing.assert_array_equal(adam.age, [1, 1, 0, 0])

    opt = sl.Optimizer(sl.adam(0.1), MODEL)
    with pytest.raises(ValueError, match="matches no parameter"):
        opt.reset(MODEL, where=sl.where.path("heads.**"))
    with pytest.raises(ValueError, match="trainable parameters of this model differ"):
        opt.reset({"w": MODEL["w"]})


@pytest.mark.slow
def test_unfrozen_layers_and_leaves_of_a_mask_have_ages_of_their_own():
    where = sl.where.path("b") | sl.where.path("s")
    tx = sl.ZeroNans().mask(where) | sl.adam(0.1).partition({sl.where.nothing(): sl.adam(1.0)})
    model, opt = steps(sl.Optimizer(tx, MODEL), MODEL, 1, {**GRADS, "b": jnp.full(3, jnp.nan)})
    reset = opt.reset(model, where=sl.where.path("b"))
    np.testing.assert_array_equal(opt.state_of("zero_nans").found_nan, [1, 0])
    np.testing.assert_array_equal(reset.state_of("zero_nans").found_nan, [0, 0])
    # The group without parameters has nothing to reset.
    empty = "partition.0.scale_by_adam"
    assert_same_bits(reset.state_of(empty).age, opt.state_of(empty).age)
    assert_same_bits(opt.rebind(model)[0], opt)

    tx = sl.adam(0.1)
    head = sl.where.path("b")
    frozen = {"w": None, "b": GRADS["b"], "s": None}
    model, opt = steps(sl.Optimizer(tx, MODEL, trainable=head), MODEL, 3, frozen)
    opt, report = opt.rebind(model, trainable=None)
    assert report.carried == ("scale_by_adam.age", "scale_by_adam.mu.b", "scale_by_adam.nu.b")
    assert "scale_by_adam.mu.w" in report.new
    assert int(opt.count) == 3

    thawed, _ = steps(opt, model, 2)
    alone, _ = steps(sl.Optimizer(tx, MODEL, trainable=head), MODEL, 5, frozen)
    fresh, _ = steps(sl.Optimizer(tx, model), model, 2)
    close(thawed["b"], alone["b"])
    close((thawed["w"], thawed["s"]), (fresh["w"], fresh["s"]))


PULL_BACK = {
    "schedule_free": sl.sgd(0.1).schedule_free(),
    "lookahead": sl.sgd(0.1).lookahead(2, 0.5),
    "outer": sl.sgd(0.1).outer(sl.sgd(0.7, momentum=0.9), 2),
    "mechanize": sl.sgd(1.0).mechanize(),
    "dog": sl.ScaleByDog() | sl.Scale(-1.0),
    "prodigy": sl.prodigy(1.0),
    "madgrad": sl.contrib.madgrad(0.01),
    "cocob": sl.contrib.cocob(),
    "decay to the start": sl.AddDecayToInitialParams(1.0) | sl.sgd(0.1),
    "norm": sl.sgd(0.1) | sl.KeepInitialNorm(),
}


@pytest.mark.parametrize("name", slow_except(PULL_BACK, "lookahead", "madgrad"))
def test_weights_that_were_loaded_later_are_not_pulled_back_after_rebinding(name):
    model, opt = steps(sl.Optimizer(PULL_BACK[name], MODEL), MODEL, 3)
    loaded = jax.tree.map(lambda x: x + 50.0, model)
    pulled, _ = steps(opt, loaded, 2)
    opt, report = opt.rebind(loaded)
    assert report.renewed
    assert "renewed:  " in repr(report)
    stayed, opt = steps(opt, loaded, 2)
    assert float(jnp.abs(stayed["w"] - loaded["w"]).max()) < 1.0
    assert float(jnp.abs(opt.eval_params(stayed)["w"] - loaded["w"]).max()) < 1.0
    # With other parameters the run goes on.
    assert opt.rebind({"w": stayed["w"]})[1].renewed == ()
    far = float(jnp.abs(pulled["w"] - loaded["w"]).max())
    assert far > 1.0 or name in ("mechanize", "prodigy")


OWN_AXES = (
    "Lbfgs",
    "Dion",
    "RowRms",
    "Soap",
    "Splus",
    "Kron",
    "Shampoo",
    "Galore",
    "Apollo",
    "Broyden",
    "Flatten, every_k",  # a buffer of all parameters
)
DETERMINISTIC = [n for n in GRADIENT_ROWS if not {"AddNoise", "ScaleByIvon"} & {n}]


@rows(DETERMINISTIC, everyday=("ScaleByAdam", "ScaleByFactoredRms, factored", "Store"))
def test_rows_of_the_state_move_with_those_of_the_parameters(row):
    model = {"a": jax.random.normal(jax.random.key(0), (7, 11)), "b": jnp.linspace(1, 2, 7)}
    order = jnp.array([3, 0, 6, 1, 5, 2, 4])

    def moved(tree):
        return jax.tree.map(lambda x: x[order], tree)

    @jax.jit
    def step(model, opt):
        grads = jax.tree.map(lambda x: 0.3 * x + jnp.sin(5 * x), model)
        return opt.step(model, grads, **known(model, grads))

    now, opt = step(*step(model, sl.Optimizer(row.tx, model)))
    mover, report = opt.rebind(moved(now), rows={sl.where.everything(): order})
    assert (report.new, report.dropped, report.renewed) == ((), (), ())
    own_axes = any(name in row.name for name in OWN_AXES) and "one side" not in row.name
    assert bool(report.reshaped) == own_axes
    places = slots(mover.transform, mover.state, leaf_paths(model))
    states = (jax.tree.leaves(o.state) for o in (mover, sl.Optimizer(row.tx, moved(now))))
    for slot, x, fresh in zip(places, *states, strict=True):
        if slot.name in report.reshaped:
            np.testing.assert_array_equal(x, fresh)
    if not report.reshaped:
        expected, _ = step(now, opt)
        # An int8 codec has another scale for each group of entries, and other ones are neighbors.
        rounding = 3e-2 if "Store" in row.name else 1e-4
        assert_same_path(step(moved(now), mover)[0], moved(expected), moved(now), rounding)


ADAM = sl.adam(0.1).average()


@pytest.mark.parametrize("tx", slow_except([ADAM, ADAM.store("bfloat16")], ADAM), ids=["", "store"])
def test_old_rows_go_on_beside_new_ones(tx):
    table, grad = jnp.linspace(-1, 1, 12).reshape(4, 3), jnp.linspace(1, 2, 12).reshape(4, 3)
    model, opt = steps(sl.Optimizer(tx, {"table": table}), {"table": table}, 20, {"table": grad})

    index = [2, -1, 0, -1]  # two tokens are gone, two are new
    kept, new = jnp.array([0, 2]), jnp.array([1, 3])
    grown = {"table": model["table"][jnp.array([2, 2, 0, 0])].at[new].set(5.0)}
    more, report = opt.rebind(grown, rows={sl.where.path("table"): index})
    assert report.reshaped == ()
    adam, average = more.state_of("scale_by_adam"), more.state_of("average").average
    assert_same_bits(average["table"][new], jnp.full((2, 3), 5.0))
    assert float(jnp.abs(adam.mu["table"][new].astype(float)).max()) == 0
    on, _ = steps(opt, model, 3, {"table": grad})
    after, _ = steps(more, grown, 3, {"table": grad[jnp.array([2, 1, 0, 3])]})
    close(after["table"][kept], on["table"][jnp.array([2, 0])], rtol=2e-2)
    # Adam's mean of squares would make steps of up to seven learning rates from 0.
    assert float(jnp.abs(after["table"][new] - 5.0).max()) < 0.3
    fresh = opt.rebind(grown, rows={sl.where.path("table"): [-1] * 4})[1]
    assert any(path.endswith("scale_by_adam.nu.table") for path in fresh.reshaped)
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Explicit,))
    grown = jax.device_put(grown, jax.NamedSharding(mesh, jax.P("i", None)))
    more, _ = sl.Optimizer(tx, grown).rebind(grown, rows={sl.where.path("table"): index})
    assert more.state_of("scale_by_adam").mu["table"].sharding == grown["table"].sharding


@pytest.mark.slow
def test_units_are_pruned_and_layers_added_grown_and_removed():
    net = {"in": jnp.ones((4, 2)), "out": jnp.ones((3, 4)), "bias": jnp.ones(4)}
    opt = sl.Optimizer(sl.adam(0.1), net)
    marked = (x + jnp.arange(x.size, dtype=x.dtype).reshape(x.shape) for x in jax.tree.leaves(opt))
    opt = jax.tree.structure(opt).unflatten(list(marked))
    kept = jnp.array([0, 3])

    def pruned(tree):
        return {"in": tree["in"][kept], "out": tree["out"][:, kept], "bias": tree["bias"][kept]}

    first = sl.where.path("in") | sl.where.path("bias")
    small, report = opt.rebind(pruned(net), rows={first: kept, sl.where.path("out"): {1: kept}})
    assert (report.new, report.reshaped, report.dropped) == ((), (), ())
    old, new = (o.state_of("scale_by_adam") for o in (opt, small))
    assert_same_bits((new.mu, new.nu), (pruned(old.mu), pruned(old.nu)))

    model, opt = steps(sl.Optimizer(sl.adam(0.1), MODEL), MODEL, 2)
    grown = {"w": model["w"], "b": jnp.ones(5), "s": model["s"], "z": jnp.ones(2)}
    more, report = opt.rebind(grown)
    assert report.reshaped == ("scale_by_adam.mu.b", "scale_by_adam.nu.b")
    assert report.new == ("scale_by_adam.mu.z", "scale_by_adam.nu.z")
    assert report.dropped == ()
    np.testing.assert_array_equal(more.state_of("scale_by_adam").age, [0, 2, 2, 0])
    grown, _ = more.step(grown, grown)
    assert all(jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(grown))

    fewer, report = opt.rebind({"w": model["w"], "b": model["b"]})
    assert report.dropped == ("scale_by_adam.mu.s", "scale_by_adam.nu.s")
    assert int(fewer.state_of("scale_by_adam").age) == 2


@pytest.mark.slow
def test_a_rule_that_is_wrapped_or_joined_keeps_its_state():
    adam, b = sl.adam(0.1), sl.where.path("b")
    paced = adam.every_k(2)
    two = paced.partition({b: paced})
    for tx, *others in (
        (adam, sl.ClipByGlobalNorm(1e9) | adam, adam.record(), adam.partition({b: adam})),
        # Rules of one class are told apart by their places.
        (two, two.record(), two.average(0.9), two.every_k(1)),
        (paced.every_k(2), paced.record().every_k(2)),
    ):
        model, opt = steps(sl.Optimizer(tx, MODEL), MODEL, 3)
        expected, _ = steps(opt, model, 2)
        for other in others:
            wrapped, report = opt.rebind(model, tx=other)
            assert report.dropped == (), other
            close(steps(wrapped, model, 2)[0], expected)


FALLING = sl.schedules.piecewise_constant(1.0, dict.fromkeys(range(1, 9), 0.5))
CLOCKED = {
    "none": lambda tx: tx,
    "every_k": lambda tx: tx.every_k(2),
    "if_finite": lambda tx: tx.if_finite(),
    "scale_loss": lambda tx: tx.scale_loss(),
    "skip_spikes": lambda tx: tx.skip_spikes(by="grad_norm"),
    "when": lambda tx: tx.when(lambda context, updates: context.step != 0, otherwise="zero"),
    "two": lambda tx: tx.every_k(2).if_finite().record(),
    "the other way round": lambda tx: tx.if_finite().every_k(2),
    "record outside": lambda tx: tx.if_finite().every_k(2).record(),
    "record inside": lambda tx: tx.record().scale_loss(),
}


RULES = {"adam": sl.adam(FALLING), "sgd": sl.sgd(FALLING)}
CLOCKS = {f"{rule}, {name}": (RULES[rule], name) for rule in RULES for name in CLOCKED}


@pytest.mark.parametrize("case", sampled(CLOCKS, "adam, none"))
def test_schedules_go_on_where_they_were_in_any_wrapper(case, tmp_path):
    rule, name = CLOCKS[case]
    model, opt = steps(sl.Optimizer(CLOCKED[name](rule), MODEL), MODEL, 6)
    now = float(opt.hyperparams["learning_rate"])
    assert now < 1.0
    sl.checkpoint.save(tmp_path / "run", opt=opt)
    for other, wrap in CLOCKED.items():
        if other == "none":
            continue
        rebound, _ = opt.rebind(model, tx=wrap(rule))
        assert float(rebound.hyperparams["learning_rate"]) == now, other
        start = sl.Optimizer(wrap(rule), MODEL)
        loaded = sl.checkpoint.load(tmp_path / "run", opt=start, strict=False)["opt"]
        assert float(loaded.hyperparams["learning_rate"]) == now, other


def test_the_report_prints_as_a_table_and_says_where_schedules_go_on():
    model, opt = steps(sl.Optimizer(sl.adam(FALLING).every_k(2), MODEL), MODEL, 6)
    with pytest.warns(UserWarning, match=r"goes on at step 6 .* 'every_k', 3, .*tx.if_finite\(\)"):
        bare, _ = opt.rebind(model, tx=sl.adam(FALLING))
    assert float(bare.hyperparams["learning_rate"]) == FALLING(6)
    opt.rebind(model, tx=sl.adam(0.1))

    model, opt = steps(sl.Optimizer(sl.adam(0.1), MODEL), MODEL, 1)
    _, report = opt.rebind(model, tx=sl.sgd(0.1))
    assert repr(report) == (
        "carried:  –\n"
        "new:      –\n"
        "reshaped: –\n"
        "dropped:  scale_by_adam.age, scale_by_adam.mu.b, scale_by_adam.mu.s, "
        "scale_by_adam.mu.w, … (7)"
    )


def test_momentum_hyperparameters_and_trained_parameters_are_carried():
    model, opt = steps(sl.Optimizer(sl.adam(0.1), MODEL), MODEL, 3)
    lion, report = opt.rebind(model, tx=sl.lion(0.01))
    assert_same_bits(lion.state_of("scale_by_lion").mu, opt.state_of("scale_by_adam").mu)
    assert "scale_by_adam.nu.w" in report.dropped

    adam, report = lion.rebind(model, tx=sl.adam(0.1))
    assert report.carried == ()
    assert float(adam.state_of("scale_by_adam").mu["w"].sum()) == 0

    opt = sl.Optimizer(sl.adam(0.1), MODEL).with_hyperparams(learning_rate=0.02)
    assert opt.rebind(MODEL)[0].hyperparams["learning_rate"] == jnp.float32(0.02)
    assert opt.rebind(MODEL, tx=sl.adam(0.3))[0].hyperparams["learning_rate"] == jnp.float32(0.3)
    opt = sl.Optimizer(sl.sgd(0.1), {"head": jnp.ones(1), "body": jnp.ones(2)})
    with pytest.raises(TypeError, match="A string is"):
        opt.rebind({"head": jnp.ones(1), "body": jnp.ones(2)}, trainable="head")


CHANGED = {
    "fewer": {k: MODEL[k] for k in ("w", "s")},
    "more": MODEL | {"added": jnp.ones((3, 2))},
    "reshaped": MODEL | {"w": jnp.ones((4, 3))},
    "all reshaped": {"w": jnp.ones((4, 3)), "b": jnp.ones(5), "s": jnp.ones(1)},
}


CORRECTED = {
    "rms": lambda on: sl.ScaleByRms(bias_correction=on),
    "stddev": lambda on: sl.ScaleByStddev(bias_correction=on),
    "ema": lambda on: sl.Ema(0.9, debias=on),
}


@pytest.mark.parametrize("name", slow_except(CORRECTED, "ema"))
def test_means_of_unknown_age_start_again_where_their_bias_is_corrected(name):
    rule = CORRECTED[name]
    model, grads = {"w": jnp.ones(3)}, {"w": jnp.array([1.0, -2.0, 3.0])}
    model, opt = after_steps(rule(False), 5, model, grads)
    rebound, report = opt.rebind(model, tx=rule(True))
    assert all(path.endswith(".w") for path in report.reshaped)
    assert not report.carried
    expected = sl.Optimizer(rule(True), model).step(model, grads)[0]
    assert_close(rebound.step(model, grads)[0], expected, rtol=1e-6)


@pytest.mark.parametrize("model", CHANGED.values(), ids=CHANGED)
def test_the_report_lists_each_path_once(model):
    b = sl.where.ndim(1)
    for tx in (sl.adam(0.1), sl.adam(0.1).partition({b: sl.adam(0.2)}).average().every_k(2)):
        old, new = sl.Optimizer(tx, MODEL), sl.Optimizer(tx, model)
        _, report = old.rebind(model)
        found = report.carried + report.new + report.reshaped + report.dropped
        assert len(found) == len(set(found))
        before, after = ({slot.name for slot in slots_of(opt)} for opt in (old, new))
        # A leaf that moved has its new path.
        assert after <= set(found) <= before | after


def plateau(rate):
    return sl.schedules.ReduceOnPlateau(rate, patience=1, rtol=0.0)


def test_driven_schedules_and_records_are_carried_by_name():
    model, grads = jnp.ones(2), jnp.ones(2)
    tx = sl.adam(0.1).drive({"learning_rate": plateau(0.1)})
    opt = sl.Optimizer(tx, model)
    for loss in (1.0, 2.0, 3.0):
        model, opt = opt.step(model, grads, value=loss)
    fallen = float(opt.hyperparams["learning_rate"])
    assert fallen < 0.1

    more = sl.adam(0.1).drive({"b1": plateau(0.9), "learning_rate": plateau(0.1)})
    opt, report = opt.rebind(model, tx=more)
    assert float(opt.hyperparams["learning_rate"]) == fallen
    assert float(opt.hyperparams["b1"]) == pytest.approx(0.9)
    assert any("learning_rate" in path for path in report.carried)

    model, grads = jnp.ones(2), jnp.ones(2)
    opt = sl.Optimizer(sl.adam(0.1).record(), model)
    model, opt = opt.step(model, grads)
    before = opt.metrics.to_dict()
    opt, _ = opt.rebind(model, tx=(sl.Clip(3.0) | sl.adam(0.1)).record())
    after = opt.metrics.to_dict()
    assert {path: after[path] for path in before} == before


def test_a_full_reset_restarts_windows_and_statistics_and_keeps_counts():
    model, ones = {"a": jnp.zeros(()), "b": jnp.zeros(())}, {"a": jnp.ones(()), "b": jnp.ones(())}
    threes = jax.tree.map(lambda x: 3 * x, ones)
    model, opt = sl.Optimizer(sl.sgd(1.0).every_k(2), model).step(model, ones)

    # After a partial reset the mean is that of the rest of the window.
    partly, _ = opt.reset(model, sl.where.path("a")).step(model, threes)
    assert (float(partly["a"]), float(partly["b"])) == (-3.0, -2.0)

    opt = opt.reset(model)
    assert not opt.has_updated
    for grads, due in ((ones, False), (threes, True)):
        model, opt = opt.step(model, grads)
        assert bool(opt.has_updated) is due
    assert (float(model["a"]), float(model["b"])) == (-2.0, -2.0)

    relobralo = sl.combine.ReLoBRaLo(key=1)
    tx = (
        (sl.ZClip() | sl.ClipByGlobalNorm(1.0, delayed=True) | sl.sgd(0.1))
        .combine(relobralo, ("fit", "bound"))
        .skip_spikes()
    )
    opt = sl.Optimizer(tx, MODEL)
    again = worn(opt).reset(MODEL)
    paths = (slot.name for slot in slots_of(opt))
    pairs = zip(jax.tree.leaves(opt.state), jax.tree.leaves(again.state), strict=True)
    kept = {p.rpartition(".")[2] for p, (x, y) in zip(paths, pairs, strict=True) if np.any(x != y)}
    assert kept == {"total_skipped", "last_skipped", "z", "count", "key", "losses", "weights"}


def test_a_window_that_would_mix_means_sums_and_scaled_gradients_starts_again():
    sgd, model = sl.sgd(0.1), {"a": jnp.ones(())}
    for tx in (sgd.scale_loss().every_k(2), sgd.every_k(2, mean=False), sgd.every_k(2)):
        grads = {"a": sl.Optimizer(tx, model).loss_scale}
        opt, report = sl.Optimizer(tx, model).step(model, grads)[1].rebind(model, tx=sgd.every_k(2))
        assert report.renewed == (() if tx == sgd.every_k(2) else ("every_k.mini_step",))
        assert bool(opt.step(model, model)[1].has_updated) is (tx == sgd.every_k(2))


def test_replaced_transforms_and_grown_matrices_start_together():
    for changes in ({"mean": False}, {"k": 3}):
        tx = dataclasses.replace(sl.sgd(1.0).every_k(2), **changes)
        assert tx == sl.sgd(1.0).every_k(**({"k": 2} | changes))
    tx = sl.adam(0.1).drive({"learning_rate": plateau(0.1)})
    assert dataclasses.replace(tx) == tx

    tx = sl.ScaleByFactoredRms(min_dim_size_to_factor=1) | sl.Scale(-0.1)
    small, large = {"w": jnp.ones((3, 4))}, {"w": jnp.ones((3, 8))}
    _, opt = sl.Optimizer(tx, small).step(small, small)
    opt, report = opt.rebind(large)
    assert report.carried == ()
    assert all(jnp.all(x == 0) for x in opt.state_of(sl.ScaleByFactoredRms).nu["w"])
