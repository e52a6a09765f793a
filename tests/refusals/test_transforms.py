"""Transforms that are none, or do not keep their promises."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import slalom as sl

from .messages import Count, Forgetful, bound, params, refused

RAW = "`.only(where)` instead of `.mask(where)` … before the learning rate"
OF_OPTAX = "`sl.adam(1e-3)` instead of `optax.adam(1e-3)` … `sl.interop.from_optax(tx)`"
LIKE = "a tree like the one that it receives"
REAL = "`tx.project(fn, where=~sl.where.dtype(jnp.complexfloating))`"


def test_what_is_no_transform():
    with refused(TypeError, "first argument … got 0.1", "`sl.adam(1e-3)`"):
        bound(0.1)
    with refused(TypeError, "first argument … got <function adam", "Call it first: `adam(...)`"):
        bound(sl.adam)
    with refused(
        TypeError,
        "got <class 'slalom.rules.adaptive.adam.ScaleByAdam'>",
        "Call it first: `ScaleByAdam(...)`",
    ):
        bound(sl.ScaleByAdam)
    with refused(
        TypeError, "first argument … got an argument of type dict", "`sl.Optimizer(tx, model)`"
    ):
        sl.Optimizer(params(), sl.adam(0.1))
    with refused(TypeError, "Link 1 … got 0.1 of type float", "a transform"):
        sl.chain(sl.Identity(), 0.1)
    with refused(TypeError, "Link 'rule' … of type function", "Call it first: `adam(...)`"):
        sl.named_chain(clip=sl.ClipByGlobalNorm(1.0), rule=sl.adam)
    with refused(TypeError, "Link 1 … of type function", "Call it first: `sgd(...)`"):
        sl.Clip(1.0) | sl.sgd
    with refused(TypeError, "Link 0 … of type function", "`sl.Stateless(fn)`, with `fn(updates, p"):
        sl.chain(lambda updates: updates, sl.sgd(0.1))
    with refused(
        TypeError,
        "Link 0 … got <class 'slalom.rules.shaping.clip.Clip'>",
        "Call it first: `Clip(...)`",
    ):
        sl.Clip | sl.sgd(0.1)


class ReturnsUpdates(sl.AbstractTransform):
    def init(self, params):
        return None

    def update(self, updates, state, params=None, context=None):
        return updates


class CountsInPython(sl.AbstractTransform):
    def init(self, params):
        return 0

    def update(self, updates, state, params=None, context=None):
        return updates, state + 1


def test_classes_of_users():
    with refused(ValueError, "A chain has at least one link", "`sl.Identity()`"):
        sl.Chain((), ())
    with refused(
        TypeError,
        "ReturnsUpdates … got something of type dict",
        "the updates (from `step`, the parameters) and the new state",
    ):
        bound(ReturnsUpdates() | sl.sgd(0.1)).step(params(), params())

    def step_of(inner, init=sl.wrappers.AbstractWrapper.init, result=None):
        body = {"init": init, "run": lambda self, here, write, updates: result}
        wrong = type("Wrong", (sl.wrappers.AbstractWrapper,), body)(inner)
        bound(wrong.store("int8", min_size=1)).step(params(), params())

    with refused(TypeError, "Wrong … a pair … of type NoneType", "(from `step` … the new state"):
        step_of(sl.sgd(0.1))
    with refused(TypeError, "Wrong.init … a field `inner` … got tuple", "Leave `init` out"):
        step_of(sl.adam(0.1), lambda self, params: self.inner.init(params))
    with refused(TypeError, "Wrong must return a state … tuple", "same structure as `init`"):
        step_of(sl.sgd(0.1), lambda self, params: self.inner.average(0.9).init(params), ((), ()))
    with refused(
        TypeError,
        "'counts_in_python' is 0 of type int … returned 1",
        "Return an array from `init`, such as `jnp.zeros((), jnp.int32)`",
    ):
        bound(CountsInPython() | sl.sgd(0.1)).step(params(), params())
    with refused(
        ValueError,
        "The updates of Forgetful … 'b' is in the incoming updates but not in the updates",
        obvious="return an update of every parameter",
    ):
        bound(Forgetful(result=lambda u: u | {"b": None})).step(params(), params())
    with refused(TypeError, "Group 'a' … of type function", "Call it first: `adam(...)`"):
        sl.partition({"a": sl.adam}, {"b": "a"})
    with refused(ValueError, "Two links … 'rule'", "must differ"):
        sl.named_chain(rule=sl.Identity()) | sl.named_chain(rule=sl.Identity())
    with refused(TypeError, "Bad has a field 'mask'", "Rename the field"):

        class Bad(sl.AbstractTransform):
            mask: int

            def init(self, params):
                del params

            def update(self, updates, state, params=None, context=None):
                return updates, state


def test_parts_and_declarations_of_rules():
    with refused(
        KeyError, "'clip' is not in this transform", "'scale_by_adam', 'scale_by_learning_rate'"
    ):
        sl.adam(0.1)["clip"]
    with refused(KeyError, "Scale is ambiguous", "'scale', 'scale_2'"):
        (sl.Scale(1.0) | sl.Scale(2.0))[sl.Scale]
    with refused(TypeError, "Scale has no positions", "a name or a class"):
        sl.Scale(1.0)[0]

    with refused(ValueError, "Wrong.over must be one of 'number', …", "… 'all', got 'numbers'"):
        rule(over="numbers")
    with refused(TypeError, "Wrong.needs must be a tuple of names", "('params',)"):
        rule(needs="params")
    with refused(TypeError, "Wrong … `begin`", "`self.due` … `state.age % 10 == 0`"):
        refreshed(keeping("factors"))
    with refused(TypeError, "Wrong.refreshes names 'roots'", "`sl.fields.per_param()`"):
        refreshed(keeping("roots"))
    with refused(AttributeError, "no field 'factor' … are: 'factors'", "`self.factor = ...`"):
        refreshed(keeping(advance=lambda self, g, leaf: setattr(leaf, "factor", g)))
    with refused(ValueError, "'0..1' is not an interval", "'[0, 1)'"):
        sl.fields.hyperparameter(1.0, within="0..1")
    with refused(TypeError, "complex64 update … float32 parameter", obvious="take its real part"):
        sl.tree.add(jnp.ones(2), jnp.ones(2, jnp.complex64))
    tx = sl.sgd(0.1).drive({"learning_rate": sl.schedules.ReduceOnPlateau(1.0)})
    with refused(TypeError, "Drive needs 'value'", "`sl.Context(value=loss)`"):
        tx.update(params(), tx.init(params()), params(), sl.Context(step=0))
    tx, one = sl.adam(0.1).flatten(), {"b": jnp.ones(2)}
    with refused(ValueError, "`.flatten()` … for 2 … gets 1", "`sl.Optimizer(tx, model)`, or"):
        tx.update(one, tx.init(params()), one)


def rule(**phases):
    return type("Wrong", (sl.AbstractRule,), {"direction": lambda self, g, leaf: g} | phases)()


class Kept(eqx.Module):
    factors: object = sl.fields.per_param()


def init(self, params):
    return Kept(self.for_each_matrix(params, lambda n, m, dtype: (jnp.zeros((n, n), dtype),)))


def keeping(*refreshes, **phases):
    return rule(over="matrix", refreshes=refreshes, init=init, **phases)


def test_phases_of_rules_that_return_or_read_what_they_must_not():
    for wrong, got in ((None, "of type NoneType"), (jnp.ones(3), "of shape (3,)")):
        with refused(TypeError, f"Wrong.direction … shape (2, 3) … {got}", obvious="as it has"):
            refreshed(rule(direction=lambda self, g, leaf, wrong=wrong: wrong))
    with refused(TypeError, "Wrong.measure … dictionary of scalars, got", obvious="return one"):
        refreshed(rule(measure=lambda self, g, leaf: jnp.sum(g)))
    with refused(TypeError, "Wrong.reduce … dictionary of scalars, got {'a'", obvious="sum it"):
        refreshed(rule(reduce=lambda self, g, leaf: {"a": g}))
    with refused(KeyError, "b: `measure` and `reduce` return 'a'", obvious="read 'a'"):
        read = {"finish": lambda self, sums, state: sums["b"]}
        refreshed(rule(measure=lambda self, g, leaf: {"a": jnp.sum(g)}, **read))
    with refused(ValueError, "Wrong.plans … 2 values for 1 leaves", obvious="one for each leaf"):
        refreshed(rule(plans=lambda self, params: (1, 2)))
    for name, need in (("p", "params"), ("grad", "grad"), ("value", "value")):
        with refused(AttributeError, f"'{name}'", f'`self.{name}` … `needs = ("{need}",)`'):
            refreshed(rule(direction=lambda self, g, leaf, name=name: getattr(self, name)))
    with refused(ValueError, "'factors' … shape ((3, 3),), not ((3, 2),)", obvious="keep it"):
        refreshed(keeping(advance=lambda self, g, leaf: setattr(leaf, "factors", (g,))))


def test_gradients_that_pass_raw_and_places_outside_of_maximize():
    masked = sl.adam(0.1).mask(sl.where.path("w"))
    for tx in (masked, sl.ClipByGlobalNorm(1.0) | masked):
        with refused(ValueError, "'b' … 'mask' passes", RAW):
            bound(tx)
    with refused(ValueError, "'b' … 'every_k.mask' passes", RAW):
        bound(masked.every_k(2))
    with refused(
        ValueError,
        "'b' … 'partition.bias'",
        "`sl.ScaleByLearningRate(1e-3)` … `.maximize()` … `sl.sgd(1e-3).maximize()` … "
        "`sl.SetToZero()`",
    ):
        bound(sl.adam(0.1).partition({sl.where.path("b"): sl.Trace(0.9)}, names=("bias",)))

    ascent = sl.sgd(0.1).partition({sl.where.path("b"): sl.sgd(0.1).maximize()}).every_k(2)
    plateau = {"learning_rate": sl.schedules.ReduceOnPlateau(0.1, 0.5, 3)}
    outside = {
        "mechanize": lambda: ascent.mechanize(),
        "sam": lambda: ascent.sam(0.05),
        "drive": lambda: sl.sgd(0.1).maximize().every_k(2).drive(plateau),
        "skip_spikes": lambda: sl.sgd(0.1).maximize().skip_spikes(),
    }
    for method, make in outside.items():
        name = method.title().replace("_", "")
        with refused(
            ValueError, f"{name} is outside `.maximize()`", f"`tx.{method}(...).maximize()`"
        ):
            bound(make())


def test_states_updates_and_transforms_of_optax():
    with refused(TypeError, "'forgetful.n' from int32[] to float32[]", "`.astype(old.dtype)`"):
        tx = Forgetful(state=lambda old: Count(old.n.astype(jnp.float32))) | sl.sgd(0.1)
        bound(tx).step(params(), params())
    with refused(TypeError, "'forgetful.n' from int32[] to int32[1]", "`.astype(old.dtype)`"):
        tx = Forgetful(state=lambda old: Count(old.n[None])) | sl.sgd(0.1)
        bound(tx).step(params(), params())
    with refused(TypeError, "Forgetful … state is … tuple … Count", "same structure as `init`"):
        bound(Forgetful(state=lambda old: ()).every_k(2) | sl.sgd(0.1)).step(params(), params())
    with refused(ValueError, "of Forgetful at 'b' has shape () … (2,)", "Shapes must be equal"):
        tx = Forgetful(result=lambda updates: jax.tree.map(jnp.sum, updates))
        bound(tx).update(params(), params())
    with refused(
        ValueError,
        "The updates of Forgetful … of type list, the incoming updates of type dict",
        obvious="return an update of every parameter",
    ):
        bound(Forgetful(result=jax.tree.leaves) | sl.sgd(0.1)).update(params(), params())
    for tx, names in [
        (sl.Stateless(lambda u: u), "updates, params"),
        (sl.StatelessPerLeaf(lambda u: u), "update, param"),
        (sl.sgd(0.1).when(lambda u: u, otherwise="zero"), "context, updates"),
    ]:
        with refused(TypeError, f"({names}), but <lambda> takes (u)", f"`lambda {names}: ...`"):
            tx.update(params(), tx.init(params()), params(), sl.Context(step=0))

    with refused(TypeError, "got GradientTransformation", OF_OPTAX):
        bound(optax.adam(1e-3))
    with refused(
        TypeError,
        "Link 1 … got GradientTransformation … of type GradientTransformationExtraArgs",
        OF_OPTAX,
    ):
        sl.ClipByGlobalNorm(1.0) | optax.adam(1e-3)


def test_projections():
    after = "`tx.schedule_free().project(...)`. In a partition, do so"
    with refused(ValueError, "`.project(...)` … 'every_k.schedule_free'", after):
        sl.adam(0.1).schedule_free().every_k(2).project(sl.projections.non_negative())
    with refused(
        TypeError,
        "Project.fn … got <class 'slalom.projections.polyhedra.non_negative'>",
        "`sl.projections.l2_ball(1.0)` … Call it first: `non_negative(...)`",
    ):
        sl.sgd(0.1).project(sl.projections.non_negative)
    with refused(
        ValueError, "<lambda> … 'w' is in what it receives but not in what it returns", LIKE
    ):
        bound(sl.sgd(0.1).project(lambda p: {"b": p["b"]})).step(params(), params())
    with refused(
        ValueError, "<lambda> … at 'b' it received shape (2,) and returned shape ()", LIKE
    ):
        tx = sl.sgd(0.1).project(lambda p: jax.tree.map(jnp.sum, p))
        bound(tx).step(params(), params())
    with refused(TypeError, "sl.projections.simplex() … 'w' is complex64", REAL):
        sl.projections.simplex()({"w": jnp.ones(2, complex)})
    with refused(TypeError, "sl.projections.simplex() … 'z' is complex64", REAL):
        sl.Optimizer(sl.sgd(0.1).project(sl.projections.simplex()), {"z": jnp.ones(2, complex)})
    with refused(TypeError, "<lambda> … at 'b' it received float32 and returned complex64", LIKE):
        tx = sl.sgd(0.1).project(lambda p: jax.tree.map(lambda x: x.astype(complex), p))
        bound(tx).step(params(), params())
    with refused(ValueError, "Project writes the parameters itself", "the last link"):
        sl.sgd(0.1).project(sl.projections.simplex()) | sl.Scale(2.0)


def test_sets_and_bounds_of_projections():
    with refused(ValueError, "box.lower … got 2.0 and 1.0", "at most box.upper"):
        sl.projections.box(2.0, 1.0)
    with refused(
        ValueError, "box.upper has shape (3,) at 'b' … (2,)", "Nothing is broadcast but scalars"
    ):
        sl.projections.box(None, {"b": jnp.ones(3)})({"b": jnp.ones(2)})
    with refused(
        ValueError,
        "'b' is in vector.a but not in the tree to project",
        "a tree like the one to project",
    ):
        sl.projections.vector(params())({"w": jnp.ones((3, 2))})
    with refused(TypeError, "box.upper … a number or an array at 'w', got 'x'", obvious="pass one"):
        sl.projections.box(None, {"w": "x"})({"w": jnp.ones(2)})
    with refused(
        ValueError,
        "hyperplane.a has shape (3,) and dtype float32 at 'w' … shape (2,) and dtype float32",
        obvious="pass a normal like the leaf",
    ):
        sl.projections.hyperplane({"w": jnp.ones(3)}, 1.0)({"w": jnp.ones(2)})

    with refused(
        ValueError,
        "`.project(...)` cannot be around 'scale_by_lbfgs'",
        "`sl.adam(1e-3).project(...)` … `sl.lbfgs(bounds=(lower, upper))`",
    ):
        sl.lbfgs().project(sl.projections.l2_ball(1.0))
    with refused(
        ValueError,
        "`.project(...)` cannot be around 'scale_by_gauss_newton'",
        "`sl.adam(1e-3).project(...)`",
    ):
        sl.gauss_newton().project(sl.projections.box(0.0, 1.0))
    spheres, box = sl.projections.sphere(), sl.projections.box(0.0, 1.0)
    outside = {
        "average": lambda: sl.sgd(0.1).project(spheres).average(),
        "lookahead": lambda: sl.sgd(0.1).project(spheres).lookahead(2, 0.5),
        "outer": lambda: sl.sgd(0.1).project(box).outer(sl.sgd(0.7, momentum=0.9), 2),
    }
    for method, make in outside.items():
        start = f"`.{method}(...)` around 'project' would evaluate parameters outside of its set"
        with refused(ValueError, start, f"`tx.{method}(...).project(...)`"):
            make()
    with refused(
        ValueError,
        "an average leaves the set `sl.projections.sphere()`, which is not convex",
        "`tx.average(...).project(...)`",
    ):
        sl.sgd(0.1).schedule_free().project(spheres)
    with refused(
        TypeError, "lbfgs.bounds … got 1.0", "`(lower, upper)` or a mapping from selectors"
    ):
        sl.lbfgs(bounds=1.0)
    with refused(
        TypeError, "levenberg_marquardt.bounds … got 1.0", "`(lower, upper)` or a mapping"
    ):
        sl.levenberg_marquardt(bounds=1.0)


def test_places_outside_and_arguments_of_a_scaled_loss():
    tx = sl.adam(0.1).scale_loss()
    outside = {
        "Chain": lambda: sl.ClipByGlobalNorm(1.0) | tx,
        "IfFinite": lambda: tx.if_finite(),
        "EveryK": lambda: tx.every_k(2, skip=sl.SkipNotFinite()),
        "Partition": lambda: tx.partition({sl.where.path("b"): sl.sgd(0.1)}),
        "Mask": lambda: tx.mask(sl.where.path("b")),
        "Record": lambda: tx.record(),
        "Sam": lambda: tx.sam(),
        "When": lambda: tx.when(lambda context, updates: context.step < 1, otherwise="zero"),
    }
    for name, make in outside.items():
        with refused(ValueError, f"{name} is outside `.scale_loss()`", "`tx.scale_loss()`"):
            bound(make())

    with refused(
        ValueError, "Two parts … `.scale_loss()`", "once, on the whole optimizer: `tx.scale_loss()`"
    ):
        bound(sl.adam(0.1).scale_loss().scale_loss())
    with refused(ValueError, "ScaleLoss.initial … got 0.0", "in [2**-126, 2**126]"):
        sl.adam(0.1).scale_loss(0)
    with refused(TypeError, "ScaleLoss.initial … got '1' of type str", "a number"):
        sl.adam(0.1).scale_loss("1")
    with refused(ValueError, "ScaleLoss.growth_interval … got 0", "at least 1"):
        sl.adam(0.1).scale_loss(growth_interval=0)
    with refused(
        TypeError,
        "`reuse_linesearch=True` … ends with ScaleLoss",
        "`sl.ScaleByZoomLinesearch` … `sl.ScaleByBacktrackingLinesearch(…, store_grad=True)`",
    ):
        step = sl.train_step(lambda model: jnp.sum(model["b"]), reuse_linesearch=True)
        step(params(), bound(sl.lbfgs().scale_loss()))


def refreshed(tx):
    matrix = {"w": jnp.ones((2, 3))}
    tx.update(matrix, tx.init(matrix))
