"""Hooks of the build, which `mkdocs.yml` names."""

import re

import slalom as sl

ERROR = re.compile(r'<div class="language-text highlight">(?=<pre>(?:<[^>]+>)*[\w.]+Error: )')
NAMES = re.compile(
    r"<(?P<tag>a|autoref|pre|h[1-6])\b.*?</(?P=tag)>|<code>sl\.(?P<name>[\w.]+)(?:\([^<]*\))?</code>",
    re.DOTALL,
)
CELL = re.compile(r"<td\b.*?</td>", re.DOTALL)
CODE = re.compile(r"<code>[^<]*</code>")


def on_page_content(html, **_):
    """Links public names to the reference, and lets error messages and names in tables wrap."""
    html = ERROR.sub('<div class="language-text highlight wrapped">', html)
    html = NAMES.sub(_link, html)
    return CELL.sub(lambda cell: CODE.sub(_breakable, cell[0]), html)


def _breakable(code):
    """A name that may continue on the next line after a dot or an underscore."""
    return re.sub(r"(?<=\w)(?<!\bsl)(?<!\btx)(?<!\bopt)([._])(?=[A-Za-z])", r"\1<wbr>", code[0])


def _link(match):
    name = match["name"]
    if name is None or not _exists(name):
        return match[0]
    return f'<autoref identifier="slalom.{name}" optional>{match[0]}</autoref>'


def _exists(name):
    value = sl
    for part in name.split("."):
        value = vars(value).get(part) if hasattr(value, "__dict__") else None
    return value is not None
