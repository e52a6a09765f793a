"""Draws the curve of every schedule into its entry of the reference.

The curves are SVG in the color of the text, so that they fit both palettes.
"""

import html
import re

import slalom as sl

STEPS = 100
CYCLE = {
    "init_value": 0.1,
    "peak_value": 1.0,
    "warmup_steps": 5,
    "decay_steps": 50,
    "end_value": 0.0,
}
CURVES = [
    sl.schedules.constant(0.5),
    sl.schedules.linear(1.0, 0.0, 80, transition_begin=10),
    sl.schedules.linear_half_life(0.9, 0.1, 80),
    sl.schedules.power_average(0.1),
    sl.schedules.polynomial(1.0, 0.0, 2.0, 80),
    sl.schedules.cosine_decay(1.0, 80),
    sl.schedules.exponential_decay(1.0, 20, 0.5),
    sl.schedules.warmup_constant(0.0, 1.0, 20),
    sl.schedules.warmup_cosine_decay(0.0, 1.0, 15, STEPS),
    sl.schedules.warmup_exponential_decay(0.0, 1.0, 15, 20, 0.5),
    sl.schedules.warmup_stable_decay(0.0, 1.0, 15, 55, 30),
    sl.schedules.inverse_sqrt(0.0, 1.0, 15),
    sl.schedules.cosine_onecycle(STEPS, 1.0),
    sl.schedules.linear_onecycle(STEPS, 1.0),
    sl.schedules.sgdr([CYCLE, CYCLE]),
    sl.schedules.piecewise_constant(1.0, {40: 0.5, 70: 0.3}),
    sl.schedules.piecewise_interpolate("linear", 1.0, {40: 0.5, 90: 0.3}),
]
GUIDE_PLACE = "<!-- curve -->"
WIDTH, HEIGHT, LEFT, BOTTOM = 320, 110, 8, 14
"""The size of a picture, and the space for its axes, in pixels."""


def add(page):
    """The page with a curve under the signature of each schedule."""
    for schedule in CURVES:
        name = type(schedule).__name__
        place = re.compile(
            rf'(<h3 id="slalom\.schedules\.{name}".*?<div class="doc doc-contents[^>]*>)', re.DOTALL
        )
        page, found = place.subn(lambda match, s=schedule: match[1] + figure(s), page, count=1)
        assert found, f"the page has no entry for {name}"
    return page


def in_the_guide():
    """The curve of the first schedule in the guide to schedules."""
    return figure(sl.schedules.warmup_cosine_decay(0.0, 4e-3, warmup_steps=2, decay_steps=6), 6)


def figure(schedule, steps=STEPS):
    """The curve of a schedule and the code that made it."""
    values = [float(v) for v in schedule.values(steps + 1)]
    most = max(*values, 1e-9)
    points = " ".join(
        f"{LEFT + (WIDTH - LEFT) * i / steps:.1f},{4 + (HEIGHT - 8) * (1 - v / most):.1f}"
        for i, v in enumerate(values)
    )
    code = html_of(repr(schedule))
    return (
        f'<figure class="curve"><svg viewBox="0 0 {WIDTH + 4} {HEIGHT + BOTTOM}" role="img" '
        f'aria-label="The curve of {code}">'
        f'<path class="axes" d="M{LEFT},0V{HEIGHT}H{WIDTH}"/>'
        f'<polyline points="{points}"/>'
        f'<text x="{LEFT}" y="{HEIGHT + BOTTOM - 2}">0</text>'
        f'<text x="{WIDTH}" y="{HEIGHT + BOTTOM - 2}" text-anchor="end">{STEPS} steps</text>'
        f"</svg><figcaption><code>{code}</code></figcaption></figure>"
    )


def html_of(text):
    return html.escape(" ".join(text.split()))
