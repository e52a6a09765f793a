"""Several losses, projections of matrices, and averages made from checkpoints."""

import tempfile

import jax.numpy as jnp

import slalom as sl

from ._table import bound, params, refused

NAMES = ("first", "second")
COMBINED = sl.sgd(0.1).combine(sl.combine.UPGrad(), NAMES)


def trained(loss_fn, tx=COMBINED, **options):
    sl.train_step(loss_fn, **options)(params(), bound(tx), jnp.ones(4))


def losses(model, x):
    return {"first": jnp.sum(model["w"]) * jnp.mean(x), "second": jnp.sum(model["b"] ** 2)}


# --- several losses -------------------------------------------------------------------------


@refused(
    TypeError, "Combine ('combine') needs 'terms'", "a dict of terms … `sl.train_step(loss_fn)`"
)
def a_combination_in_a_loop_by_hand():
    bound(COMBINED).step(params(), params())


@refused(ValueError, "`.combine` weights the terms of whole batches", "Remove `microbatches`")
def a_combination_of_microbatches():
    trained(losses, microbatches=2)


@refused(TypeError, "`.combine` … got an array of shape ()", "['first', 'second'] … a dict")
def a_combination_of_one_loss():
    trained(lambda model, x: jnp.sum(model["w"]))


@refused(TypeError, "`.combine` … got the terms ['first', 'third']", "['first', 'second'] … a dict")
def a_combination_of_other_losses():
    trained(lambda model, x: {"first": jnp.sum(model["w"]), "third": jnp.sum(x)})


@refused(ValueError, "The loss returned a dict without terms", obvious="return terms")
def a_loss_without_terms():
    trained(lambda model, x: {}, sl.sgd(0.1))


@refused(TypeError, "'first' has shape (3, 2) and dtype float32", "real floating scalars")
def a_term_that_is_no_scalar():
    trained(lambda model, x: {"first": model["w"]}, sl.sgd(0.1))


@refused(TypeError, "'first' is a str", "scalars")
def a_term_that_is_no_number():
    trained(lambda model, x: {"first": "low"}, sl.sgd(0.1))


@refused(ValueError, "Two parts … `.combine(...)`", "once, on the whole optimizer")
def two_combinations():
    bound(COMBINED.combine(sl.combine.MGDA(), NAMES))


@refused(
    ValueError,
    "`.combine` … cannot be scaled",
    'Remove `.scale_loss()` … `compute_dtype="bfloat16"`',
)
def a_combination_of_scaled_losses():
    bound(sl.sgd(0.1).scale_loss().combine(sl.combine.MGDA(), NAMES))


@refused(ValueError, "'sam' … inside `.combine`", "Weight the terms in the loss")
def a_combination_around_sam():
    sl.sgd(0.1).sam(0.05).combine(sl.combine.MGDA(), NAMES)


@refused(TypeError, "Fixed.weights … got a dict", "in the order of the terms, such as `[1.0, 0.1]`")
def weights_by_name():
    sl.combine.Fixed({"first": 1.0, "second": 2.0})


@refused(ValueError, "Fixed.weights has shape (3,)", "there are 2 terms")
def three_weights_for_two_terms():
    sl.sgd(0.1).combine(sl.combine.Fixed([1.0, 2.0, 3.0]), NAMES)


@refused(TypeError, "Combine.combination … got 0.5", "`sl.combine.UPGrad()`", unchecked=True)
def a_number_as_a_combination():
    sl.sgd(0.1).combine(0.5, NAMES)  # pyright: ignore[reportArgumentType]


@refused(
    ValueError, "Combine.terms … got ('first',)", "two or more different names", unchecked=True
)
def one_term():
    sl.sgd(0.1).combine(sl.combine.UPGrad(), ("first",))


@refused(TypeError, "Combine.terms … got 'first'", '("a", "b")', unchecked=True)
def a_string_as_terms():
    sl.sgd(0.1).combine(sl.combine.UPGrad(), "first")


# --- samples of a posterior -----------------------------------------------------------------


@refused(ValueError, "'sam' … posterior", "Use one of the two")
def a_posterior_of_the_worst_points():
    bound(sl.ivon(0.1, 100).sam(0.05))


@refused(ValueError, "no posterior", "`sl.ivon`")
def samples_of_adam():
    bound().sample_params(params())


@refused(
    ValueError, "posterior … a loop for Optax", "Use `sl.train_step`, or `opt.sample_params(model)`"
)
def a_posterior_for_optax():
    sl.interop.to_optax(sl.ivon(0.1, 100))


@refused(TypeError, "The gradients must be floating … got arrays of dtype int32", obvious="cast")
def gradients_of_integers_in_code_for_optax():
    gt = sl.interop.to_optax(sl.sgd(0.1))
    gt.update({"w": jnp.arange(3)}, gt.init({"w": jnp.ones(3)}))


@refused(TypeError, "ScaleByIvon … 'z' is complex64", "`tx.split_complex()`")
def a_posterior_of_complex_parameters():
    sl.Optimizer(sl.ivon(0.1, 100), {"z": jnp.ones(2, jnp.complex64)})


# --- projections of matrices ----------------------------------------------------------------


@refused(
    ValueError,
    "sl.projections.stiefel() … 'b' has shape (2,)",
    "`tx.project(fn, where=sl.where.ndim(2))`",
)
def orthonormal_columns_of_a_vector():
    bound(sl.sgd(0.1).project(sl.projections.stiefel()))


@refused(
    ValueError,
    "hypercube.scale … got an array of shape (3,)",
    "a number … `sl.projections.box(0.0, bounds)`",
    unchecked=True,
)
def a_bound_of_each_entry_of_a_hypercube():
    sl.projections.hypercube(jnp.ones(3))


@refused(
    ValueError,
    "sl.projections.sphere(axis=-2) needs an axis -2 … 'b' has shape (2,)",
    "`tx.project(fn, where=sl.where.ndim(2))`",
)
def unit_columns_of_a_vector():
    bound(sl.sgd(0.1).project(sl.projections.sphere(axis=-2)))


@refused(
    ValueError,
    "sl.projections.psd() … 'w' has shape (3, 2)",
    'square … `tx.project(fn, where=sl.where.path("**.covariance"))`',
)
def a_semidefinite_matrix_that_is_not_square():
    bound(sl.sgd(0.1).project(sl.projections.psd(), where=sl.where.ndim(2)))


# --- averages from checkpoints --------------------------------------------------------------


def synthesized(tx, model=None, sigma_rel=0.1, steps=2, **options):
    directory, before, opt = tempfile.mkdtemp(), params(), bound(tx)
    for _ in range(steps):
        before, opt = opt.step(before, before)
        sl.checkpoint.Rolling(directory, keep=None).save(opt=opt)
    model = params() if model is None else model
    sl.checkpoint.synthesize(directory, model, sigma_rel=sigma_rel, **options)


POWER = sl.sgd(0.1).average(sl.schedules.power_average(0.1))


@refused(FileNotFoundError, "There is no checkpoint in '", obvious="the path is wrong")
def an_average_of_no_checkpoint():
    synthesized(POWER, steps=0)


@refused(
    ValueError,
    "no power-function average of 'opt'",
    "`tx.average(sl.schedules.power_average(0.1))`",
)
def checkpoints_without_a_power_average():
    synthesized(sl.sgd(0.1).average(0.9))


@refused(ValueError, "`sigma_rel` … got 0.3", "(0, 0.288]")
def a_wide_average():
    synthesized(POWER, sigma_rel=0.3)


@refused(ValueError, "`step` … got 3", "from 1 to 2 … the last checkpoint")
def an_average_that_ends_later():
    synthesized(POWER, step=3)


@refused(ValueError, "of 'b', which the model does not have", obvious="pass the model of the run")
def an_average_of_another_model():
    synthesized(POWER, model={"w": jnp.ones((3, 2))})


@refused(
    ValueError,
    "averages of shape (2,) … the model has (4,)",
    obvious="pass the model of the run",
    unchecked=True,
)
def an_average_of_another_shape():
    synthesized(POWER, model={"b": jnp.ones(4), "w": jnp.ones((3, 2))})


class Own(sl.codecs.AbstractCodec):
    """A codec that a file cannot name."""

    def encode(self, x, spec, bits=None):
        return {"codes": x}

    def decode(self, arrays, spec):
        return arrays["codes"]


@refused(
    ValueError,
    "'average.b' is stored in `Own()`",
    "remove the codec with `opt.rebind`, and save it again",
)
def averages_in_a_codec_of_the_user():
    synthesized(POWER.store({"average": Own()}, min_size=1))
