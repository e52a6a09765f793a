"""Runs examples with cell markers, and shows them as notebooks.

`# %% [markdown]` starts a cell of prose, `# %%` a cell of code. A cell with `tags=["script"]` is
left out: it belongs to the script only. The outputs go into the page, and into an `.ipynb` beside
it to download.
"""

import contextlib
import functools
import io
import json
import re
import sys

import matplotlib as mpl
import matplotlib.pyplot as plt

MARKER = re.compile(r"^# %%(.*)\n", re.MULTILINE)
PLACE = "<!-- output {} -->"
INK = "#010203"
STYLE = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["Noto Sans", "sans-serif"],
    "path.simplify_threshold": 0.5,
    "legend.facecolor": "none",
    # Texts and lines that ask for no color get that of the page.
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), INK),
}


def cells(source):
    """(kind, text) of each cell, without those of the script."""
    _, *parts = MARKER.split(source)
    found = []
    for title, text in zip(parts[::2], parts[1::2], strict=True):
        if '"script"' in title:
            continue
        if "[markdown]" in title:
            text = re.sub(r"^# ?", "", text, flags=re.MULTILINE)
            found.append(("markdown", text.strip()))
        else:
            found.append(("code", text.strip("\n")))
    return found


@functools.cache
def run(source):
    """(kind, text, outputs) of each cell. An output is a pair of a MIME type and text."""
    shown = []
    names = {"__name__": "__main__", "display": lambda value: shown.append(_output(value))}
    done = []
    plt.switch_backend("Agg")
    with mpl.rc_context(STYLE):
        for kind, text in cells(source):
            shown.clear()
            printed = io.StringIO()
            if kind == "code":
                with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
                    exec(compile(text, "<cell>", "exec"), names)
            outputs = [("text/plain", printed.getvalue())] if printed.getvalue() else []
            done.append((kind, text, outputs + shown[:]))
    plt.close("all")
    return done


def markdown(source):
    """The cells as Markdown, with a place for each output."""
    number, parts = 0, []
    for kind, text, outputs in run(source):
        parts.append(text if kind == "markdown" else f"```python\n{text}\n```")
        for mime, output in outputs:
            if mime == "text/plain":
                parts.append(f"```text\n{output.rstrip()}\n```")
            else:
                parts.append(PLACE.format(number))
                number += 1
    return "\n\n".join(parts)


def with_outputs(html, source):
    """The page with its outputs in their places."""
    rich = [o for _, _, outputs in run(source) for o in outputs if o[0] != "text/plain"]
    for number, (mime, output) in enumerate(rich):
        if mime == "image/svg+xml":
            output = _inline(output, number)
        block = f'<div class="output" data-search-exclude>{output}</div>'
        html = html.replace(PLACE.format(number), block)
    return html


def ipynb(title, source):
    """The notebook as JSON."""
    made = [{"cell_type": "markdown", "metadata": {}, "source": f"# {title}"}]
    for kind, text, outputs in run(source):
        cell = {"cell_type": kind, "metadata": {}, "source": text}
        if kind == "code":
            cell |= {"execution_count": None, "outputs": [_nbformat(*o) for o in outputs]}
        made.append(cell)
    for number, cell in enumerate(made):
        cell["id"] = f"cell{number}"
    language = {"name": "python", "version": sys.version.split()[0]}
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    metadata = {"kernelspec": kernel, "language_info": language}
    return json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": metadata, "cells": made})


def _output(value):
    if isinstance(value, mpl.figure.Figure):
        file = io.StringIO()
        value.savefig(file, format="svg", transparent=True, metadata={"Date": None})
        return "image/svg+xml", file.getvalue()
    if hasattr(value, "_repr_html_"):
        return "text/html", value._repr_html_()
    return "text/plain", repr(value)


def _inline(svg, number):
    """A picture in the colors of the page, whose identifiers are unique on it."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = svg.replace(INK, "currentColor")
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\1n{number}-", svg)
    wide = float(re.search(r'width="([\d.]+)pt"', svg)[1]) > 600
    return svg.replace("<svg ", '<svg class="wide" ' if wide else "<svg ", 1)


def _nbformat(mime, output):
    if mime == "text/plain":
        return {"output_type": "stream", "name": "stdout", "text": output}
    if mime == "image/svg+xml":
        # Other pages than ours have no color that fits both palettes.
        output = output.replace("<svg ", '<svg style="background: white" ', 1)
    return {"output_type": "display_data", "metadata": {}, "data": {mime: output}}
