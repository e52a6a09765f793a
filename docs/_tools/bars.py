"""Draws bars of HTML, so that their text has the size and the colors of the page."""

import html

LONGEST = 78
"""The longest bar, in percent of the width. The rest is for the number behind it."""


def figure(rows, title, parts=(), line=None):
    """Bars with names.

    `rows` are (name, bars), and each bar is a pair of the text behind it and its parts: pairs of
    the number of a part and its size. `parts` are the names of the parts for the key. A vertical
    line marks the size `line`.
    """
    most = max(sum(size for _, size in sizes) for _, bars in rows for _, sizes in bars)
    made = []
    for name, bars in rows:
        lines = "".join(f"<p>{_parts(sizes, most)}<span>{text}</span></p>" for text, sizes in bars)
        made.append(f"<div><code>{html.escape(name)}</code>{lines}</div>")
    key = "".join(f'<span><i class="part{i}"></i>{part}</span>' for i, part in enumerate(parts))
    at = "" if line is None else f'<i class="line" style="left:{LONGEST * line / most:.2f}%"></i>'
    return (
        f'<figure class="bars" data-search-exclude><figcaption>{title}{key}</figcaption>'
        f'<div class="rows">{"".join(made)}{at}</div></figure>'
    )


def _parts(sizes, most):
    return "".join(
        f'<i class="part{part}" style="width:{LONGEST * size / most:.2f}%"></i>'
        for part, size in sizes
    )
