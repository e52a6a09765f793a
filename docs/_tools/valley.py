"""Draws the paths of a dozen rules through a narrow valley, for `choosing.md`.

The valley is f(x, y) = (u² + 20·v²) / 2 in axes u and v that are turned by 30°, so that its
contours are ellipses. The picture is SVG without colors of the page, so that it fits both palettes.
"""

import math

import jax
import jax.numpy as jnp

import slalom as sl

STEPS = 80
START = (-2.2, 0.9)
ANGLE = math.radians(30)
RULES = {
    "sgd(0.04)": sl.sgd(0.04),
    "sgd(0.01, momentum=0.8)": sl.sgd(0.01, momentum=0.8),
    "adam(0.1)": sl.adam(0.1),
    "nadam(0.1)": sl.nadam(0.1),
    "amsgrad(0.1)": sl.amsgrad(0.1),
    "rmsprop(0.05)": sl.rmsprop(0.05),
    "adagrad(0.5)": sl.adagrad(0.5),
    "lion(0.05)": sl.lion(0.05),
    "sign_sgd(0.05)": sl.sign_sgd(0.05),
    "adan(0.2)": sl.adan(0.2),
    "prodigy(1.0)": sl.prodigy(1.0),
    "lbfgs()": sl.lbfgs(),
}
PLACE = "<!-- valley -->"
SCALE, WIDTH, HEIGHT = 60, 340, 260


def loss(params):
    x, y = params
    u = x * math.cos(ANGLE) + y * math.sin(ANGLE)
    v = y * math.cos(ANGLE) - x * math.sin(ANGLE)
    return (u**2 + 20 * v**2) / 2


def path(tx):
    """The points that an optimizer visits."""
    params = jnp.array(START)
    step, opt, points = sl.train_step(loss), sl.Optimizer(tx, params), [params]
    for _ in range(STEPS):
        params, opt, _ = step(params, opt)
        points.append(params)
    return [(float(x), float(y)) for x, y in jax.device_get(points)]


def at(x, y):
    return f"{WIDTH * 0.6 + SCALE * x:.1f},{HEIGHT / 2 - SCALE * y:.1f}"


def figure():
    """The picture, with a key below it."""
    x0, y0 = WIDTH * 0.6, HEIGHT / 2
    rings = "".join(
        f'<ellipse rx="{SCALE * r:.1f}" ry="{SCALE * r / math.sqrt(20):.1f}" '
        f'transform="translate({x0} {y0}) rotate({-math.degrees(ANGLE):.0f})"/>'
        for r in (0.4, 0.8, 1.2, 1.7, 2.3, 3.0, 4.0, 5.5)
    )
    paths, key = [], []
    for i, (name, tx) in enumerate(RULES.items()):
        color = f"hsl({360 * i / len(RULES):.0f} 75% 48%)"
        points = " ".join(at(x, y) for x, y in path(tx))
        paths.append(
            f'<polyline points="{points}" stroke="{color}"><title>{name}</title></polyline>'
        )
        key.append(f'<span><i style="background:{color}"></i><code>sl.{name}</code></span>')
    return (
        f'<figure class="valley"><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="The paths of {len(RULES)} rules through a narrow valley">'
        f'<g class="rings">{rings}</g>{"".join(paths)}'
        f'<circle cx="{x0}" cy="{y0}" r="3"/></svg>'
        f"<figcaption>{''.join(key)}</figcaption></figure>"
    )
