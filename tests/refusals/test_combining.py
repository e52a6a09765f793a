"""Several losses, projections of matrices, and averages made from checkpoints."""

import jax.numpy as jnp

import slalom as sl

from .messages import bound, params, refused

NAMES = ("first", "second")
COMBINED = sl.sgd(0.1).combine(sl.combine.UPGrad(), NAMES)


def trained(loss_fn, tx=COMBINED, **options):
    sl.train_step(loss_fn, **options)(params(), bound(tx), jnp.ones(4))


def losses(model, x):
    return {"first": jnp.sum(model["w"]) * jnp.mean(x), "second": jnp.sum(model["b"] ** 2)}


def test_losses_to_combine_and_combinations():
    with refused(
        TypeError, "Combine ('combine') needs 'terms'", "a dict of terms … `sl.train_step(loss_fn)`"
    ):
        bound(COMBINED).step(params(), params())
    with refused(
        ValueError, "`.combine` weights the terms of whole batches", "Remove `microbatches`"
    ):
        trained(losses, microbatches=2)
    both = "['first', 'second'] … a dict"
    with refused(TypeError, "`.combine` … got an array of shape ()", both):
        trained(lambda model, x: jnp.sum(model["w"]))
    with refused(TypeError, "`.combine` … got the terms ['first', 'third']", both):
        trained(lambda model, x: {"first": jnp.sum(model["w"]), "third": jnp.sum(x)})
    with refused(ValueError, "The loss returned a dict without terms", obvious="return terms"):
        trained(lambda model, x: {}, sl.sgd(0.1))
    with refused(TypeError, "'first' has shape (3, 2) and dtype float32", "real floating scalars"):
        trained(lambda model, x: {"first": model["w"]}, sl.sgd(0.1))
    with refused(TypeError, "'first' is a str", "scalars"):
        trained(lambda model, x: {"first": "low"}, sl.sgd(0.1))

    with refused(ValueError, "Two parts … `.combine(...)`", "once, on the whole optimizer"):
        bound(COMBINED.combine(sl.combine.MGDA(), NAMES))
    with refused(
        ValueError,
        "`.combine` … cannot be scaled",
        'Remove `.scale_loss()` … `compute_dtype="bfloat16"`',
    ):
        bound(sl.sgd(0.1).scale_loss().combine(sl.combine.MGDA(), NAMES))
    with refused(ValueError, "'combine.sam' … inside `.combine`", "Weight the terms in the loss"):
        sl.sgd(0.1).sam(0.05).combine(sl.combine.MGDA(), NAMES)
    with refused(TypeError, "Fixed.weights … got a dict", "order of the terms … `[1.0, 0.1]`"):
        sl.combine.Fixed({"first": 1.0, "second": 2.0})
    with refused(ValueError, "Fixed.weights must be finite, got [1.0, nan]", obvious="finite"):
        sl.combine.Fixed([1.0, float("nan")])
    with refused(ValueError, "Fixed.weights has shape (3,)", "there are 2 terms"):
        sl.sgd(0.1).combine(sl.combine.Fixed([1.0, 2.0, 3.0]), NAMES)
    with refused(TypeError, "Combine.combination … got 0.5", "`sl.combine.UPGrad()`"):
        sl.sgd(0.1).combine(0.5, NAMES)
    with refused(ValueError, "Combine.terms … got ('first',)", "two or more different names"):
        sl.sgd(0.1).combine(sl.combine.UPGrad(), ("first",))
    with refused(TypeError, "Combine.terms … got 'first'", '("a", "b")'):
        sl.sgd(0.1).combine(sl.combine.UPGrad(), "first")


def test_posteriors_and_projections_of_matrices():
    for name, tx in {"cautious": sl.Cautious(), "scale_by_zoom_linesearch": sl.lbfgs()}.items():
        with refused(ValueError, f"'{name}' … differentially private", f"Remove '{name}'"):
            bound(sl.DifferentiallyPrivateAggregate(1.0, 1.0, key=0) | tx)
    with refused(ValueError, "'sam' … posterior", "Use one of the two"):
        bound(sl.contrib.ivon(0.1, 100).sam(0.05))
    with refused(ValueError, "no posterior", "`sl.contrib.ivon`"):
        bound().sample_params(params())
    with refused(
        ValueError,
        "posterior … a loop for Optax",
        "Use `sl.train_step`, or `opt.sample_params(model)`",
    ):
        sl.interop.to_optax(sl.contrib.ivon(0.1, 100))
    with refused(
        TypeError, "The gradients must be floating … got arrays of dtype int32", obvious="cast"
    ):
        gt = sl.interop.to_optax(sl.sgd(0.1))
        gt.update({"w": jnp.arange(3)}, gt.init({"w": jnp.ones(3)}))
    with refused(TypeError, "ScaleByIvon … 'z' is complex64", "`tx.split_complex()`"):
        sl.Optimizer(sl.contrib.ivon(0.1, 100), {"z": jnp.ones(2, jnp.complex64)})

    matrices = "`tx.project(fn, where=sl.where.ndim(2))`"
    with refused(ValueError, "sl.projections.stiefel() … 'b' has shape (2,)", matrices):
        bound(sl.sgd(0.1).project(sl.projections.stiefel()))
    with refused(
        ValueError,
        "hypercube.scale … got an array of shape (3,)",
        "a number … `sl.projections.box(0.0, bounds)`",
    ):
        sl.projections.hypercube(jnp.ones(3))
    with refused(
        ValueError, "sl.projections.sphere(axis=-2) needs an axis -2 … 'b' has shape (2,)", matrices
    ):
        bound(sl.sgd(0.1).project(sl.projections.sphere(axis=-2)))
    with refused(
        ValueError,
        "sl.projections.psd() … 'w' has shape (3, 2)",
        'square … `tx.project(fn, where=sl.where.path("**.covariance"))`',
    ):
        bound(sl.sgd(0.1).project(sl.projections.psd(), where=sl.where.ndim(2)))


class Own(sl.codecs.AbstractCodec):
    """A codec that a file cannot name."""

    def encode(self, x, spec, bits=None):
        return {"codes": x}

    def decode(self, arrays, spec):
        return arrays["codes"]


def test_averages_from_checkpoints(tmp_path):
    def synthesize(folder, model=None, sigma_rel=0.1, **options):
        model = params() if model is None else model
        sl.checkpoint.synthesize(tmp_path / folder, model, sigma_rel=sigma_rel, **options)

    power = sl.sgd(0.1).average(sl.schedules.power_average(0.1))
    kinds = {"power": power, "plain": sl.sgd(0.1).average(0.9)}
    kinds["own"] = power.store({"average": Own()}, min_size=1)
    for name, tx in kinds.items():
        model, opt = params(), bound(tx)
        for _ in range(2):
            model, opt = opt.step(model, model)
            sl.checkpoint.Rolling(tmp_path / name, keep=None).save(opt=opt)
    with refused(FileNotFoundError, "There is no checkpoint in '", obvious="the path is wrong"):
        synthesize("")
    with refused(
        ValueError,
        "no power-function average of 'opt'",
        "`tx.average(sl.schedules.power_average(0.1))`",
    ):
        synthesize("plain")
    with refused(
        ValueError,
        "'average.b' is stored in `Own()`",
        "remove the codec with `opt.rebind`, and save it again",
    ):
        synthesize("own")
    with refused(ValueError, "`sigma_rel` … got 0.3", "(0, 0.288]"):
        synthesize("power", sigma_rel=0.3)
    with refused(ValueError, "`step` … got 3", "from 1 to 2 … the last checkpoint"):
        synthesize("power", step=3)
    run = "pass the model of the run"
    with refused(ValueError, "of 'b', which the model does not have", obvious=run):
        synthesize("power", {"w": jnp.ones((3, 2))})
    with refused(ValueError, "averages of shape (2,) … the model has (4,)", obvious=run):
        synthesize("power", {"b": jnp.ones(4), "w": jnp.ones((3, 2))})
