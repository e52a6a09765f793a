"""QK-clip against attention whose logits are computed again, and against its formula."""

import functools
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl
from helpers import slow_except

path = sl.where.path
STILL = sl.sgd(0.0)
LOGITS = jnp.array([50.0, 200.0, 400.0, 90.0])


def clipped(model, logits, **options):
    """The model after a step that only clips."""
    opt = sl.Optimizer(STILL | sl.contrib.QKClip(100.0, **options), model)
    grads = jax.tree.map(jnp.zeros_like, model)
    return jax.jit(lambda opt: opt.step(model, grads, max_logits=logits)[0])(opt)


def test_the_published_factors():
    options = {"heads": 4, "where": {path("q"): "q", path("k"): "k"}, "layout": "oi"}
    model = {name: jnp.ones((4, 3)) for name in "qkv"}
    after = clipped(model, LOGITS, **options)
    for name in "qk":
        np.testing.assert_allclose(after[name][:, 0], [1, 0.707107, 0.5, 1], rtol=1e-6)
    np.testing.assert_array_equal(after["v"], model["v"])
    # Other shares than halves.
    after = clipped(model, LOGITS, **options, alpha=0.25)
    np.testing.assert_allclose(after["q"][2, 0], 0.25**0.25, rtol=1e-6)
    np.testing.assert_allclose(after["k"][2, 0], 0.25**0.75, rtol=1e-6)
    # Two heads share keys: the larger logit counts for both.
    after = clipped(model | {"k": jnp.ones((2, 3))}, LOGITS, **options)
    roots = np.sqrt([0.5, 0.5, 0.25, 0.25])
    np.testing.assert_allclose(after["q"][:, 0], roots, rtol=1e-6)
    np.testing.assert_allclose(after["k"][:, 0], roots[::2], rtol=1e-6)
    # Logits that are not finite clip nothing.
    after = clipped(model, jnp.array([jnp.inf, jnp.nan] * 2), **options)
    jax.tree.map(np.testing.assert_array_equal, after, model)


def heads_of(x, weight, bias, heads):
    return (x @ weight.T + bias).reshape(len(x), heads, -1)


def separate(params, x):
    """Logits of 4 heads of queries and 2 of keys."""
    q = heads_of(x, params["q"], params["bq"], 4)
    k = np.repeat(heads_of(x, params["k"], params["bk"], 2), 2, axis=1)
    return np.einsum("qhd,khd->hqk", q, k)


def fused(params, x):
    q, k, _ = np.split(params["qkv"], [8, 12])
    biases = np.split(params["b"], [8, 12])
    return separate({"q": q, "k": k, "bq": biases[0], "bk": biases[1]}, x)


def grouped(params, x):
    """As `fused`, where 2 heads of queries, their keys and their values stand together."""
    w, b = params["qkv"].reshape(2, 8, 6), params["b"].reshape(2, 8)
    parts = {"q": w[:, :4].reshape(8, 6), "bq": b[:, :4].reshape(8)}
    return separate(parts | {"k": w[:, 4:6].reshape(4, 6), "bk": b[:, 4:6].reshape(4)}, x)


def latent(params, x):
    """Logits of 4 heads with 2 queries and keys each, and 1 rotary query and a shared key."""
    q = heads_of(x, params["q"], 0.0, 4)
    k = heads_of(x, params["kv"], 0.0, 4)[..., :2]
    plain = np.einsum("qhd,khd->hqk", q[..., :2], k)
    return plain + np.einsum("qh,k->hqk", q[..., 2], x @ params["rotary"])


ATTENTION = {
    "separate": (
        separate,
        {"q": (8, 6), "bq": (8,), "k": (4, 6), "bk": (4,)},
        {path("**.*q"): "q", path("**.*k"): "k"},
    ),
    "fused": (fused, {"qkv": (16, 6), "b": (16,)}, {sl.where.everything(): "2q:k:v"}),
    "grouped": (grouped, {"qkv": (16, 6), "b": (16,)}, {sl.where.everything(): "2(2q:k:v)"}),
    "latent": (
        latent,
        {"q": (12, 6), "kv": (20, 6), "rotary": (6,)},
        {path("**.q"): "4(2q:r)", path("**.kv"): "4(2k:3v)"},
    ),
}
CASES = [*itertools.product(ATTENTION, (False, True))]


@pytest.mark.parametrize("case", slow_except(CASES, ("latent", True), ("grouped", False)))
def test_logits_scale_by_exactly_the_factor_of_their_head(case):
    name, stacked = case
    logits_of, shapes, where = ATTENTION[name]
    random = np.random.default_rng(0)

    def normal(*shape):
        return random.standard_normal(shape).astype("float32")

    one = [{name: normal(*shape) for name, shape in shapes.items()} for _ in range(3)]
    x = normal(5, 6)
    layers = jax.tree.map(lambda *x: jnp.stack(x), *one) if stacked else one
    layers = jax.tree.map(jnp.asarray, layers)
    layout = {sl.where.ndim(2 + stacked): "oi", sl.where.ndim(1 + stacked): "o"}
    before = [logits_of(params, x) for params in one]
    largest = [np.max(logits, axis=(1, 2)) for logits in before]
    limit = float(np.median(largest))
    clip = sl.contrib.QKClip(limit, heads=4, where=where, layout=layout, alpha=0.3)
    opt = sl.Optimizer(STILL | clip, layers)
    given = jnp.stack(largest) if stacked else list(map(jnp.asarray, largest))
    grads = jax.tree.map(jnp.zeros_like, layers)
    after, _ = jax.jit(lambda opt, s: opt.step(layers, grads, max_logits=s))(opt, given)
    for i in range(3):
        own = jax.tree.map(lambda x, i=i: x[i], after) if stacked else after[i]
        found = logits_of(jax.tree.map(np.asarray, own), x)
        factor = np.minimum(1, limit / np.maximum(largest[i], 1e-9))
        if name != "latent":  # heads that share keys
            factor = np.repeat(factor.reshape(2, 2).min(1), 2)
        np.testing.assert_allclose(found, before[i] * factor[:, None, None], rtol=2e-5, atol=2e-5)


PARAMS = {"b": jnp.ones(3), "k": jnp.full((4, 2), 2.0), "q": jnp.linspace(1, 2, 8).reshape(4, 2)}
CLIP = sl.contrib.QKClip(100.0, heads=2, where={path("q"): "q", path("k"): "k"}, layout="oi")
# Numbers that bfloat16 holds exactly.
RULE = sl.sgd(0.1, momentum=0.5)
QK = path("q") | path("k")

WRAPPED = {
    "plain": lambda tx: tx,
    "if_finite": lambda tx: tx.if_finite(),
    "when": lambda tx: tx.when(lambda context, updates: context.step >= 0, "zero"),
    "only": lambda tx: tx.only(QK),
    "partition": lambda tx: sl.sgd(0.1).partition({QK: tx}),
    "store": lambda tx: tx.store("bfloat16", min_size=1),
    "master": lambda tx: tx.write("master"),
    "lookahead": lambda tx: tx.lookahead(100, 0.5),
    "average": lambda tx: tx.average(0.9),
    "record": lambda tx: tx.record(),
    "windows": lambda tx: tx.every_k(2),
    "windows of windows": lambda tx: tx.every_k(1).every_k(2).if_finite().write("master"),
    "master inside": lambda tx: tx.write("master").every_k(2),
}
SEEN = jnp.array([[[50.0, 900]], [[400, 90]], [[300, 20]], [[1, 2]], [[70, 600]], [[80, 90]]])


@pytest.mark.parametrize("name", slow_except(WRAPPED, "master inside", "partition"))
def test_wrappers_give_what_is_written_plainly(name):
    master = "master" in name or "of windows" in name
    params = jax.tree.map(lambda x: x.astype("bfloat16" if master else "float32"), PARAMS)
    tx = WRAPPED[name](RULE | CLIP)
    grads = jax.tree.map(lambda x: jnp.full(x.shape, 2**-7, x.dtype), params)
    opt, model = sl.Optimizer(tx, params), params
    step = jax.jit(lambda model, opt, s: opt.step(model, grads, max_logits=s))
    for logits in SEEN:
        model, opt = step(model, opt, logits)
    window = 2 if "windows" in name or "inside" in name else 1
    wanted = {name: np.asarray(x, np.float64) for name, x in params.items()}
    velocity = 0.0
    for logits in np.asarray(SEEN).reshape(-1, window, 2).max(1):
        velocity = 0.5 * velocity + float(grads["q"][0, 0])
        factor = np.sqrt(np.minimum(1, 100 / logits)).repeat(2)[:, None]
        for own in "qk":
            wanted[own] = factor * (wanted[own] - 0.1 * velocity)
    found = opt.eval_params(model, full_precision=True) if master else model
    for own in "qk":
        np.testing.assert_allclose(found[own], wanted[own], rtol=1e-6, err_msg=own)


class Attention(eqx.Module):
    query: eqx.nn.Linear
    key: eqx.nn.Linear

    def __call__(self, x):
        q, k = (jax.vmap(f)(x).reshape(len(x), 2, -1) for f in (self.query, self.key))
        return jnp.einsum("qhd,khd->hqk", q, k)


def attention_loss(weighted, model, x, weight):
    logits = jax.vmap(model)(x)
    # Padding has logits of its own, which must not count.
    largest = {"max_logits": jnp.max(logits, axis=(0, 2, 3)), "other": jnp.ones(())}
    loss = jnp.mean(logits**2)
    return (loss, jnp.sum(weight), largest) if weighted else (loss, largest)


@pytest.mark.slow
def test_the_training_step_takes_the_maximum_over_microbatches_and_scans():
    keys = jax.random.split(jax.random.key(0), 3)
    model = Attention(*(eqx.nn.Linear(4, 4, key=key) for key in keys[:2]))
    x = jax.random.normal(keys[2], (2, 8, 3, 4)) * 3
    where = {path("query.*"): "q", path("key.*"): "k"}
    tx = sl.sgd(1e-3) | sl.contrib.QKClip(1.0, heads=2, where=where)
    loss_fn = functools.partial(attention_loss, False)

    def trained(weight, **options):
        loss_fn = functools.partial(attention_loss, "has_weight" in options)
        step = sl.train_step(loss_fn, has_aux=True, **options)
        return step.scan(model, sl.Optimizer(tx, model), x, weight)[0]

    plain, opt = model, sl.Optimizer(tx, model)
    for batch in x:
        (_, aux), grads = eqx.filter_value_and_grad(loss_fn, has_aux=True)(plain, batch, None)
        plain, opt = opt.step(plain, grads, max_logits=aux["max_logits"])
    assert abs(plain.query.weight).max() < 0.9 * abs(model.query.weight).max()
    same = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7)
    ones = jnp.ones((2, 8))
    jax.tree.map(same, trained(ones), plain)
    jax.tree.map(same, trained(ones, microbatches=4), plain)
    # A microbatch of weight 0 does not count, however large its logits are.
    padded = jnp.concatenate([x, 100 * x], axis=1)
    x = padded.reshape(2, 2, 8, 3, 4).swapaxes(1, 2).reshape(2, 16, 3, 4)
    weight = jnp.tile(jnp.array([1.0, 0.0]), (2, 8))
    jax.tree.map(same, trained(weight, microbatches=2, has_weight=True), plain)
