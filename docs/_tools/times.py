"""Draws the times of other libraries, from the table in `performance.md`."""

import re
from pathlib import Path

from bars import figure

PAGE = Path(__file__).parents[1] / "performance.md"
PICTURE = re.compile(r'<p><img[^>]*src="[^"]*performance\.png"[^>]*></p>')
LIBRARIES = ("Optax", "PyTorch, fused", "PyTorch, foreach")
AT_HOME = ("AdamW", "clip, AdamW", "AdamW every 4", "Lion")
TITLE = "Time of a step{}, relative to Slalom (dashed line), for GPT-2 small on a CPU"


def ratios():
    """(rule, time of each library divided by Slalom's), for GPT-2 small."""
    _, _, section = PAGE.read_text().partition("### GPT-2 small: ")
    table = section.partition("\n\n")[2].partition("\n\n")[0].splitlines()[2:]
    for line in table:
        name, _, _, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        yield name, [float(re.search(r"[\d.]+", cell)[0]) if cell else None for cell in cells]


def times():
    """The picture that stands in the place of the one for other viewers."""
    rows = [
        (name, [(f"{x:g}×", [(i, x)]) for i, x in enumerate(found) if x is not None])
        for name, found in ratios()
    ]
    return figure(rows, TITLE.format(""), LIBRARIES, line=1)


def times_at_home():
    """Four bars of Optax, and a line at the time of Slalom."""
    found = dict(ratios())
    rows = [(name, [(f"{found[name][0]:g}×", [(0, found[name][0])])]) for name in AT_HOME]
    return figure(rows, TITLE.format(" of Optax"), line=1)
