"""Every rule and recipe walks the path that optax 0.2.8 walks."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slalom as sl
from helpers import (
    EXHAUSTIVE,
    SLOW,
    assert_same_path,
    gradients,
    nested_dict,
    optax_trajectory,
    params_of,
    public,
    slalom_trajectory,
)

STEPS = 50


class Row(NamedTuple):
    name: str
    ours: Any
    theirs: Any
    of_distance: float | None = None
    """For rows where optax itself rounds more: the allowed difference, in both precisions."""
    losses: bool = False
    """Whether each step is given a loss."""
    single: float = 2e-5
    """The allowed difference in single precision."""
    tolerances: tuple[float, float] = (1e-9, 1e-13)
    """Relative and absolute, in double precision."""


def matrices(params):
    return jax.tree.map(lambda x: x.ndim >= 2, params)


def widely(schedule):
    """The schedule in the widest float: of an int32 step optax computes it in float32 always."""
    return lambda step: schedule(step.astype(jnp.result_type(float)))


def with_mean_from_zero(theirs):
    """Yogi as published: optax starts the mean m where the mean of squares starts."""

    def init(params):
        state = theirs.init(params)
        return state._replace(mu=jax.tree.map(jnp.zeros_like, state.mu))

    return optax.GradientTransformation(init, theirs.update)


def one_step_earlier(theirs):
    """Rprop as published: optax returns each step one step late, and keeps the present one."""

    def update(updates, state, params=None):
        _, state = theirs.update(updates, state, params)
        return state.prev_updates, state

    return optax.GradientTransformation(theirs.init, update)


def scalars_as_vectors(theirs):
    """For scalars too: optax's SM3 has no accumulator for them, and its DoG makes them vectors."""

    def widen(tree):
        return jax.tree.map(jnp.atleast_1d, tree)

    def update(updates, state, params=None):
        made, state = theirs.update(widen(updates), state, widen(params))
        return jax.tree.map(lambda m, u: m.reshape(u.shape), made, updates), state

    return optax.GradientTransformation(lambda params: theirs.init(widen(params)), update)


def slower_decay(step, decay_rate):
    """Adafactor's decay as published, in double precision where there is one."""
    return 1 - (step.astype(jnp.result_type(float)) + 1) ** -decay_rate


def harmonic_decay(step, decay_rate):
    return decay_rate * (1 - 1 / (step + 1))


def adafactor_by_hand(rate, eps, decay_rate, momentum, weight_decay):
    """`optax.adafactor`, which cannot be told to compute its decay in double precision."""
    return optax.chain(
        optax.scale_by_factored_rms(True, decay_rate, 0, 2, eps, slower_decay),
        optax.clip_by_block_rms(0.8),
        optax.scale_by_learning_rate(rate, flip_sign=False),
        optax.scale_by_param_block_rms(),
        optax.ema(momentum, debias=False),
        optax.add_decayed_weights(weight_decay, mask=matrices),
        optax.scale(-1),
    )


def unitwise_clip(max_norm):
    """A transform made of Optax's functions."""

    def clip(g):
        norm = optax.transforms.unitwise_norm(g)
        return optax.transforms.unitwise_clip(norm, jnp.full_like(norm, max_norm), g)

    return optax.stateless(lambda updates, params: jax.tree.map(clip, updates))


Plateau = sl.schedules.ReduceOnPlateau
MATRICES = sl.where.ndim(min=2)
WARMUP = sl.schedules.warmup_cosine_decay(0.0, 0.1, 10, 40, 0.01)
LINE = sl.schedules.linear(0.2, 0.02, 30)
DECAY = sl.schedules.linear(0.9, 0.99, 10)
SHARE = sl.schedules.linear(0.0, 5.0, 10)
FACTORED, UPHILL = (True, 0.6, 0, 2, 1e-3), (1e-2, 1e-2, None, -0.7)
ACCUMULATING = {"accumulation_size": 3, "min_scale": 0.2}
theirs_warmup = widely(optax.warmup_cosine_decay_schedule(0.0, 0.1, 10, 40, 0.01))
IN_OPTAX = [
    (MATRICES, matrices),
    (WARMUP, theirs_warmup),
    (LINE, widely(optax.linear_schedule(0.2, 0.02, 30))),
    (DECAY, widely(optax.linear_schedule(0.9, 0.99, 10))),
    (SHARE, widely(optax.linear_schedule(0.0, 5.0, 10))),
    (harmonic_decay, lambda step, c: c * slower_decay(step, 1)),
]
SGD, MOMENTUM, ADAM = optax.sgd(0.1), optax.sgd(0.1, 0.9), optax.adam(theirs_warmup)
BY_WARMUP = optax.scale_by_learning_rate(theirs_warmup)


def same(name, *args, adapted=lambda theirs: theirs, theirs=(), row=(), **options):
    """A row for equal arguments, and those of `theirs`. The name begins with the function's."""
    function = name.split()[0]
    make = public(function.title().replace("_", ""), None) or public(function)
    make_theirs = getattr(optax, function, None) or getattr(optax.contrib, function)

    def in_optax(given):
        return next((theirs for ours, theirs in IN_OPTAX if given is ours), given)

    keywords = {"decay_where": "mask"}
    named = {keywords.get(key, key): in_optax(value) for key, value in options.items()}
    made = make_theirs(*map(in_optax, args), **named, **dict(theirs))
    return Row(name, make(*args, **options), adapted(made), **dict(row))


def chained(name, ours, *theirs, **options):
    return Row(name, ours, optax.chain(*theirs), **options)


ROWS = [
    same("identity"),
    same("set_to_zero"),
    same("scale", -0.1),
    same("scale_by_learning_rate", 0.1),
    same("scale_by_learning_rate scheduled", WARMUP),
    same("scale_by_schedule", LINE),
    same("scale_by_adam"),
    # optax multiplies in the dtype that the mean is stored in, Slalom in float32 or wider.
    same("scale_by_adam mu_dtype", mu_dtype=jnp.bfloat16, row={"of_distance": 2**-5}),
    same("scale_by_amsgrad"),
    same("scale_by_amsgrad uncorrected", 0.8, 0.9, 1e-3, 1e-4, None, False, False),
    same("scale_by_adamax"),
    same("scale_by_adamax numbers", 0.8, 0.9, 1e-2),
    same("scale_by_belief"),
    same("scale_by_belief nesterov", 0.8, 0.9, 1e-3, 1e-4, nesterov=True),
    same("scale_by_yogi", adapted=with_mean_from_zero),
    same("scale_by_yogi numbers", 0.8, 0.9, 1e-2, 1e-4, 1e-2, adapted=with_mean_from_zero),
    # In float32 optax's degrees of freedom at b2 = 0.999 have two digits: compared in float64,
    # and with a closed form in `test_adaptive.py`.
    same("scale_by_radam", row={"single": 1e-2}),
    same("scale_by_radam nesterov", 0.8, 0.9, 1e-3, 1e-4, 6.0, nesterov=True),
    same("scale_by_novograd"),
    same("scale_by_novograd numbers", 0.8, 0.9, 1e-3, 1e-4, 0.01),
    # At β₂ = ½ the coefficient that optax has the wrong way round, 1 − β₂, is the right one.
    same("scale_by_adan half", 0.9, 0.5, 0.95, 1e-3, 1e-4),
    same("scale_by_factored_rms", theirs={"decay_rate_fn": slower_decay}),
    same("scale_by_factored_rms factored", *FACTORED, theirs={"decay_rate_fn": slower_decay}),
    same("scale_by_factored_rms decay_rate_fn", False, 0.9, 0, 2, 1e-3, harmonic_decay),
    same("scale_by_rss"),
    same("scale_by_rss numbers", 0.0, 1e-2),
    same("scale_by_adadelta"),
    same("scale_by_adadelta numbers", 0.5, 1e-3),
    same("scale_by_sign"),
    same("scale_by_rprop", 0.1, adapted=one_step_earlier),
    same("scale_by_rprop numbers", 0.1, 0.6, 1.5, 0.05, 0.2, adapted=one_step_earlier),
    same("scale_by_sm3", adapted=scalars_as_vectors),
    same("scale_by_sm3 numbers", 0.8, 0.9, 1e-3, adapted=scalars_as_vectors),
    same("scale_by_lion"),
    same("scale_by_lion smooth", 0.7, 0.8, mode="smooth", smooth_beta=2.5),
    same("scale_by_lion refined", 0.7, 0.8, mode="refined"),
    same("scale_by_rms"),
    same("scale_by_rms initial_scale", 0.95, 1e-4, initial_scale=1.0),
    same("scale_by_rms eps outside", eps=1e-3, eps_in_sqrt=False),
    same("scale_by_rms eps outside bias_correction", 0.9, 1e-3, 0.0, False, True),
    same("scale_by_stddev"),
    same("scale_by_stddev initial_scale", 0.95, 1e-4, initial_scale=1.0),
    # Debiased, the first variance is 0: eps alone divides, and it must not be tiny.
    same("scale_by_stddev bias_correction", eps=0.1, bias_correction=True),
    same("trace", 0.9),
    same("trace nesterov", 0.9, nesterov=True),
    same("add_decayed_weights", 0.01),
    Row(
        "add_decayed_weights masked",
        sl.AddDecayedWeights(0.01).mask(MATRICES),
        optax.add_decayed_weights(0.01, mask=matrices),
    ),
    same("clip", 0.5),
    same("stateless", lambda u, p: jax.tree.map(lambda u, p: 0.1 * u - 0.2 * p, u, p)),
    Row(
        "stateless_with_tree_map",
        sl.StatelessPerLeaf(lambda u, p: 0.1 * u - 0.2 * p),
        optax.stateless_with_tree_map(lambda u, p: 0.1 * u - 0.2 * p),
    ),
    same("ema", 0.9),
    same("ema without debias", 0.9, debias=False),
    same("clip_by_global_norm", 1.5),
    # With a coefficient of 1 a step can end in exactly 0 or in a rounding of it, where both part.
    same("scale_by_trust_ratio", trust_coefficient=0.7),
    same("scale_by_trust_ratio numbers", 1.5, 0.1, 0.5),
    *(
        chained(name, sl.Scale(-0.1) | ours(0.9), optax.scale(-0.1), getattr(optax, name)(0.9))
        for name, ours in {
            "scale_by_param_block_norm": sl.ScaleByParamBlockNorm,
            "scale_by_param_block_rms": sl.ScaleByParamBlockRms,
        }.items()
    ),
    same("lamb", 0.05),
    same("lamb decay_where", WARMUP, 0.8, 0.95, 1e-3, 1e-4, 0.1, MATRICES),
    same("lars", 5.0),
    same("lars masked", 0.1, 0.1, MATRICES, 0.02, 1e-3, MATRICES, 0.8, True),
    same("fromage", 0.05),
    same("fromage scheduled", WARMUP, 0.5),
    same("clip_by_block_rms", 0.9),
    same("adaptive_grad_clip", 0.5),
    Row("unitwise_clip", sl.UnitwiseClip(0.9), unitwise_clip(0.9)),
    chained(
        "scale_by_distance_over_gradients",
        sl.ScaleByDistanceOverGradients() | sl.Scale(-1.0),
        scalars_as_vectors(optax.scale_by_distance_over_gradients(param_dtype=None)),
        optax.scale(-1.0),
    ),
    same("scale_by_distance_over_gradients numbers", *UPHILL, adapted=scalars_as_vectors),
    same("centralize"),
    same("normalize_by_update_norm"),
    same("normalize_by_update_norm numbers", -0.3, 0.5),
    same("scale_by_optimistic_gradient", 0.7, 0.4),
    same("optimistic_gradient_descent", 0.05),
    same("optimistic_adam_v2", 0.05),
    same("optimistic_adam_v2 numbers", 0.05, alpha=0.7, beta=0.4, b1=0.8, eps=1e-3, nesterov=False),
    same("add_noise", 0.5, 0.55, key=3),
    same("noisy_sgd", WARMUP, key=7),
    same("polyak_sgd", row={"losses": True}),
    chained(
        "polyak_sgd sps",
        sl.polyak_sgd(0.3, WARMUP, 1.5, 0.1),
        *(optax.scale_by_polyak(1.5, 0.3, 0.1), BY_WARMUP),
        losses=True,
    ),
    same("scale_by_polyak sps+", 1.5, 0.3, 0.1, "sps+", row={"losses": True}),
    chained(
        "keep_params_nonnegative",
        sl.sgd(0.1) | sl.KeepParamsNonnegative(),
        *(SGD, optax.keep_params_nonnegative()),
    ),
    same("zero_nans"),
    chained("freeze", sl.sgd(0.1) | sl.freeze(MATRICES), SGD, optax.transforms.freeze(matrices)),
    chained("apply_every", sl.ApplyEvery(4) | sl.sgd(0.1, 0.9), optax.apply_every(4), MOMENTUM),
    Row("apply_if_finite", sl.adam(WARMUP).if_finite(2), optax.apply_if_finite(ADAM, 2)),
    Row(
        "conditionally_transform",
        sl.Trace(0.9).when(lambda context, _: context.step % 3 != 1) | sl.sgd(0.1),
        optax.chain(optax.conditionally_transform(optax.trace(0.9), lambda n: n % 3 != 1), SGD),
    ),
    Row(
        "conditionally_mask",
        sl.adam(WARMUP).when(lambda context, _: context.step % 3 != 1, otherwise="zero"),
        optax.conditionally_mask(ADAM, lambda step: step % 3 != 1),
    ),
    Row(
        "flatten",
        sl.adamw(WARMUP, weight_decay=0.1).flatten(),
        optax.flatten(optax.adamw(theirs_warmup, weight_decay=0.1)),
    ),
    Row(
        "scale some",
        sl.adam(0.05) | sl.ScaleBy({MATRICES: 0.3}),
        optax.chain(optax.adam(0.05), optax.masked(optax.scale(0.3), matrices)),
    ),
    Row(
        "reduce_on_plateau",
        (sl.adam(0.05) | sl.Scale(1.0)).drive({"step_size": Plateau(1.0, 0.5, 3, 0.2, cooldown=2)}),
        optax.chain(optax.adam(0.05), optax.contrib.reduce_on_plateau(0.5, 3, 0.2, cooldown=2)),
        losses=True,
    ),
    Row(
        "reduce_on_plateau accumulating",
        sl.adam(0.05).drive({"learning_rate": Plateau(0.05, 0.5, 2, 0.0, 0.4, **ACCUMULATING)}),
        optax.chain(
            optax.adam(0.05), optax.contrib.reduce_on_plateau(0.5, 2, 0.0, 0.4, **ACCUMULATING)
        ),
        losses=True,
    ),
    same("sgd", 0.1),
    same("sgd momentum", 0.1, 0.9),
    same("sgd nesterov", 0.1, 0.9, nesterov=True),
    same("sgd scheduled", WARMUP, 0.9),
    same("adam", 0.05),
    same("adam nesterov", 0.05, nesterov=True),
    same("adam numbers", 0.05, 0.8, 0.95, 1e-3, 1e-4),
    same("adam scheduled", WARMUP),
    same("adamw", 0.05, weight_decay=0.1),
    same("adamw decay_where selector", 0.05, weight_decay=0.1, decay_where=MATRICES),
    same("adamw nesterov", 0.05, weight_decay=0.1, nesterov=True),
    same("adamw scheduled", WARMUP, weight_decay=0.1),
    same("nadam", 0.05, 0.8, eps_root=1e-4),
    same("nadamw", 0.05, weight_decay=0.1, decay_where=MATRICES),
    same("amsgrad", 0.05, 0.8),
    same("adamax", 0.05, 0.8),
    same("adamaxw", 0.05, weight_decay=0.1, decay_where=MATRICES),
    same("adabelief", 0.05, 0.8),
    same("radam", 0.05, 0.8, 0.95, row={"single": 1e-3}),
    chained("yogi", sl.yogi(WARMUP), with_mean_from_zero(optax.scale_by_yogi()), BY_WARMUP),
    same("novograd", 0.05, weight_decay=0.1),
    same("adan half", 0.05, b2=0.5, weight_decay=0.1, decay_where=MATRICES),
    # optax computes the decay in float32 always: the next row compares in float64.
    same("adafactor", 0.05, row={"of_distance": 2e-5}),
    Row(
        "adafactor numbers",
        sl.adafactor(WARMUP, 2, 0.6, 0, True, 0.8, 0.9, None, 0.01, 1e-3, True, MATRICES),
        adafactor_by_hand(theirs_warmup, 1e-3, 0.6, 0.9, 0.01),
    ),
    same("adafactor plain", None, 2, 0.8, 0, False, None, row={"of_distance": 2e-5}),
    same("adagrad", 0.05, 0.0, 1e-3),
    same("adadelta", 10.0, 0.8, 1e-6, 0.1, MATRICES),
    same("sign_sgd", WARMUP),
    same("signum", 0.05, 0.8),
    same("sm3", 0.05, 0.8, adapted=scalars_as_vectors),
    same("lion", 0.05, 0.7, 0.8),
    same("lion decay_where", 0.05, weight_decay=0.1, decay_where=MATRICES),
    same("lion scheduled", WARMUP),
    same("rmsprop", 0.05),
    same("rmsprop centered", 0.05, centered=True, eps=1e-3),
    same("rmsprop momentum", 0.05, momentum=0.9),
    same("rmsprop centered nesterov", 0.05, 0.9, 1e-3, 0.0, False, True, 0.9, True),
    same("rmsprop scheduled", WARMUP, momentum=0.9),
    same("ademamix", 0.05),
    same("ademamix numbers", 0.05, 0.8, 0.95, 0.99, 2.0, 1e-3, 1e-4, None, 0.1, MATRICES),
    same("scale_by_ademamix scheduled", b3=DECAY, alpha=SHARE),
    same("simplified_ademamix", 0.01, alpha=3.0, weight_decay=0.1, decay_where=MATRICES),
    same("simplified_ademamix numbers", 0.01, 0.9, 0.99, 1.0, 1e-3, 1e-4),
    same("adopt", 0.05),
    same("adopt nesterov", 0.05, 0.8, 0.95, 1e-2, nesterov=True),
    same("adopt unclipped", 0.05, 0.8, 0.9, 0.5, use_clipping=False),
    same("adopt clip_value_fn", 0.05, b2=0.9, clip_value_fn=lambda step: 2 + step / 4),
    # Optax adds ε to the learning rate, and takes the root of the count in float32.
    Row(
        "madgrad",
        sl.contrib.madgrad(0.05 + 1e-6),
        optax.contrib.madgrad(0.05),
        tolerances=(1e-7, 1e-7),
    ),
    Row(
        "madgrad numbers",
        sl.contrib.madgrad(sl.schedules.linear(0.06, 0.03, 10), 0.5, 0.1, 0.01),
        optax.contrib.madgrad(widely(optax.linear_schedule(0.05, 0.02, 10)), 0.5, 0.1, 0.01),
        tolerances=(1e-7, 1e-7),
    ),
]

EVERYDAY = {
    *("scale_by_adam mu_dtype", "scale_by_factored_rms factored", "apply_if_finite", "adan half"),
    "scale_by_distance_over_gradients numbers",
}
"""One row for each kind of rule: the slow tests compare all of them."""
assert {row.name for row in ROWS} > EVERYDAY


def with_rows(mark):
    """All rows, each with a mark that depends on its place and name."""
    params = [pytest.param(row, marks=mark(i, row.name)) for i, row in enumerate(ROWS)]
    return pytest.mark.parametrize("row", params, ids=[row.name.replace(" ", "-") for row in ROWS])


def both_trajectories(row, model):
    """The start, our path and theirs, as one program."""
    grads = gradients(model, STEPS)
    opt = sl.Optimizer(row.ours, model)

    @jax.jit
    def run(opt, grads):
        known = {"value": jnp.linspace(3.0, 0.1, STEPS)} if row.losses else {}
        ours, _ = slalom_trajectory(opt, model, grads, **known)
        # Optax sees the filtered part.
        theirs, _ = optax_trajectory(row.theirs, model, grads, **known)
        return ours, theirs

    return params_of(model), *run(opt, grads)


@with_rows(lambda i, name: () if name in EVERYDAY else SLOW)
def test_same_path_as_optax_for_a_whole_model_in_double_precision(row, x64):
    model = nested_dict(jax.random.key(1)) | {"activation": jax.nn.relu}
    start, ours, theirs = both_trajectories(row, model)
    if row.of_distance is not None:
        assert_same_path(ours, theirs, start, row.of_distance)
        return
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == b.dtype == jnp.float64
        rtol, atol = row.tolerances
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


# `test_accuracy.py` compares single precision with the formulas, for all rules.
@with_rows(lambda i, name: SLOW if i % 3 == 0 else EXHAUSTIVE)
def test_same_path_as_optax_in_single_precision(row):
    start, ours, theirs = both_trajectories(row, nested_dict(jax.random.key(0)))
    assert_same_path(ours, theirs, start, row.of_distance or row.single)
