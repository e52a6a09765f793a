"""The formula of each rule as its docstring states it, in NumPy with more digits than float64.

A formula is called as `formula(h, t, g, p, s)` with the hyperparameters and limits `h`, the age t,
the gradients and parameters of one array, and the old state `s`. It returns the update and the new
values of the state by name.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

import slalom as sl

Formula = Callable[..., tuple[Any, dict[str, Any]]]


class Row(NamedTuple):
    """A rule, its formula, and its state: the power of the gradients that each array scales as."""

    rule: Any
    formula: Formula
    state: Mapping[str, float] = {}
    ulp: float = 4
    """The largest error of an update, in units in the last place."""
    largest: float = np.inf
    """The size of gradients from which the updates are NaN in float32, since a norm overflows."""
    least: float = 0.0
    """The least value of means of squares, after the first step."""


def correction(decay, t):
    """1 / (1 − decayᵗ)."""
    return -1 / np.expm1(t * np.log(decay)) if decay > 0 else 1


def norm(x):
    return np.sqrt(np.sum(np.abs(x) ** 2))


def mean(h, s, g):
    return h.b1 * s.mu + (1 - h.b1) * g


def mean_of_squares(h, s, g):
    return h.b2 * s.nu + (1 - h.b2) * h.square(g)


def root(h, square, scale):
    return np.sqrt(h.positive(square) * scale + h.eps_root) + h.eps


def adam(h, t, g, p, s):
    mu, nu = mean(h, s, g), mean_of_squares(h, s, g)
    u = mu * correction(h.b1, t) / root(h, nu, correction(h.b2, t))
    return u, {"mu": mu, "nu": nu}


def nadam(h, t, g, p, s):
    mu, nu = mean(h, s, g), mean_of_squares(h, s, g)
    ahead = h.b1 * mu * correction(h.b1, t + 1) + (1 - h.b1) * g * correction(h.b1, t)
    return ahead / root(h, nu, correction(h.b2, t)), {"mu": mu, "nu": nu}


def amsgrad(h, t, g, p, s):
    mu, nu = mean(h, s, g), mean_of_squares(h, s, g)
    nu_max = np.maximum(s.nu_max, nu * correction(h.b2, t))
    u = mu * correction(h.b1, t) / root(h, nu_max, 1)
    return u, {"mu": mu, "nu": nu, "nu_max": nu_max}


def adamax(h, t, g, p, s):
    mu, nu = mean(h, s, g), np.maximum(h.b2 * s.nu, np.abs(g) + h.eps)
    return mu * correction(h.b1, t) / nu, {"mu": mu, "nu": nu}


def belief(h, t, g, p, s):
    mu = mean(h, s, g)
    nu = h.b2 * s.nu + (1 - h.b2) * h.square(g - mu) + h.eps_root
    divisor = np.sqrt(h.positive(nu) * correction(h.b2, t)) + h.eps
    return mu * correction(h.b1, t) / divisor, {"mu": mu, "nu": nu}


def yogi(h, t, g, p, s):
    mu, square = mean(h, s, g), h.square(g)
    nu = s.nu - (1 - h.b2) * np.sign(s.nu - square) * square
    return mu * correction(h.b1, t) / root(h, nu, correction(h.b2, t)), {"mu": mu, "nu": nu}


def radam(h, t, g, p, s):
    mu, nu = mean(h, s, g), mean_of_squares(h, s, g)
    limit = 2 / (1 - h.b2) - 1
    rho = limit - 2 * t * h.b2**t * correction(h.b2, t)
    u = mu * correction(h.b1, t)
    if rho >= h.threshold:
        r = np.sqrt((rho - 4) * (rho - 2) * limit / ((limit - 4) * (limit - 2) * rho))
        u = r * u / root(h, nu, correction(h.b2, t))
    return u, {"mu": mu, "nu": nu}


def novograd(h, t, g, p, s):
    square = np.minimum(np.sum(np.abs(g) ** 2), h.largest / 4)
    nu = h.b2 * s.nu + (1 - h.b2) * square if t > 1 else square + 0 * s.nu
    mu = h.b1 * s.mu + g / root(h, nu, 1) + h.weight_decay * p
    return mu, {"mu": mu, "nu": nu}


def adan(h, t, g, p, s):
    d = g - s.g if t > 1 else 0 * g
    m, v = h.b1 * s.m + (1 - h.b1) * g, h.b2 * s.v + (1 - h.b2) * d
    n = h.b3 * s.n + (1 - h.b3) * h.square(g + h.b2 * d)
    ahead = m * correction(h.b1, t) + h.b2 * v * correction(h.b2, t)
    return ahead / root(h, n, correction(h.b3, t)), {"m": m, "v": v, "n": n, "g": g}


def ademamix(h, t, g, p, s):
    m1 = h.b1 * s.m1 + (1 - h.b1) * g
    m2 = h.b3 * s.m2 + (1 - h.b3) * g
    nu = mean_of_squares(h, s, g)
    mixed = m1 * correction(h.b1, t) + h.alpha * m2
    return mixed / root(h, nu, correction(h.b2, t)), {"m1": m1, "m2": m2, "nu": nu}


def simplified_ademamix(h, t, g, p, s):
    mu, nu = h.b1 * s.mu + g, mean_of_squares(h, s, g)
    return (mu + h.alpha * g) / root(h, nu, correction(h.b2, t)), {"mu": mu, "nu": nu}


def adopt(h, t, g, p, s):
    if t == 1:
        return h.b1 * s.mu, {"mu": h.b1 * s.mu, "nu": h.square(g)}
    n = g / np.maximum(np.sqrt(h.positive(s.nu)), h.eps)
    n = n * np.minimum(1, (t - 1) ** np.longdouble(0.25) / np.abs(n))
    mu = h.b1 * s.mu + (1 - h.b1) * n
    return mu, {"mu": mu, "nu": mean_of_squares(h, s, g)}


def adam_mini(h, t, g, p, s):
    # Of an array of unknown layout, inputs come first.
    square = np.minimum(np.mean(np.abs(g) ** 2, 0, keepdims=True), h.largest / 4)
    mu, nu = mean(h, s, g), h.b2 * s.nu[0] + (1 - h.b2) * square
    divisor = np.sqrt(h.positive(nu) * correction(h.b2, t)) + h.eps
    return mu * correction(h.b1, t) / divisor, {"mu": mu, "nu": (nu,)}


def laprop(h, t, g, p, s):
    nu = mean_of_squares(h, s, g)
    divided = g / (np.sqrt(h.positive(nu) * correction(h.b2, t)) + h.eps)
    mu = h.b1 * s.mu + (1 - h.b1) * divided
    return mu * correction(h.b1, t), {"mu": mu, "nu": nu}


def mars(h, t, g, p, s):
    change = g - s.previous_gradient if t > 1 else 0 * g
    c = g + h.gamma * h.b1 / (1 - h.b1) * change
    c = c / max(1, norm(c))
    mu, nu = mean(h, s, c), mean_of_squares(h, s, c)
    divisor = np.sqrt(h.positive(nu) * correction(h.b2, t)) + h.eps
    return mu * correction(h.b1, t) / divisor, {"mu": mu, "nu": nu, "previous_gradient": g}


def stable_adam(h, t, g, p, s):
    w1, w2 = (1 - h.b1) * correction(h.b1, t), (1 - h.b2) * correction(h.b2, t)
    mu, nu = s.mu + w1 * (g - s.mu), s.nu + w2 * (h.square(g) - s.nu)
    r = norm(g / np.sqrt(h.positive(np.maximum(nu, h.eps**2)))) / g.size**0.5
    u = mu / (np.sqrt(h.positive(nu)) + h.eps) + h.weight_decay * p
    return u / max(1, r / h.clipping_threshold), {"mu": mu, "nu": nu}


def acprop(h, t, g, p, s):
    u = g
    if t > 1:
        u = g / (np.sqrt(h.positive(s.nu) * correction(h.b2, t - 1)) + h.eps)
    mu = mean(h, s, g)
    nu = h.b2 * s.nu + (1 - h.b2) * h.square(g - mu) + h.eps_root
    return u, {"mu": mu, "nu": nu}


def rss(h, t, g, p, s):
    total = np.minimum(s.sum_of_squares + np.abs(g) ** 2, h.largest / 4)
    return g / np.sqrt(h.positive(total) + h.eps), {"sum_of_squares": total}


def adadelta(h, t, g, p, s):
    e_g = h.rho * s.e_g + (1 - h.rho) * h.square(g)
    ratio = (s.e_x + h.eps) / (e_g + h.eps)
    e_x = h.rho * s.e_x + (1 - h.rho) * ratio * h.square(g)
    return np.sqrt(ratio) * g, {"e_g": e_g, "e_x": e_x}


def divide(h, g, square):
    square = h.positive(square)
    return g / np.sqrt(square + h.eps) if h.eps_in_sqrt else g / (np.sqrt(square) + h.eps)


def rms(h, t, g, p, s):
    nu = h.decay * s.nu + (1 - h.decay) * h.square(g)
    scale = correction(h.decay, t) if h.bias_correction else 1
    return divide(h, g, nu * scale), {"nu": nu}


def stddev(h, t, g, p, s):
    w = (1 - h.decay) * (correction(h.decay, t) if h.bias_correction else 1)
    keep = h.decay / (1 - h.decay) if h.bias_correction and t == 1 else 1 - w
    spread = 0 if h.bias_correction and t == 1 else w * (1 - w)
    nu = keep * s.nu + spread * h.square(g - s.mu)
    return divide(h, g, nu), {"mu": s.mu + w * (g - s.mu), "nu": nu}


def trace(h, t, g, p, s):
    new = g + h.decay * s.trace
    return (g + h.decay * new if h.nesterov else new), {"trace": new}


def ema(h, t, g, p, s):
    new = h.decay * s.ema + (1 - h.decay) * g
    return new * (correction(h.decay, t) if h.debias else 1), {"ema": new}


def lion(h, t, g, p, s):
    c = h.b1 * s.mu + (1 - h.b1) * g
    size = np.abs(c)
    mu = h.b2 * s.mu + (1 - h.b2) * g
    return c / np.where(size == 0, 1, size) * np.tanh(h.smooth_beta * size), {"mu": mu}


def sm3(h, t, g, p, s):
    total = np.minimum(*s.accumulators) + h.square(g)
    mu = h.b1 * s.mu + (1 - h.b1) * g / np.sqrt(h.positive(total) + h.eps)
    maxima = (np.max(total, 1, keepdims=True), np.max(total, 0, keepdims=True))
    return mu, {"mu": mu, "accumulators": maxima}


def factored(h, t, g, p, s):
    w, square = t**-h.decay_rate, np.abs(g) ** 2
    eps = h.positive(h.eps)

    def mean_of(old, new):
        new = np.minimum(new, h.largest / 4)
        return old + w * (new + eps - old)

    if len(s.nu) == 1:
        nu = (mean_of(s.nu[0], square),)
        return g / np.sqrt(nu[0]), {"nu": nu}
    axes = tuple(int(np.argmin(old.shape)) for old in s.nu)
    nu = tuple(
        mean_of(old, np.mean(square, axis, keepdims=True))
        for old, axis in zip(s.nu, axes, strict=True)
    )
    return g / np.sqrt(nu[0]) / np.sqrt(nu[1]) * np.sqrt(np.mean(nu[0])), {"nu": nu}


def optimistic(h, t, g, p, s):
    change = g - s.previous_gradient if t > 1 else 0 * g
    return h.alpha * g + h.beta * change, {"previous_gradient": g}


def clip_norm(h, t, g, p, s):
    return g * min(1, h.max_norm / norm(g)), {}


def clip_rms(h, t, g, p, s):
    return g * min(1, h.threshold / (norm(g) / g.size**0.5)), {}


def normalize(h, t, g, p, s):
    return g * h.scale_factor / (norm(g) + h.eps), {}


def trust_ratio(h, t, g, p, s):
    u_norm, p_norm = max(norm(g), h.min_norm), max(norm(p), h.min_norm)
    return g * h.trust_coefficient * p_norm / (u_norm + h.eps), {}


def block_rms(h, t, g, p, s):
    return g * max(norm(p) / p.size**0.5, h.min_scale), {}


def fromage(h, t, g, p, s):
    root = np.sqrt(1 + h.learning_rate**2)
    return p * (-(h.learning_rate**2) / (root * (1 + root))) - h.learning_rate / root * g, {}


def decayed(h, t, g, p, s):
    return g + h.weight_decay * p, {}


def subtracted(h, t, g, p, s):
    return g - h.weight_decay * p, {}


def corrected(h, t, g, p, s):
    decay = h.weight_decay * h.learning_rate / h.max_learning_rate
    return -h.learning_rate * (g + decay * p), {}


def scaled(h, t, g, p, s):
    return g * h.step_size, {}


def average(h, t, g, p, s):
    w = 1 / t if h.decay is None else (1 - h.decay) * correction(h.decay, t)
    return 0 * g, {"average": s.average + w * (p - s.average)}


MOMENTS = {"mu": 1, "nu": 2}
DELTA = {"e_g": 2, "e_x": 0}

ROWS = {
    "ScaleByAdam": Row(sl.ScaleByAdam(), adam, MOMENTS),
    "ScaleByAdam, nesterov": Row(sl.ScaleByAdam(nesterov=True), nadam, MOMENTS),
    "ScaleByAdam, b1=0": Row(sl.ScaleByAdam(b1=0.0, eps=0.0), adam, MOMENTS),
    "ScaleByAmsgrad": Row(sl.ScaleByAmsgrad(), amsgrad, {**MOMENTS, "nu_max": 2}),
    "ScaleByAdamax": Row(sl.ScaleByAdamax(), adamax, {"mu": 1, "nu": 1}),
    "ScaleByBelief": Row(sl.ScaleByBelief(), belief, MOMENTS),
    "ScaleByYogi": Row(sl.ScaleByYogi(), yogi, MOMENTS),
    "ScaleByRadam": Row(sl.ScaleByRadam(), radam, MOMENTS),
    "ScaleByNovograd": Row(sl.ScaleByNovograd(weight_decay=0.1), novograd, {"mu": 0, "nu": 2}),
    "ScaleByAdan": Row(sl.ScaleByAdan(), adan, {"m": 1, "v": 1, "n": 2, "g": 1}),
    "ScaleByAdemamix": Row(sl.ScaleByAdemamix(), ademamix, {"m1": 1, "m2": 1, "nu": 2}),
    "ScaleBySimplifiedAdemamix": Row(
        sl.contrib.ScaleBySimplifiedAdemamix(alpha=2.0), simplified_ademamix, MOMENTS
    ),
    "ScaleByAdopt": Row(sl.ScaleByAdopt(), adopt, {"mu": 0, "nu": 2}),
    "ScaleByLaprop": Row(sl.contrib.ScaleByLaprop(), laprop, {"mu": 0, "nu": 2}),
    "ScaleByMars": Row(
        sl.contrib.ScaleByMars(), mars, {**MOMENTS, "previous_gradient": 1}, largest=1e18
    ),
    "ScaleByStableAdam": Row(sl.ScaleByStableAdam(weight_decay=0.1), stable_adam, MOMENTS),
    "ScaleByAdamMini": Row(sl.contrib.ScaleByAdamMini(), adam_mini, MOMENTS),
    "ScaleByAcprop": Row(sl.contrib.ScaleByAcprop(), acprop, MOMENTS),
    "ScaleByFactoredRms": Row(sl.ScaleByFactoredRms(), factored, {"nu": 2}, least=1e-30),
    "ScaleByFactoredRms, factored": Row(
        sl.ScaleByFactoredRms(min_dim_size_to_factor=2), factored, {"nu": 2}, least=1e-30
    ),
    "ScaleByRss": Row(sl.ScaleByRss(), rss, {"sum_of_squares": 2}),
    "ScaleByAdadelta": Row(sl.ScaleByAdadelta(), adadelta, DELTA),
    "ScaleBySm3": Row(sl.ScaleBySm3(), sm3, {"mu": 0, "accumulators": 2}),
    "ScaleByLion": Row(sl.ScaleByLion(mode="smooth"), lion, {"mu": 1}),
    "ScaleByLion, b2=0.01": Row(sl.ScaleByLion(b2=0.01, mode="smooth"), lion, {"mu": 1}),
    "ScaleByRms": Row(sl.ScaleByRms(), rms, {"nu": 2}),
    "ScaleByRms, bias correction": Row(
        sl.ScaleByRms(bias_correction=True, eps_in_sqrt=False), rms, {"nu": 2}
    ),
    "ScaleByStddev": Row(sl.ScaleByStddev(), stddev, MOMENTS),
    "ScaleByStddev, bias correction": Row(sl.ScaleByStddev(bias_correction=True), stddev, MOMENTS),
    "Trace": Row(sl.Trace(0.9), trace, {"trace": 1}),
    "Trace, nesterov": Row(sl.Trace(0.9, nesterov=True), trace, {"trace": 1}),
    "Ema": Row(sl.Ema(0.9), ema, {"ema": 1}),
    "Ema, without debias": Row(sl.Ema(0.9, debias=False), ema, {"ema": 1}),
    "ScaleByOptimisticGradient": Row(
        sl.ScaleByOptimisticGradient(), optimistic, {"previous_gradient": 1}
    ),
    "ClipByGlobalNorm": Row(sl.ClipByGlobalNorm(1.0), clip_norm, largest=1e18),
    "ClipByBlockRms": Row(sl.ClipByBlockRms(1.0), clip_rms, largest=1e18),
    "NormalizeByUpdateNorm": Row(sl.NormalizeByUpdateNorm(), normalize),
    "ScaleByTrustRatio": Row(sl.ScaleByTrustRatio(), trust_ratio),
    "ScaleByParamBlockRms": Row(sl.ScaleByParamBlockRms(), block_rms),
    "ScaleByFromage": Row(sl.ScaleByFromage(0.1), fromage),
    "AddDecayedWeights": Row(sl.AddDecayedWeights(0.1), decayed),
    "SubtractDecayedWeights": Row(sl.SubtractDecayedWeights(0.1), subtracted),
    "ScaleByLearningRateWithCorrectedDecay": Row(
        sl.contrib.ScaleByLearningRateWithCorrectedDecay(0.1, 0.2, weight_decay=0.1), corrected
    ),
    "Scale": Row(sl.Scale(-0.1), scaled),
    "Average": Row(sl.Scale(0.0).average(0.999), average, {"average": 0}),
    "Average, uniform": Row(sl.Scale(0.0).average(), average, {"average": 0}),
}
