"""NIST's nonlinear regression problems (StRD): models, data, starts and certified values.

The data are facts published by the National Institute of Standards and Technology, from
https://www.itl.nist.gov/div898/strd/nls/nls_main.shtml.
"""

import json
from pathlib import Path

import jax.numpy as jnp

PROBLEMS = json.loads((Path(__file__).parent / "nist.json").read_text())


def _exponentials(b, x):
    return b[0] * jnp.exp(-b[1] * x) + b[2] * jnp.exp(-b[3] * x) + b[4] * jnp.exp(-b[5] * x)


def _peaks(b, x):
    first = b[2] * jnp.exp(-((x - b[3]) ** 2) / b[4] ** 2)
    second = b[5] * jnp.exp(-((x - b[6]) ** 2) / b[7] ** 2)
    return b[0] * jnp.exp(-b[1] * x) + first + second


def _cubics(b, x):
    above = b[0] + b[1] * x + b[2] * x**2 + b[3] * x**3
    return above / (1 + b[4] * x + b[5] * x**2 + b[6] * x**3)


def _cycles(b, x):
    def cycle(c, s, period):
        return c * jnp.cos(2 * jnp.pi * x / period) + s * jnp.sin(2 * jnp.pi * x / period)

    return b[0] + cycle(b[1], b[2], 12) + cycle(b[4], b[5], b[3]) + cycle(b[7], b[8], b[6])


MODELS = {
    "Bennett5": lambda b, x: b[0] * (b[1] + x) ** (-1 / b[2]),
    "BoxBOD": lambda b, x: b[0] * (1 - jnp.exp(-b[1] * x)),
    "Chwirut1": lambda b, x: jnp.exp(-b[0] * x) / (b[1] + b[2] * x),
    "Chwirut2": lambda b, x: jnp.exp(-b[0] * x) / (b[1] + b[2] * x),
    "DanWood": lambda b, x: b[0] * x ** b[1],
    "ENSO": _cycles,
    "Eckerle4": lambda b, x: b[0] / b[1] * jnp.exp(-0.5 * ((x - b[2]) / b[1]) ** 2),
    "Gauss1": _peaks,
    "Gauss2": _peaks,
    "Gauss3": _peaks,
    "Hahn1": _cubics,
    "Kirby2": lambda b, x: (b[0] + b[1] * x + b[2] * x**2) / (1 + b[3] * x + b[4] * x**2),
    "Lanczos1": _exponentials,
    "Lanczos2": _exponentials,
    "Lanczos3": _exponentials,
    "MGH09": lambda b, x: b[0] * (x**2 + x * b[1]) / (x**2 + x * b[2] + b[3]),
    "MGH10": lambda b, x: b[0] * jnp.exp(b[1] / (x + b[2])),
    "MGH17": lambda b, x: b[0] + b[1] * jnp.exp(-x * b[3]) + b[2] * jnp.exp(-x * b[4]),
    "Misra1a": lambda b, x: b[0] * (1 - jnp.exp(-b[1] * x)),
    "Misra1b": lambda b, x: b[0] * (1 - (1 + b[1] * x / 2) ** -2),
    "Misra1c": lambda b, x: b[0] * (1 - (1 + 2 * b[1] * x) ** -0.5),
    "Misra1d": lambda b, x: b[0] * b[1] * x / (1 + b[1] * x),
    "Nelson": lambda b, x, z: b[0] - b[1] * x * jnp.exp(-b[2] * z),
    "Rat42": lambda b, x: b[0] / (1 + jnp.exp(b[1] - b[2] * x)),
    "Rat43": lambda b, x: b[0] / (1 + jnp.exp(b[1] - b[2] * x)) ** (1 / b[3]),
    "Roszman1": lambda b, x: b[0] - b[1] * x - jnp.arctan(b[2] / (x - b[3])) / jnp.pi,
    "Thurber": _cubics,
}


def residual_of(name):
    """The residual of one observation, and the observations."""
    y, *xs = map(jnp.asarray, PROBLEMS[name]["columns"])
    target = jnp.log(y) if name == "Nelson" else y

    def residual(b, y, *xs):
        return y - MODELS[name](b, *xs)

    return residual, (target, *xs)
