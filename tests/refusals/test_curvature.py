"""Losses of residuals and the rules that use them, used wrongly."""

import jax
import jax.numpy as jnp

import slalom as sl

from .messages import bound, params, refused


def residual(p, x):
    return p["b"] * x


x = jnp.ones(3)
TWO = {"fit": residual, "edge": residual}


def test_least_squares():
    with refused(ValueError, "LeastSquares … got an empty dict", "at least one residual"):
        sl.LeastSquares({})
    with refused(
        TypeError, "LeastSquares … the keyword 'x'", "by position … `sl.LeastSquares(functools.…"
    ):
        sl.train_step(sl.LeastSquares(residual))(params(), bound(), x=x)
    with refused(TypeError, "got 3 for block 'fit'", "functions of the model and one example"):
        sl.LeastSquares({"fit": 3})
    with refused(ValueError, "block 'edge' … got -1.0", "non-negative"):
        sl.LeastSquares(TWO, weights={"edge": -1.0})
    with refused(TypeError, "weight of the residual … got 'a'", "a real number"):
        sl.LeastSquares(residual, weights="a")
    with refused(TypeError, "LeastSquares.weights … got 2.0", "a dict from blocks to numbers"):
        sl.LeastSquares(TWO, weights=2.0)
    with refused(ValueError, "LeastSquares.weights names 'egde'", "Blocks: … 'edge'"):
        sl.LeastSquares(TWO, weights={"egde": 1.0})
    with refused(TypeError, "LeastSquares.per_example of the residual … got 0", "True or False"):
        sl.LeastSquares(residual, per_example=0)
    with refused(
        TypeError,
        "LeastSquares.in_axes … got (1,) for the residual",
        "0 and None, one for each argument after the model",
    ):
        sl.LeastSquares(residual, in_axes=(1,))
    with refused(ValueError, "LeastSquares.loss … got 'l1'", "one of … 'huber'"):
        sl.LeastSquares(residual, loss="l1")
    with refused(ValueError, "LeastSquares.scale … got 0.0", "positive"):
        sl.LeastSquares(residual, loss="huber", scale=0.0)


def test_data_and_examples():
    with refused(ValueError, "The batch has no data for block 'edge'", obvious="pass its data"):
        sl.LeastSquares(TWO).on({"fit": x})
    with refused(ValueError, "The batch has data for 'more'", "Blocks: … 'edge'"):
        sl.LeastSquares(TWO).on({"fit": x, "edge": x, "more": x})
    with refused(
        TypeError, "got 2 arguments", "one dict … `step(model, opt, {'fit': ..., 'edge': ...})`"
    ):
        sl.LeastSquares(TWO).on(x, x)
    with refused(ValueError, "Block 'edge' has no examples", obvious="pass examples"):
        sl.LeastSquares(TWO).on({"fit": x, "edge": jnp.ones((0,))})
    with refused(
        ValueError, "The residual has no array with an axis of examples", "`per_example=False`"
    ):
        sl.LeastSquares(residual).on(2.0)
    with refused(
        ValueError,
        "argument 0 has 3, and argument 1 has 4",
        "without an axis of examples in `in_axes`",
    ):
        sl.LeastSquares(residual).on(x, jnp.ones(4))
    with refused(
        ValueError,
        "Argument 1 of the residual has no axis of examples",
        "Pass an array with one … `in_axes=(0, None)`",
    ):
        sl.LeastSquares(residual).on(x, jnp.ones(()))
    with refused(ValueError, "LeastSquares.in_axes has 1 entries for the residual", "2 arguments"):
        sl.LeastSquares(residual, in_axes=(0,)).on(x, x)
    with refused(ValueError, "The example weights of the residual", "non-negative"):
        sl.LeastSquares(residual).on(x, example_weights=-x)
    with refused(ValueError, "example weights of the residual … got (4,)", "shape (3,)"):
        sl.LeastSquares(residual).on(x, example_weights=jnp.ones(4))
    with refused(TypeError, "the residual returned dtype int32", "a floating or complex array"):
        sl.LeastSquares(lambda p, x: jnp.ones(2, jnp.int32))(params(), x)
    with refused(ValueError, "The residual returned an empty array", obvious="return a number"):
        sl.LeastSquares(lambda p, x: jnp.ones(0))(params(), x)
    with refused(TypeError, "`example_weights` … got ArrayImpl", "a dict … `{'fit': weights}`"):
        sl.LeastSquares(TWO).on({"fit": x, "edge": x}, example_weights=x)
    unequal = {"fit": x, "edge": x[:2]}
    with refused(ValueError, "blocks of this loss have 2, 3 examples", "one block, or a rule"):
        clip = sl.PerExampleGlobalNormClip(1.0) | sl.sgd(0.1)
        sl.train_step(sl.LeastSquares(TWO))(params(), bound(clip), unequal)


def test_outputs_and_energies():
    with refused(TypeError, "`outputs_fn` … got dtype complex64", "a real floating array"):
        sl.OutputLoss(lambda p, x: p["b"].astype(jnp.complex64), jnp.sum)(params(), x)
    with refused(ValueError, "`loss_of_outputs` … got shape (2,)", "a scalar for one example"):
        sl.OutputLoss(residual, jnp.square)(params(), x)
    energy = sl.VariationalEnergy(residual)
    with refused(ValueError, "`local_energies` … got float", "an entry for each sample"):
        energy(params(), x, 3.0)
    with refused(TypeError, "`log_psi` … got float32(2,)", "a floating or complex scalar"):
        energy(params(), x, x)
    with refused(ValueError, "VariationalEnergy … its batch cannot be divided", "`chunk=`"):
        sl.train_step(energy, microbatches=3)(params(), bound(), x, x)


def test_residuals_of_a_step():
    with refused(
        TypeError,
        "needs 'residuals'",
        "Pass the loss `sl.LeastSquares(residual)` … `sl.OutputLoss`",
    ):
        step = sl.train_step(lambda p: jnp.sum(p["b"] ** 2))
        step(params(), bound(sl.gauss_newton()))
    with refused(
        TypeError,
        "`residuals` … got 3 of type int",
        "`loss_fn.on(x, y)` … `sl.LeastSquares` or `sl.OutputLoss`",
    ):
        bound(sl.levenberg_marquardt()).step(params(), params(), residuals=3)
    with refused(
        ValueError, "residuals of the loss … digits of the parameters", "Remove `compute_dtype`"
    ):
        step = sl.train_step(sl.LeastSquares(residual), compute_dtype="bfloat16")
        step(params(), bound(sl.gauss_newton()), x)


def test_places_and_arguments_of_rules_of_curvature():
    with refused(
        ValueError,
        "ScaleByGaussNewton … the links before it",
        "Write them after it … raise its `damping`",
    ):
        sl.ClipByGlobalNorm(1.0) | sl.gauss_newton()
    with refused(
        ValueError, "'scale_by_levenberg_marquardt' inside `.every_k`", "a larger batch … `chunk=`"
    ):
        sl.levenberg_marquardt().every_k(2)
    for call in ("sam", "maximize"):
        with refused(ValueError, "'scale_by_levenberg_marquardt' … no effect", f"Remove `.{call}"):
            getattr(sl.levenberg_marquardt(), call)()
    with refused(
        ValueError,
        "'scale_loss.scale_by_levenberg_marquardt'",
        "Remove `.scale_loss()` … in float32",
    ):
        bound(sl.levenberg_marquardt().scale_loss())
    with refused(
        ValueError, 'ScaleByLevenbergMarquardt(scaling="columns")', 'Remove `form="residuals"`'
    ):
        sl.levenberg_marquardt(scaling="columns", form="residuals")

    loss_fn = sl.VariationalEnergy(lambda p, s: jnp.sum(p["b"]) * s)
    with refused(
        TypeError,
        "ScaleByLevenbergMarquardt … losses at different parameters",
        "`sl.natural_gradient`",
    ):
        sl.train_step(loss_fn)(params(), bound(sl.levenberg_marquardt()), x, x)
    with refused(
        TypeError,
        "'value_fn' … VariationalEnergy does not know",
        "a rule without a line search, such as `sl.natural_gradient`",
    ):
        sl.train_step(loss_fn)(params(), bound(sl.gauss_newton()), x, x)
    with refused(TypeError, "`sl.minimize` … VariationalEnergy does not", "Use `sl.train_step`"):
        sl.minimize(loss_fn, sl.natural_gradient(0.1), params(), x, x, max_steps=2)
    with refused(
        ValueError, "LeastSquares … which arguments hold the batch", "Remove `batch_args`"
    ):
        step = sl.train_step(sl.LeastSquares(residual), microbatches=3, batch_args=0)
        step(params(), bound(), x)


def test_arguments_of_rules_of_curvature():
    with refused(ValueError, "ScaleByLevenbergMarquardt.scaling … got 'rows'", "None or 'columns'"):
        sl.levenberg_marquardt(scaling="rows")
    with refused(
        ValueError, "ScaleByGaussNewton.solver … got 'lu'", "'auto', 'cholesky', 'qr' or a function"
    ):
        sl.gauss_newton(solver="lu")
    with refused(ValueError, "ScaleByGaussNewton.chunk … got 0", "at least 1"):
        sl.gauss_newton(chunk=0)
    with refused(TypeError, "ScaleByGaussNewton.chunk … got 1.5", "an int"):
        sl.gauss_newton(chunk=1.5)
    with refused(
        ValueError,
        'ScaleByGaussNewton(solver="qr") with `chunk`',
        '`form="parameters"` … `solver="cholesky"`',
    ):
        tx = sl.gauss_newton(solver="qr", form="residuals", chunk=2)
        bound(tx).step(params(), params(), residuals=sl.LeastSquares(residual).on(x))
    with refused(
        ValueError,
        "ScaleByGaussNewton … 100000 × 100000 … 40000000000 bytes (37 GiB) … limit is 16 GiB",
        '`form="residuals"`',
    ):
        p = jax.ShapeDtypeStruct((100_000,), jnp.float32)
        tx = sl.ScaleByGaussNewton(form="parameters")
        context = sl.Context(step=0, residuals=sl.LeastSquares(lambda p, x: jnp.sum(p) * x).on(x))
        jax.eval_shape(lambda p: tx.update(p, tx.init(p), p, context), p)


def test_minimize_and_broyden():
    with refused(TypeError, "needs 'residuals'", "the loss `sl.LeastSquares(residual)`"):
        sl.minimize(residual, sl.levenberg_marquardt(), params(), x, max_steps=2)
    with refused(TypeError, "missing a required argument: 'y'", "Unpack … model, *batch)`"):
        fit = sl.LeastSquares(lambda p, x, y: residual(p, x) - y)
        sl.minimize(fit, sl.levenberg_marquardt(), params(), (x, x), max_steps=2)
    with refused(ValueError, "`max_steps` of `sl.minimize` … got 0", "at least 1"):
        sl.minimize(jnp.square, sl.sgd(0.1), jnp.ones(()), max_steps=0)
    with refused(
        ValueError, "`callback` of `sl.minimize` … `vmap`, `jit` or `grad`", "Remove `callback`"
    ):
        jax.vmap(lambda p: sl.minimize(jnp.square, sl.sgd(0.1), p, max_steps=2, callback=print))(x)
    found = sl.minimize(jnp.square, sl.sgd(0.1), jnp.ones(()), max_steps=1)
    with refused(ValueError, "The optimizer … `sl.minimize`", "`trainable` … opt.rebind("):
        sl.minimize(jnp.square, found.opt, found.model, max_steps=1, trainable="w")
    with refused(
        TypeError, "covariance … got <PjitFunction …>", "`sl.LeastSquares` … found.covariance(…)"
    ):
        found.covariance(jnp.square, x)
    with refused(
        ValueError, "ScaleBySelfScaledBroyden.family … got 'dfp'", "'broyden', 'bfgs' or 'plain'"
    ):
        sl.contrib.ScaleBySelfScaledBroyden("dfp")
    with refused(
        ValueError,
        "ScaleBySelfScaledBroyden … 65537 × 65537 … 17180393476 bytes (16 GiB) … limit is 16 GiB",
        "`trainable=`, or use `sl.lbfgs()`",
    ):
        sl.Optimizer(
            sl.contrib.ss_broyden(), {"w": jax.ShapeDtypeStruct((2**16 + 1,), jnp.float32)}
        )
