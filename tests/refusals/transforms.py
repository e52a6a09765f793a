"""Transforms that are none, or do not keep their promises."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import slalom as sl

from ._table import Count, Forgetful, bound, params, refused

RAW = "`.only(where)` instead of `.mask(where)` … before the learning rate"
OF_OPTAX = "`sl.adam(1e-3)` instead of `optax.adam(1e-3)` … `sl.interop.from_optax(tx)`"
LIKE = "a tree like the one that it receives"
REAL = "`tx.project(fn, where=~sl.where.dtype(jnp.complexfloating))`"


@refused(TypeError, "first argument … got 0.1", "`sl.adam(1e-3)`", unchecked=True)
def an_optimizer_of_a_number():
    bound(0.1)


@refused(
    TypeError, "first argument … got <function adam", "Call it first: `adam(...)`", unchecked=True
)
def a_recipe_that_was_not_called():
    bound(sl.adam)


@refused(
    TypeError,
    "got <class 'slalom.transforms.adaptive.adam.ScaleByAdam'>",
    "Call it first: `ScaleByAdam(...)`",
    unchecked=True,
)
def a_class_that_was_not_called():
    bound(sl.ScaleByAdam)


@refused(TypeError, "first argument … got a dict", "`sl.Optimizer(tx, model)`", unchecked=True)
def model_and_transform_exchanged():
    sl.Optimizer(params(), sl.adam(0.1))


@refused(TypeError, "Link 1 … got 0.1 of type float", "a transform", unchecked=True)
def a_number_as_link():
    sl.chain(sl.Identity(), 0.1)


@refused(TypeError, "Link 'rule' … of type function", "Call it first: `adam(...)`", unchecked=True)
def a_recipe_as_link():
    sl.named_chain(clip=sl.ClipByGlobalNorm(1.0), rule=sl.adam)


@refused(TypeError, "Link 1 … of type function", "Call it first: `sgd(...)`", unchecked=True)
def a_recipe_after_a_transform():
    sl.Clip(1.0) | sl.sgd


@refused(
    TypeError,
    "Link 0 … got <class 'slalom.transforms.shaping.clip.Clip'>",
    "Call it first: `Clip(...)`",
    unchecked=True,
)
def a_class_before_a_transform():
    sl.Clip | sl.sgd(0.1)


@refused(ValueError, "A chain has at least one link", "`sl.Identity()`")
def a_chain_of_nothing():
    sl.Chain((), ())


class ReturnsUpdates(sl.AbstractTransform):
    def init(self, params):
        return None

    def update(self, updates, state, params=None, context=None):
        return updates


@refused(
    TypeError,
    "ReturnsUpdates … got something of type dict",
    "the updates (from `step`, the parameters) and the new state",
)
def updates_returned_without_a_state():
    bound(ReturnsUpdates() | sl.sgd(0.1)).step(params(), params())


@refused(TypeError, "NeedsText.needs", "a tuple of names: ('value',)")
def a_string_as_needs():
    class NeedsText(sl.AbstractTransform):
        needs = "value"


class CountsInPython(sl.AbstractTransform):
    def init(self, params):
        return 0

    def update(self, updates, state, params=None, context=None):
        return updates, state + 1


@refused(
    TypeError,
    "'counts_in_python' is 0 of type int … returned 1",
    "Return an array from `init`, such as `jnp.zeros((), jnp.int32)`",
)
def a_count_that_is_no_array():
    bound(CountsInPython() | sl.sgd(0.1)).step(params(), params())


@refused(
    ValueError,
    "'b' is in the parameters but not in the updates",
    obvious="return an update of every parameter",
)
def updates_made_with_a_hole():
    bound(Forgetful(result=lambda u: u | {"b": None})).step(params(), params())


@refused(TypeError, "Group 'a' … of type function", "Call it first: `adam(...)`", unchecked=True)
def a_recipe_as_group():
    sl.partition({"a": sl.adam}, {"b": "a"})


@refused(ValueError, "Two links … 'rule'", "must differ")
def two_links_of_one_name():
    sl.named_chain(rule=sl.Identity()) | sl.named_chain(rule=sl.Identity())


@refused(TypeError, "Bad has a field 'mask'", "Rename the field")
def a_field_named_like_a_method():
    class Bad(sl.AbstractTransform):
        mask: int

        def init(self, params):
            del params

        def update(self, updates, state, params=None, context=None):
            return updates, state


@refused(KeyError, "'clip' is not in this transform", "'scale_by_adam', 'scale_by_learning_rate'")
def a_part_that_is_not_there():
    sl.adam(0.1)["clip"]


@refused(KeyError, "Scale is ambiguous", "'scale', 'scale_2'")
def a_part_that_is_there_twice():
    (sl.Scale(1.0) | sl.Scale(2.0))[sl.Scale]


@refused(TypeError, "Scale has no positions", "a name or a class")
def a_position_without_a_chain():
    sl.Scale(1.0)[0]


@refused(ValueError, "'b' … 'mask' passes", RAW)
def raw_gradients_out_of_a_mask():
    bound(sl.adam(0.1).mask(sl.where.path("w")))


@refused(ValueError, "'b' … 'mask' passes", RAW)
def raw_gradients_out_of_the_last_link():
    bound(sl.ClipByGlobalNorm(1.0) | sl.adam(0.1).mask(sl.where.path("w")))


@refused(ValueError, "'b' … 'every_k.mask' passes", RAW)
def raw_gradients_out_of_an_inner_mask():
    bound(sl.adam(0.1).mask(sl.where.path("w")).every_k(2))


@refused(
    ValueError,
    "'b' … 'partition.bias'",
    "`sl.ScaleByLearningRate(1e-3)` … `.maximize()` … `sl.sgd(1e-3).maximize()` … `sl.SetToZero()`",
)
def a_group_without_a_learning_rate():
    bound(sl.adam(0.1).partition({sl.where.path("b"): sl.Trace(0.9)}, names=("bias",)))


ASCENT = {sl.where.path("b"): sl.sgd(0.1, maximize=True)}


@refused(ValueError, "Mechanize is outside `.maximize()`", "`tx.mechanize(...).maximize()`")
def a_wrapper_that_descends_around_an_ascent():
    bound(sl.sgd(0.1).partition(ASCENT).every_k(2).mechanize())


@refused(ValueError, "Sam is outside `.maximize()`", "`tx.sam(...).maximize()`")
def a_worst_point_of_a_descent_around_an_ascent():
    bound(sl.sgd(0.1).partition(ASCENT).every_k(2).sam(0.05))


@refused(ValueError, "Drive is outside `.maximize()`", "`tx.drive(...).maximize()`")
def a_schedule_that_follows_the_loss_around_an_ascent():
    plateau = sl.schedules.ReduceOnPlateau(0.1, 0.5, 3)
    bound(sl.sgd(0.1).maximize().every_k(2).drive({"learning_rate": plateau}))


@refused(TypeError, "'forgetful.n' from int32[] to float32[]", "`.astype(old.dtype)`")
def a_state_that_changes_dtype():
    tx = Forgetful(state=lambda old: Count(old.n.astype(jnp.float32))) | sl.sgd(0.1)
    bound(tx).step(params(), params())


@refused(TypeError, "'forgetful.n' from int32[] to int32[1]", "`.astype(old.dtype)`")
def a_state_that_changes_shape():
    tx = Forgetful(state=lambda old: Count(old.n[None])) | sl.sgd(0.1)
    bound(tx).step(params(), params())


@refused(TypeError, "missing: ['forgetful.n'], new: []", "the same structure as `init`")
def a_state_that_changes_structure():
    bound(Forgetful(state=lambda old: ()) | sl.sgd(0.1)).step(params(), params())


@refused(ValueError, "The update at 'b' has shape () … (2,)", "Shapes must be equal")
def updates_made_of_another_shape():
    tx = Forgetful(result=lambda updates: jax.tree.map(jnp.sum, updates))
    bound(tx).update(params(), params())


@refused(
    ValueError, "'w' is in the state or parameters but not in the updates", "of the same model"
)
def updates_made_of_another_structure():
    bound(Forgetful(result=lambda updates: {"b": updates["b"]})).update(params(), params())


@refused(TypeError, "got GradientTransformation", OF_OPTAX, unchecked=True)
def an_optimizer_of_optax():
    bound(optax.adam(1e-3))


@refused(
    TypeError,
    "Link 1 … got GradientTransformation … of type GradientTransformationExtraArgs",
    OF_OPTAX,
    unchecked=True,
)
def a_link_of_optax():
    sl.ClipByGlobalNorm(1.0) | optax.adam(1e-3)


@refused(
    TypeError,
    "Project.fn … got <class 'slalom.projections.boxes.non_negative'>",
    "`sl.projections.l2_ball(1.0)` … Call it first: `non_negative(...)`",
)
def a_projection_that_is_not_called():
    sl.sgd(0.1).project(sl.projections.non_negative)


@refused(ValueError, "<lambda> … 'w' is in what it receives but not in what it returns", LIKE)
def a_projection_that_returns_less():
    bound(sl.sgd(0.1).project(lambda p: {"b": p["b"]})).step(params(), params())


@refused(ValueError, "<lambda> … at 'b' it received shape (2,) and returned shape ()", LIKE)
def a_projection_that_returns_other_shapes():
    tx = sl.sgd(0.1).project(lambda p: jax.tree.map(jnp.sum, p))
    bound(tx).step(params(), params())


@refused(TypeError, "sl.projections.simplex() … 'w' is complex64", REAL)
def a_simplex_of_complex_numbers():
    sl.projections.simplex()({"w": jnp.ones(2, complex)})


@refused(ValueError, "box.lower … got 2.0 and 1.0", "at most box.upper")
def a_box_without_inside():
    sl.projections.box(2.0, 1.0)


@refused(ValueError, "box.upper has shape (3,) at 'b' … (2,)", "Nothing is broadcast but scalars")
def a_bound_of_another_shape():
    sl.projections.box(None, {"b": jnp.ones(3)})({"b": jnp.ones(2)})


@refused(
    ValueError,
    "'b' is in vector.a but not in the tree to project",
    "a tree like the one to project",
)
def a_vector_of_another_structure():
    sl.projections.vector(params())({"w": jnp.ones((3, 2))})


@refused(
    ValueError,
    "hyperplane.a has shape (3,) and dtype float32 at 'w' … shape (2,) and dtype float32",
    obvious="pass a normal like the leaf",
)
def a_normal_of_another_shape():
    sl.projections.hyperplane({"w": jnp.ones(3)}, 1.0)({"w": jnp.ones(2)})


@refused(TypeError, "<lambda> … at 'b' it received float32 and returned complex64", LIKE)
def a_projection_that_makes_parameters_complex():
    tx = sl.sgd(0.1).project(lambda p: jax.tree.map(lambda x: x.astype(complex), p))
    bound(tx).step(params(), params())


@refused(ValueError, "Project writes the parameters itself", "the last link")
def a_link_after_a_projection():
    sl.sgd(0.1).project(sl.projections.simplex()) | sl.Scale(2.0)


@refused(TypeError, "sl.projections.simplex() … 'z' is complex64", REAL)
def a_simplex_of_complex_parameters():
    sl.Optimizer(sl.sgd(0.1).project(sl.projections.simplex()), {"z": jnp.ones(2, complex)})


@refused(
    ValueError,
    "`.project(...)` cannot be around 'scale_by_lbfgs'",
    "`sl.adam(1e-3).project(...)` … `sl.lbfgs(bounds=(lower, upper))`",
)
def a_projection_around_lbfgs():
    sl.lbfgs().project(sl.projections.l2_ball(1.0))


@refused(
    ValueError,
    "`.project(...)` cannot be around 'scale_by_gauss_newton'",
    "`sl.adam(1e-3).project(...)`",
)
def a_box_around_gauss_newton():
    sl.gauss_newton().project(sl.projections.box(0.0, 1.0))


@refused(TypeError, "lbfgs.bounds … got 1.0", "`(lower, upper)` or a mapping from selectors")
def one_bound():
    sl.lbfgs(bounds=1.0)


def scaled_inside(outer: str) -> str:
    return (
        f"{outer} is outside `.scale_loss()`, so it would use gradients that are still "
        "multiplied by the scale. Call `.scale_loss()` last, on the whole optimizer: "
        "`tx.scale_loss()`."
    )


@refused(ValueError, "Chain is outside `.scale_loss()`", "`tx.scale_loss()`")
def a_clip_before_a_scaled_loss():
    bound(sl.ClipByGlobalNorm(1.0) | sl.adam(0.1).scale_loss())


@refused(ValueError, "IfFinite is outside `.scale_loss()`", "`tx.scale_loss()`")
def a_scaled_loss_whose_overflows_are_hidden():
    bound(sl.adam(0.1).scale_loss().if_finite())


@refused(ValueError, "EveryK is outside `.scale_loss()`", "`tx.scale_loss()`")
def a_scaled_loss_whose_mini_batches_are_skipped():
    bound(sl.adam(0.1).scale_loss().every_k(2, skip=sl.SkipNotFinite()))


@refused(ValueError, "Partition is outside `.scale_loss()`", "`tx.scale_loss()`")
def a_scaled_loss_for_some_parameters():
    bound(sl.adam(0.1).scale_loss().partition({sl.where.path("b"): sl.sgd(0.1)}))


@refused(ValueError, "Mask is outside `.scale_loss()`", "`tx.scale_loss()`")
def a_masked_scaled_loss():
    bound(sl.adam(0.1).scale_loss().mask(sl.where.path("b")))


@refused(ValueError, "Record is outside `.scale_loss()`", "`tx.scale_loss()`")
def recorded_norms_of_a_scaled_loss():
    bound(sl.adam(0.1).scale_loss().record())


@refused(ValueError, "Sam is outside `.scale_loss()`", "`tx.scale_loss()`")
def a_perturbation_along_gradients_of_a_scaled_loss():
    bound(sl.adam(0.1).scale_loss().sam())


@refused(ValueError, "When is outside `.scale_loss()`", "`tx.scale_loss()`")
def a_condition_on_gradients_of_a_scaled_loss():
    tx = sl.adam(0.1).scale_loss()
    bound(tx.when(lambda context, updates: context.step < 1, otherwise="zero"))


@refused(
    ValueError, "Two parts … `.scale_loss()`", "once, on the whole optimizer: `tx.scale_loss()`"
)
def a_loss_that_is_scaled_twice():
    bound(sl.adam(0.1).scale_loss().scale_loss())


@refused(ValueError, "ScaleLoss.initial … got 0.0", "in [2**-126, 2**126]")
def a_loss_scale_of_zero():
    sl.adam(0.1).scale_loss(0)


@refused(TypeError, "ScaleLoss.initial … got '1' of type str", "a number", unchecked=True)
def a_loss_scale_that_is_no_number():
    sl.adam(0.1).scale_loss("1")


@refused(ValueError, "ScaleLoss.growth_interval … got 0", "at least 1")
def a_loss_scale_that_grows_in_no_steps():
    sl.adam(0.1).scale_loss(growth_interval=0)


@refused(
    TypeError,
    "`reuse_linesearch=True` … ends with ScaleLoss",
    "`sl.ScaleByZoomLinesearch` … `sl.ScaleByBacktrackingLinesearch(…, store_grad=True)`",
)
def a_scaled_line_search_that_is_reused():
    step = sl.train_step(lambda model: jnp.sum(model["b"]), reuse_linesearch=True)
    step(params(), bound(sl.lbfgs().scale_loss()))


# --- writing half-precision parameters --------------------------------------------------------


@refused(
    ValueError,
    "Write.policy … got 'bfloat16'",
    '"master", "kahan", "ecc", "stochastic", "nearest"',
    unchecked=True,
)
def an_unknown_write_policy():
    sl.sgd(0.1).write("bfloat16")


@refused(ValueError, "Write.key … got -1", "[0, 2**31) … `jax.random.key(-1)`")
def a_negative_key_of_random_rounding():
    sl.sgd(0.1).write("stochastic", key=-1)


@refused(
    TypeError,
    '`.write("kahan")` … lost',
    "`model, opt = opt.step(model, grads)` instead of `opt.update(model, grads)` … pass its "
    "own `write` on",
)
def updates_under_a_write_policy():
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params())
    sl.Optimizer(sl.sgd(0.1).write("kahan"), half).update(half, half)


@refused(
    ValueError,
    "`.write('ecc')` wraps … `.write('kahan')`",
    "remove one … each group of a partition",
)
def two_write_policies():
    sl.sgd(0.1).write("kahan").every_k(2).write("ecc")


@refused(
    ValueError,
    "`.outer(...)` … cannot be around `.write('kahan')`",
    "`tx.outer(...).write('kahan')` … in each group",
)
def slow_weights_around_a_write_policy():
    sl.sgd(0.1).write("kahan").lookahead(5, 0.5)


@refused(
    ValueError,
    "`.project(...)` … cannot be around `.write('kahan')`",
    "`tx.project(...).write('kahan')` … in each group",
)
def a_projection_around_a_write_policy():
    sl.sgd(0.1).write("kahan").project(sl.projections.simplex())


@refused(TypeError, "Write needs 'step'", "`context=sl.Context(step=n)`")
def random_rounding_without_a_step():
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params())
    tx = sl.sgd(0.1).write("stochastic")
    tx.step(half, tx.init(half), half)


# --- outer optimizers -------------------------------------------------------------------------


@refused(ValueError, "`.outer` and `.lookahead` … 'schedule_free'", "Leave out one")
def lookahead_around_schedule_free():
    sl.sgd(0.1).schedule_free().lookahead(5, 0.5)


@refused(ValueError, "'outer' inside `.schedule_free`", "Leave out one")
def schedule_free_around_lookahead():
    sl.sgd(0.1).lookahead(5, 0.5).schedule_free()


@refused(ValueError, "Outer.optimizer contains 'average'", "`tx.outer(...).average(...)`")
def an_average_as_an_outer_optimizer():
    sl.sgd(0.1).outer(sl.sgd(0.7).average(), 5)


@refused(
    ValueError,
    "`.schedule_free` has `decay_where` without a `weight_decay`",
    "Add one, or remove `decay_where`",
)
def schedule_free_with_places_of_no_decay():
    sl.sgd(0.1).schedule_free(decay_where=sl.where.ndim(2))


@refused(
    ValueError,
    "`.schedule_free` has `polyak_beta` … without `polyak=True`",
    "Add it, or remove `polyak_beta`",
)
def schedule_free_with_an_average_for_no_polyak_steps():
    sl.sgd(0.1).schedule_free(polyak_beta=0.5)


@refused(ValueError, "ScheduleFree.average_after … got -1", "at least 0")
def schedule_free_that_averages_before_the_start():
    sl.sgd(0.1).schedule_free(average_after=-1)


@refused(
    TypeError,
    "ScheduleFree … needs 'value'",
    "`opt.step(model, grads, value=loss)` … `sl.train_step` passes value",
)
def polyak_steps_without_a_loss():
    bound(sl.adam(1.0).schedule_free(polyak=True)).step(params(), params())


@refused(
    ValueError,
    "'every_k' inside `.schedule_free(polyak=True)`",
    "`tx.schedule_free(polyak=True).every_k(...)`",
)
def polyak_steps_around_windows():
    sl.adam(1.0).every_k(2).schedule_free(polyak=True)


@refused(
    ValueError,
    "'keep_initial_norm' cannot be inside `.mechanize`",
    "Write it after `.mechanize`: `tx.mechanize(...) | sl.KeepInitialNorm(...)`",
)
def a_norm_that_mechanic_would_not_keep():
    (sl.sgd(1.0) | sl.KeepInitialNorm()).mechanize()


@refused(ValueError, "'outer' inside `.mechanize`", "`tx.mechanize(...).outer(...)`")
def slow_weights_that_mechanic_would_leave_behind():
    sl.sgd(1.0).lookahead(2, 0.5).mechanize()


@refused(ValueError, "'average' inside `.graft`", "`direction.graft(magnitude).average(...)`")
def an_average_as_a_magnitude():
    sl.sgd(0.1).graft(sl.adam(0.1).average())


@refused(TypeError, "Graft.magnitude … got 'adam' of type str", "a transform", unchecked=True)
def a_name_as_a_magnitude():
    sl.sgd(0.1).graft("adam")  # pyright: ignore[reportArgumentType]


@refused(TypeError, "Outer.optimizer … got 0.7 of type float", "a transform", unchecked=True)
def a_number_as_an_outer_optimizer():
    sl.sgd(0.1).outer(0.7, 5)


@refused(ValueError, "`.outer` … sl.ScaleByAdam()", "`sl.sgd(0.7)`")
def an_outer_optimizer_that_ascends():
    bound(sl.sgd(0.1).outer(sl.ScaleByAdam(), 5))


@refused(ValueError, "SkipSpikes is outside `.maximize()`", "`tx.skip_spikes(...).maximize()`")
def skipped_spikes_of_what_is_maximized():
    bound(sl.sgd(0.1).maximize().skip_spikes())


@refused(ValueError, "Wide.over must be one of 'number', …", "… 'all', got 'numbers'")
def a_need_that_does_not_exist():
    class Wide(sl.AbstractRule):
        over = "numbers"


@refused(TypeError, "Bad.needs must be a tuple of names", "('params',)")
def needs_that_are_no_tuple():
    class Bad(sl.AbstractRule):
        needs = "params"


class Kept(eqx.Module):
    factors: object = sl.fields.per_param()


class NeverDue(sl.AbstractRule):
    over = "matrix"
    refreshes = ("factors",)

    def init(self, params):
        return Kept(self.for_each_matrix(params, lambda n, m, dtype: (jnp.zeros((n, n), dtype),)))

    def direction(self, now, g, leaf):
        return g


class Misnamed(NeverDue):
    refreshes = ("roots",)


def refreshed(tx):
    matrix = {"w": jnp.ones((2, 3))}
    tx.update(matrix, tx.init(matrix))


@refused(TypeError, "NeverDue … `begin`", "`now.due` … `state.age % 10 == 0`")
def a_refresh_that_is_never_due():
    refreshed(NeverDue())


@refused(TypeError, "Misnamed.refreshes names 'roots'", "`sl.fields.per_param()`")
def a_refresh_of_an_unknown_field():
    refreshed(Misnamed())
