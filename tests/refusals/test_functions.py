"""Functions of the user that take other arguments or return something else."""

from functools import partial, wraps

import jax
import jax.numpy as jnp

import slalom as sl

from .messages import bound, params, refused, total

X = jnp.ones((4, 3))
SGD, SOPHIA = sl.sgd(0.1), sl.contrib.sophia(0.1, estimator="gauss_newton_bartlett")
ROLLING, MESH = sl.checkpoint.Rolling("run"), "`jax.make_mesh((8,), ('data',))`"
train, minimize = partial(sl.train_step, total), partial(sl.minimize, total, SGD, max_steps=3)


def stepped(tx, **known):
    return bound(tx).step(params(), params(), **known)


CALLS = {
    "EveryK.skip (updates, gradient_step, params)": lambda f: stepped(SGD.every_k(2, skip=f)),
    "Project.fn (params)": lambda f: stepped(SGD.project(f)),
    "`value_fn` (model)": lambda f: stepped(SGD.sam(), value_fn=f),
    "`grad_fn` (model)": lambda f: stepped(SGD.sam(), grad_fn=f),
    "`sampled_grad_fn` (model, key)": lambda f: stepped(SOPHIA, sampled_grad_fn=f),
    "A measure (updates)": lambda f: bound(sl.Snapshot("x", f) | SGD),
    "ScaleByAdopt.clip_value_fn (step)": lambda f: stepped(sl.adopt(0.1, clip_value_fn=f)),
    "ScaleByFactoredRms.decay_rate_fn (step, decay_rate)": lambda f: stepped(
        sl.ScaleByFactoredRms(decay_rate_fn=f) | SGD
    ),
    "`transform_grads` (grads)": lambda f: train(transform_grads=f)(params(), bound()),
    "`sampled_loss_fn` (model, key)": lambda f: train(sampled_loss_fn=f)(params(), bound(SOPHIA)),
    "`outputs_fn` (model, input)": lambda f: sl.OutputLoss(f, f)(X, X),
    "`loss_of_outputs` (outputs, target)": lambda f: sl.OutputLoss(lambda m, x: x, f)(X, X, X),
    "`log_psi` (model, sample)": lambda f: sl.VariationalEnergy(f)(X, X, X[:, 0]),
    "The function of block 'a' (model, argument)": lambda f: sl.LeastSquares({"a": f})(X, {"a": X}),
    "`stop` of `sl.minimize` (model, loss)": lambda f: minimize(params(), stop=f),
    "`callback` of `sl.minimize` (step, loss)": lambda f: minimize(params(), callback=f, every=1),
    "The function for 'scale_by_adam.b1' (old)": lambda f: bound().with_hyperparams(b1=f),
    "map_params.function (leaf, rest_0)": lambda f: sl.map_params(f, bound().state, params()),
}


def test_functions_of_other_arguments_and_results_are_named():
    for name, call in CALLS.items():
        which, takes = name[:-1].split(" (")
        culprit = f"{which} is called with ({takes}), but <lambda> takes (a, b, c, d)"
        with refused(TypeError, culprit, f"`lambda {takes}: ...`"):
            call(lambda a, b, c, d: 1.0)
    calls = [*CALLS.values()]
    for i, result, error, culprit, remedy in [
        (2, None, TypeError, "`value_fn` … None", "a real scalar"),
        (2, X, ValueError, "`value_fn` … shape (4, 3)", "`jnp.mean`"),
        (5, None, TypeError, "<lambda> returned None", "end with `return`"),
        (5, "a", TypeError, "<lambda> … 'a' of type str", "a tree of arrays"),
        (6, "a", TypeError, "'a' of type str", "one number"),
        (7, X, ValueError, "shape (4, 3)", "one number"),
        (11, None, TypeError, "`loss_of_outputs` … NoneType", "a scalar"),
    ]:
        with refused(error, culprit, remedy):
            calls[i](lambda *arguments, result=result: result)


def test_decorators_may_take_other_arguments_than_their_functions():
    loss = wraps(lambda model, x: 0.0)(lambda model, x, y: total(model) * x * y)
    for same in (loss, jax.jit(loss), jax.checkpoint(loss)):
        assert sl.train_step(same)(params(), bound(), 1.0, 2.0)[2] == 16
    assert sl.train_step(partial(loss, y=2.0))(params(), bound(), 1.0)[2] == 16
    bound(sl.sgd(wraps(loss)(lambda n: 0.1)))


def test_what_is_no_function_or_no_float_or_missing_is_named():
    for make, culprit, remedy in [
        (sl.Stateless, "Stateless.fn … got 3 of type int", "a function"),
        (lambda x: minimize(X, stop=x), "`stop` … got 3 of type int", "a function of (model"),
        (lambda x: sl.map_params(x, 0), "map_params.function … type int", "a function of (leaf"),
        (lambda x: SGD.combine(sl.combine.UPGrad(), x), "Combine.terms … got 3", '("a", "b")'),
        (lambda x: sl.schedules.join(x, x), "join.schedules … got 3", "`sl.schedules.join([first"),
        (bound().shard_state, "got 3 of type int", MESH),
        (lambda x: sl.plan(SGD, X, x), "`sl.plan` … got 3", MESH),
        (lambda x: bound(hyperparam_dtype=x), "`hyperparam_dtype` … got 3", "a floating dtype"),
        (sl.checkpoint.Rolling, "`directory` … got 3", "a path"),
        (lambda x: ROLLING.save(x / 2, model=X), "`step` … got 1.5 of type float", "an int"),
        (lambda x: sl.checkpoint.to_dict(opt=SGD), "`opt` … a transform", "`sl.Optimizer(tx, m"),
        (lambda x: sl.projections.sphere(x / 2), "sphere.axis … got 1.5 of type float", "an int"),
        (sl.Monitor, "Monitor … got 3", "`{'norm': sl.tree.global_norm}`"),
        (lambda x: sl.Monitor({x: total}), "The name of a measure … got 3", "a string"),
        (lambda x: sl.combine.Fixed("ab"), "Fixed.weights … got 'ab'", "`[1.0, 0.1]`"),
        (lambda x: sl.periodic_update(X, X, x, "n"), "`update_period` … got 'n'", "an int"),
        (lambda x: sl.contrib.layerwise_decay(X, 0.5, layers=x), "`layers` … got 3", "selectors"),
    ]:
        with refused(TypeError, culprit, remedy):
            make(3)
    for name, make in {
        "ScaleByLearningRate.learning_rate": sl.sgd,
        "ScaleLoss.initial": SGD.scale_loss,
        "The weight of the residual": lambda x: sl.LeastSquares(total, weights=x),
        "KeepBest.min_delta": lambda x: sl.KeepBest(0.0, min_delta=x),
        "`weight`": lambda x: stepped(SGD, weight=x),
    }.items():
        with refused(ValueError, f"{name} must be … got", obvious="pass a smaller number"):
            make(10**400)
    tx = sl.lbfgs() | sl.ScaleByLearningRate(lambda n: 1.0)
    names = "'params', 'value', 'grad', 'value_fn', 'step'"
    remedy = "`tx.update(grads, state, params)` … `sl.Context(value=loss)` … `context=sl.Context(s"
    with refused(TypeError, f"ScaleByLbfgs and ScaleByZoomLinesearch need {names}", remedy):
        tx.update(params(), tx.init(params()))
    with refused(TypeError, "('skip_spikes') and ScaleByPolyak ('skip_spikes.", "`opt.step("):
        stepped(sl.polyak_sgd().skip_spikes())
