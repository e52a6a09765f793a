"""Losses of residuals and the rules that use them, used wrongly."""

import jax
import jax.numpy as jnp

import slalom as sl

from ._table import bound, params, refused


def residual(p, x):
    return p["b"] * x


def loss_of_two():
    return sl.LeastSquares({"fit": residual, "edge": residual})


x = jnp.ones(3)


@refused(ValueError, "LeastSquares needs at least one residual, got an empty dict.")
def no_blocks():
    sl.LeastSquares({})


@refused(
    TypeError,
    "LeastSquares takes functions of the model and one example, got 3 for block 'fit'.",
    unchecked=True,
)
def a_block_that_is_no_function():
    sl.LeastSquares({"fit": 3})


@refused(ValueError, "The weight of block 'edge' must be non-negative, got -1.0.")
def a_negative_weight():
    sl.LeastSquares({"fit": residual, "edge": residual}, weights={"edge": -1.0})


@refused(TypeError, "The weight of the residual must be a real number, got 'a'.")
def a_weight_that_is_no_number():
    sl.LeastSquares(residual, weights="a")


@refused(TypeError, "LeastSquares.weights must be a dict from blocks to numbers, got 2.0.")
def one_weight_for_several_blocks():
    sl.LeastSquares({"fit": residual, "edge": residual}, weights=2.0)


@refused(ValueError, "LeastSquares.weights names 'egde', which is no block. Blocks: <…>.")
def an_unknown_block():
    sl.LeastSquares({"fit": residual, "edge": residual}, weights={"egde": 1.0})


@refused(
    TypeError,
    "LeastSquares.per_example must be True or False, got 0 for the residual.",
    unchecked=True,
)
def a_flag_that_is_none():
    sl.LeastSquares(residual, per_example=0)


@refused(
    TypeError,
    "LeastSquares.in_axes must be a tuple of 0 and None, one for each argument after the model, "
    "got (1,) for the residual.",
)
def another_axis_of_examples():
    sl.LeastSquares(residual, in_axes=(1,))


@refused(ValueError, "The batch has no data for block 'edge'.")
def a_block_without_data():
    loss_of_two().on({"fit": x})


@refused(ValueError, "The batch has data for 'more', which is no block. Blocks: <…>.")
def data_without_a_block():
    loss_of_two().on({"fit": x, "edge": x, "more": x})


@refused(
    TypeError,
    "The batch of several residuals is one dict with the data of each: `step(model, opt, {'fit': "
    "..., 'edge': ...})`, got 2 arguments.",
)
def several_blocks_by_position():
    loss_of_two().on(x, x)


@refused(ValueError, "Block 'edge' has no examples: its arrays are empty.")
def an_empty_block():
    loss_of_two().on({"fit": x, "edge": jnp.ones((0,))})


@refused(
    ValueError,
    "The residual has no array with an axis of examples. Pass one, or write `per_example=False` "
    "for a residual of all data at once.",
)
def no_examples():
    sl.LeastSquares(residual).on(2.0)


@refused(
    ValueError,
    "The arguments of the residual have different numbers of examples: argument 0 has 3, and "
    "argument 1 has 4. Name those without an axis of examples in `in_axes`.",
)
def different_numbers_of_examples():
    sl.LeastSquares(residual).on(x, jnp.ones(4))


@refused(
    ValueError,
    "Argument 1 of the residual has no axis of examples. Pass an array with one, or name those "
    "without in `in_axes`, such as `in_axes=(0, None)`.",
)
def a_scalar_for_each_example():
    sl.LeastSquares(residual).on(x, jnp.ones(()))


@refused(
    ValueError,
    "LeastSquares.in_axes has 1 entries for the residual, which got 2 arguments.",
)
def too_few_axes():
    sl.LeastSquares(residual, in_axes=(0,)).on(x, x)


@refused(ValueError, "The example weights of the residual must be non-negative.")
def a_negative_weight_of_an_example():
    sl.LeastSquares(residual).on(x, example_weights=-x)


@refused(
    ValueError,
    "The example weights of the residual must be an array of shape (3,), a weight for each "
    "example, got (4,).",
)
def weights_of_other_examples():
    sl.LeastSquares(residual).on(x, example_weights=jnp.ones(4))


@refused(
    TypeError,
    "A residual must return a floating or complex array, and the residual returned dtype int32.",
)
def a_residual_of_integers():
    sl.LeastSquares(lambda p, x: jnp.ones(2, jnp.int32))(params(), x)


@refused(
    TypeError,
    "This optimizer needs 'residuals', which this loss does not know. Write the loss as a function "
    "of one example, `sl.train_step(sl.LeastSquares(residual))`, or as an `sl.OutputLoss`.",
)
def a_plain_loss_for_gauss_newton():
    step = sl.train_step(lambda p: jnp.sum(p["b"] ** 2))
    step(params(), bound(sl.gauss_newton()))


@refused(
    TypeError,
    "`residuals` must be what `loss_fn.on(x, y)` returns for an `sl.LeastSquares` or "
    "`sl.OutputLoss`, got 3 of type int.",
)
def residuals_that_are_a_number():
    bound(sl.levenberg_marquardt()).step(params(), params(), residuals=3)


@refused(
    ValueError,
    "This optimizer uses the residuals of the loss, whose systems need the digits of the "
    "parameters. Remove `compute_dtype`.",
)
def gauss_newton_in_bfloat16():
    step = sl.train_step(sl.LeastSquares(residual), compute_dtype="bfloat16")
    step(params(), bound(sl.gauss_newton()), x)


@refused(
    ValueError,
    "ScaleByGaussNewton computes its updates from the residuals of the loss, so the links before "
    "it would have no effect. Write them after it, or remove them. For smaller steps, raise its "
    "`damping`.",
)
def clipping_before_gauss_newton():
    sl.ClipByGlobalNorm(1.0) | sl.gauss_newton()


@refused(
    ValueError,
    "'scale_by_levenberg_marquardt' inside of `.every_k` would see the linearization of one "
    "mini-batch only. Take a larger batch in each step instead, with `chunk=` to save memory.",
)
def levenberg_marquardt_every_k():
    sl.levenberg_marquardt().every_k(2)


@refused(
    ValueError,
    "'scale_by_levenberg_marquardt' computes its updates from the residuals of the loss, so `.sam` "
    "around it would have no effect. Remove `.sam`.",
)
def sam_around_levenberg_marquardt():
    sl.levenberg_marquardt().sam(0.1)


@refused(
    ValueError,
    "'scale_loss.scale_by_levenberg_marquardt' computes its updates from the residuals of the "
    "loss, which `.scale_loss()` does not scale. Remove `.scale_loss()`, and keep the parameters "
    "in float32.",
)
def levenberg_marquardt_with_a_scaled_loss():
    bound(sl.levenberg_marquardt().scale_loss())


@refused(
    ValueError,
    'ScaleByLevenbergMarquardt(scaling="columns") solves systems of the size of the parameters. '
    'Remove `form="residuals"`.',
)
def scaled_columns_in_the_form_of_the_residuals():
    sl.levenberg_marquardt(scaling="columns", form="residuals")


@refused(ValueError, "ScaleByLevenbergMarquardt.scaling must be None or 'columns', got 'rows'.")
def another_scaling():
    sl.levenberg_marquardt(scaling="rows")


@refused(
    ValueError,
    "ScaleByGaussNewton.solver must be 'auto', 'cholesky', 'qr' or a function of a matrix and a "
    "right-hand side, got 'lu'.",
)
def another_solver():
    sl.gauss_newton(solver="lu")


@refused(ValueError, "ScaleByGaussNewton.chunk must be at least 1, got 0.")
def a_chunk_of_nothing():
    sl.gauss_newton(chunk=0)


@refused(
    TypeError,
    "ScaleByGaussNewton.chunk must be an int, a number of examples, got 1.5.",
    unchecked=True,
)
def a_chunk_that_is_no_int():
    sl.gauss_newton(chunk=1.5)


@refused(
    ValueError,
    'ScaleByGaussNewton(solver="qr") with `chunk` needs `form="parameters"`. In the form of the '
    'residuals, use `solver="cholesky"`.',
)
def qr_of_residuals_in_chunks():
    tx = sl.gauss_newton(solver="qr", form="residuals", chunk=2)
    bound(tx).step(params(), params(), residuals=sl.LeastSquares(residual).on(x))


@refused(
    ValueError,
    "ScaleByGaussNewton would solve a system of 100000 × 100000 for 100000 parameters, which needs "
    '40000000000 bytes (37 GiB); the limit is 16 GiB. Write `form="residuals"`, whose system is '
    "smaller.",
)
def a_system_that_is_too_large():
    p = jax.ShapeDtypeStruct((100_000,), jnp.float32)
    tx = sl.ScaleByGaussNewton(form="parameters")
    context = sl.Context(step=0, residuals=sl.LeastSquares(lambda p, x: jnp.sum(p) * x).on(x))
    jax.eval_shape(lambda p: tx.update(p, tx.init(p), p, context), p)


@refused(
    TypeError,
    "ScaleByLevenbergMarquardt compares losses at different parameters, which this loss does not "
    "know: its data are those of the present parameters. Use `sl.natural_gradient`.",
)
def levenberg_marquardt_for_an_energy():
    loss_fn = sl.VariationalEnergy(lambda p, s: jnp.sum(p["b"]) * s)
    sl.train_step(loss_fn)(params(), bound(sl.levenberg_marquardt()), x, x)


@refused(
    TypeError,
    "A transform of this optimizer needs 'value_fn', the loss at other parameters, which "
    "VariationalEnergy does not know: its local energies are those of the present parameters. Use "
    "a rule without a line search, such as `sl.natural_gradient`.",
)
def a_line_search_for_an_energy():
    loss_fn = sl.VariationalEnergy(lambda p, s: jnp.sum(p["b"]) * s)
    sl.train_step(loss_fn)(params(), bound(sl.gauss_newton()), x, x)


@refused(
    ValueError,
    "LeastSquares knows itself which arguments hold the batch. Remove `batch_args`.",
)
def batch_args_of_least_squares():
    step = sl.train_step(sl.LeastSquares(residual), microbatches=3, batch_args=0)
    step(params(), bound(), x)


@refused(ValueError, "`max_steps` of `sl.minimize` must be at least 1, got 0.")
def a_minimization_without_steps():
    sl.minimize(jnp.square, sl.sgd(0.1), jnp.ones(()), max_steps=0)


@refused(
    ValueError,
    "`callback` of `sl.minimize` runs on the host, so it does not work under `vmap`, `jit` or "
    "`grad`. Remove `callback`.",
)
def a_callback_under_vmap():
    def run(p):
        return sl.minimize(jnp.square, sl.sgd(0.1), p, max_steps=2, callback=print)

    jax.vmap(run)(x)


@refused(
    ValueError,
    "ScaleBySelfScaledBroyden.family must be 'broyden', 'bfgs' or 'plain', got 'dfp'.",
)
def another_family():
    sl.ScaleBySelfScaledBroyden("dfp")


@refused(
    ValueError,
    "ScaleBySelfScaledBroyden would keep a matrix of 65537 × 65537 for 65537 parameters, which "
    "needs 17180393476 bytes (16 GiB); the limit is 16 GiB. Train fewer parameters with "
    "`trainable=`, or use `sl.lbfgs()`.",
)
def a_matrix_that_is_too_large():
    sl.Optimizer(sl.ss_broyden(), {"w": jax.ShapeDtypeStruct((2**16 + 1,), jnp.float32)})
