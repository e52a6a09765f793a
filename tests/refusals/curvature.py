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


@refused(ValueError, "LeastSquares … got an empty dict", "at least one residual")
def no_blocks():
    sl.LeastSquares({})


@refused(TypeError, "LeastSquares … the keyword 'x'", "by position … `sl.LeastSquares(functools.…")
def data_by_keyword():
    sl.train_step(sl.LeastSquares(residual))(params(), bound(), x=x)


@refused(
    TypeError, "got 3 for block 'fit'", "functions of the model and one example", unchecked=True
)
def a_block_that_is_no_function():
    sl.LeastSquares({"fit": 3})


@refused(ValueError, "block 'edge' … got -1.0", "non-negative")
def a_negative_weight_of_a_block():
    sl.LeastSquares({"fit": residual, "edge": residual}, weights={"edge": -1.0})


@refused(TypeError, "weight of the residual … got 'a'", "a real number")
def a_weight_that_is_no_number():
    sl.LeastSquares(residual, weights="a")


@refused(TypeError, "LeastSquares.weights … got 2.0", "a dict from blocks to numbers")
def one_weight_for_several_blocks():
    sl.LeastSquares({"fit": residual, "edge": residual}, weights=2.0)


@refused(ValueError, "LeastSquares.weights names 'egde'", "Blocks: … 'edge'")
def an_unknown_block():
    sl.LeastSquares({"fit": residual, "edge": residual}, weights={"egde": 1.0})


@refused(
    TypeError, "LeastSquares.per_example … got 0 for the residual", "True or False", unchecked=True
)
def a_flag_that_is_none():
    sl.LeastSquares(residual, per_example=0)


@refused(
    TypeError,
    "LeastSquares.in_axes … got (1,) for the residual",
    "0 and None, one for each argument after the model",
)
def another_axis_of_examples():
    sl.LeastSquares(residual, in_axes=(1,))


@refused(ValueError, "The batch has no data for block 'edge'", obvious="pass its data")
def a_block_without_data():
    loss_of_two().on({"fit": x})


@refused(ValueError, "The batch has data for 'more'", "Blocks: … 'edge'")
def data_without_a_block():
    loss_of_two().on({"fit": x, "edge": x, "more": x})


@refused(TypeError, "got 2 arguments", "one dict … `step(model, opt, {'fit': ..., 'edge': ...})`")
def several_blocks_by_position():
    loss_of_two().on(x, x)


@refused(ValueError, "Block 'edge' has no examples", obvious="pass examples")
def an_empty_block():
    loss_of_two().on({"fit": x, "edge": jnp.ones((0,))})


@refused(ValueError, "The residual has no array with an axis of examples", "`per_example=False`")
def no_examples():
    sl.LeastSquares(residual).on(2.0)


@refused(
    ValueError, "argument 0 has 3, and argument 1 has 4", "without an axis of examples in `in_axes`"
)
def different_numbers_of_examples():
    sl.LeastSquares(residual).on(x, jnp.ones(4))


@refused(
    ValueError,
    "Argument 1 of the residual has no axis of examples",
    "Pass an array with one … `in_axes=(0, None)`",
)
def a_scalar_for_each_example():
    sl.LeastSquares(residual).on(x, jnp.ones(()))


@refused(ValueError, "LeastSquares.in_axes has 1 entries for the residual", "2 arguments")
def too_few_axes():
    sl.LeastSquares(residual, in_axes=(0,)).on(x, x)


@refused(ValueError, "The example weights of the residual", "non-negative")
def a_negative_weight_of_an_example():
    sl.LeastSquares(residual).on(x, example_weights=-x)


@refused(ValueError, "example weights of the residual … got (4,)", "shape (3,)")
def weights_of_other_examples():
    sl.LeastSquares(residual).on(x, example_weights=jnp.ones(4))


@refused(TypeError, "the residual returned dtype int32", "a floating or complex array")
def a_residual_of_integers():
    sl.LeastSquares(lambda p, x: jnp.ones(2, jnp.int32))(params(), x)


@refused(
    TypeError, "needs 'residuals'", "`sl.train_step(sl.LeastSquares(residual))` … `sl.OutputLoss`"
)
def a_plain_loss_for_gauss_newton():
    step = sl.train_step(lambda p: jnp.sum(p["b"] ** 2))
    step(params(), bound(sl.gauss_newton()))


@refused(
    TypeError,
    "`residuals` … got 3 of type int",
    "`loss_fn.on(x, y)` … `sl.LeastSquares` or `sl.OutputLoss`",
)
def residuals_that_are_a_number():
    bound(sl.levenberg_marquardt()).step(params(), params(), residuals=3)


@refused(ValueError, "residuals of the loss … digits of the parameters", "Remove `compute_dtype`")
def gauss_newton_in_bfloat16():
    step = sl.train_step(sl.LeastSquares(residual), compute_dtype="bfloat16")
    step(params(), bound(sl.gauss_newton()), x)


@refused(
    ValueError,
    "ScaleByGaussNewton … the links before it",
    "Write them after it … raise its `damping`",
)
def clipping_before_gauss_newton():
    sl.ClipByGlobalNorm(1.0) | sl.gauss_newton()


@refused(
    ValueError, "'scale_by_levenberg_marquardt' inside `.every_k`", "a larger batch … `chunk=`"
)
def levenberg_marquardt_every_k():
    sl.levenberg_marquardt().every_k(2)


@refused(ValueError, "'scale_by_levenberg_marquardt' … no effect", "Remove `.sam`")
def sam_around_levenberg_marquardt():
    sl.levenberg_marquardt().sam(0.1)


@refused(
    ValueError, "'scale_loss.scale_by_levenberg_marquardt'", "Remove `.scale_loss()` … in float32"
)
def levenberg_marquardt_with_a_scaled_loss():
    bound(sl.levenberg_marquardt().scale_loss())


@refused(ValueError, 'ScaleByLevenbergMarquardt(scaling="columns")', 'Remove `form="residuals"`')
def scaled_columns_in_the_form_of_the_residuals():
    sl.levenberg_marquardt(scaling="columns", form="residuals")


@refused(ValueError, "ScaleByLevenbergMarquardt.scaling … got 'rows'", "None or 'columns'")
def another_scaling():
    sl.levenberg_marquardt(scaling="rows")


@refused(
    ValueError, "ScaleByGaussNewton.solver … got 'lu'", "'auto', 'cholesky', 'qr' or a function"
)
def another_solver():
    sl.gauss_newton(solver="lu")


@refused(ValueError, "ScaleByGaussNewton.chunk … got 0", "at least 1")
def a_chunk_of_nothing():
    sl.gauss_newton(chunk=0)


@refused(TypeError, "ScaleByGaussNewton.chunk … got 1.5", "an int", unchecked=True)
def a_chunk_that_is_no_int():
    sl.gauss_newton(chunk=1.5)


@refused(
    ValueError,
    'ScaleByGaussNewton(solver="qr") with `chunk`',
    '`form="parameters"` … `solver="cholesky"`',
)
def qr_of_residuals_in_chunks():
    tx = sl.gauss_newton(solver="qr", form="residuals", chunk=2)
    bound(tx).step(params(), params(), residuals=sl.LeastSquares(residual).on(x))


@refused(
    ValueError,
    "ScaleByGaussNewton … 100000 × 100000 … 40000000000 bytes (37 GiB) … limit is 16 GiB",
    '`form="residuals"`',
)
def a_system_that_is_too_large():
    p = jax.ShapeDtypeStruct((100_000,), jnp.float32)
    tx = sl.ScaleByGaussNewton(form="parameters")
    context = sl.Context(step=0, residuals=sl.LeastSquares(lambda p, x: jnp.sum(p) * x).on(x))
    jax.eval_shape(lambda p: tx.update(p, tx.init(p), p, context), p)


@refused(
    TypeError, "ScaleByLevenbergMarquardt … losses at different parameters", "`sl.natural_gradient`"
)
def levenberg_marquardt_for_an_energy():
    loss_fn = sl.VariationalEnergy(lambda p, s: jnp.sum(p["b"]) * s)
    sl.train_step(loss_fn)(params(), bound(sl.levenberg_marquardt()), x, x)


@refused(
    TypeError,
    "'value_fn' … VariationalEnergy does not know",
    "a rule without a line search, such as `sl.natural_gradient`",
)
def a_line_search_for_an_energy():
    loss_fn = sl.VariationalEnergy(lambda p, s: jnp.sum(p["b"]) * s)
    sl.train_step(loss_fn)(params(), bound(sl.gauss_newton()), x, x)


@refused(ValueError, "LeastSquares … which arguments hold the batch", "Remove `batch_args`")
def batch_args_of_least_squares():
    step = sl.train_step(sl.LeastSquares(residual), microbatches=3, batch_args=0)
    step(params(), bound(), x)


@refused(ValueError, "`max_steps` of `sl.minimize` … got 0", "at least 1")
def a_minimization_without_steps():
    sl.minimize(jnp.square, sl.sgd(0.1), jnp.ones(()), max_steps=0)


@refused(ValueError, "`callback` of `sl.minimize` … `vmap`, `jit` or `grad`", "Remove `callback`")
def a_callback_under_vmap():
    def run(p):
        return sl.minimize(jnp.square, sl.sgd(0.1), p, max_steps=2, callback=print)

    jax.vmap(run)(x)


@refused(ValueError, "ScaleBySelfScaledBroyden.family … got 'dfp'", "'broyden', 'bfgs' or 'plain'")
def another_family():
    sl.ScaleBySelfScaledBroyden("dfp")


@refused(
    ValueError,
    "ScaleBySelfScaledBroyden … 65537 × 65537 … 17180393476 bytes (16 GiB) … limit is 16 GiB",
    "`trainable=`, or use `sl.lbfgs()`",
)
def a_matrix_that_is_too_large():
    sl.Optimizer(sl.ss_broyden(), {"w": jax.ShapeDtypeStruct((2**16 + 1,), jnp.float32)})
