"""Exact resume: saved, loaded into a fresh program and continued, every row of the table goes on
bit for bit as if nothing had happened."""

import jax
import jax.numpy as jnp

import slalom as sl
from helpers import assert_same_bits, kind_of, transforms_in
from table import BUT_RECIPES, PER_EXAMPLE, rows

STEPS = 5
MODEL = {
    "w": jnp.linspace(-1, 1, 6).reshape(2, 3),
    "b": jnp.linspace(0.5, 1, 3).astype(jnp.bfloat16),
    "frozen": jnp.arange(3),
}


def loss_fn(model, x):
    hidden = jnp.tanh(x @ model["w"].astype(jnp.float32))
    return jnp.mean((hidden - model["b"].astype(jnp.float32)[None]) ** 2)


def batch(n):
    return jax.random.normal(jax.random.fold_in(jax.random.key(1), n), (4, 2))


def residual(model, x):
    """That of which `loss_fn` is the mean square, for rules that linearize it."""
    return jnp.tanh(x @ model["w"].astype(jnp.float32)) - model["b"].astype(jnp.float32)


def loss_for(tx):
    needs = {name for part in transforms_in(tx) for name in part.needs}
    if "terms" in needs:
        return lambda model, x: {"first": loss_fn(model, x), "second": jnp.sum(model["b"]) ** 2}
    return sl.LeastSquares(residual) if "residuals" in needs else loss_fn


ROWS = BUT_RECIPES | PER_EXAMPLE


def erased(x):
    """Zeros in the place of an array, whatever its dtype."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        words = jnp.zeros_like(jax.random.key_data(x))
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
    return jnp.zeros_like(x)


def steps(step, model, opt, start):
    """The model and the optimizer after each step."""
    history = []
    for n in range(start, STEPS):
        logits = jnp.full((1, 1), 150.0 + n)  # which only `sl.contrib.QKClip` reads
        model, opt, _ = step(model, opt, batch(n), context={"max_logits": logits})
        history.append((model, opt))
    return history


@rows(0, ROWS, everyday=("EveryK", "AddNoise"), ci=("Drive", "nested", *PER_EXAMPLE))
def test_a_row_resumes_bit_for_bit(row, tmp_path):
    step = sl.train_step(loss_for(row.tx), donate=False)
    start = sl.Optimizer(row.tx, MODEL)
    whole = steps(step, MODEL, start, 0)
    # Every step is a place to stop; some of them are inside of a window of accumulation.
    for stop in (1, 2, 3):
        stopped = dict(zip(("model", "opt"), whole[stop - 1], strict=True))
        path = tmp_path / f"{stop}.safetensors"
        sl.checkpoint.save(path, **stopped, step=stop)
        # Not one number of the new program is that of the old one.
        fresh = jax.tree.map(erased, {"model": MODEL, "opt": start})
        loaded = sl.checkpoint.load(path, **fresh, step=0, hyperparams="file")
        assert loaded.report.fits
        assert loaded["step"] == stop
        assert_same_bits({name: loaded[name] for name in stopped}, stopped)
        assert kind_of(loaded["opt"]) == kind_of(stopped["opt"])
        assert_same_bits(steps(step, loaded["model"], loaded["opt"], stop)[-1], whole[-1])
