"""Hooks of the build, which `mkdocs.yml` names."""

import re
import sys
from pathlib import Path

import slalom as sl

sys.path.append(str(Path(__file__).parent))
import schedule_curves
import valley

ERROR = re.compile(r'<div class="language-text highlight">(?=<pre>(?:<[^>]+>)*[\w.]+Error: )')
NAMES = re.compile(
    r"<(?P<tag>a|autoref|pre|h[1-6])\b.*?</(?P=tag)>|<code>sl\.(?P<name>[\w.]+)(?:\([^<]*\))?</code>",
    re.DOTALL,
)
CELL = re.compile(r"<td\b.*?</td>", re.DOTALL)
CODE = re.compile(r"<code>[^<]*</code>")


ROOT = Path(__file__).parents[2]
SOURCE = '<details class="mkdocstrings-source"'


def on_config(config):
    """Leaves the links to the repository out where its address is not known."""
    if not config["repo_url"]:
        config["edit_uri"] = None
    return config


def on_page_markdown(markdown, page, **_):
    """Shows a file of the repository, with its links changed to lead to the pages."""
    name = page.meta.get("include")
    if name is None:
        return markdown
    return re.sub(r"\]\(docs/", "](../", (ROOT / name).read_text())


def on_page_content(html, page=None, **_):
    """Links public names to the reference, and lets error messages and names in tables wrap."""
    # The source of an entry can be unfolded, but is not searched.
    html = html.replace(SOURCE, f"{SOURCE} data-search-exclude")
    html = ERROR.sub('<div class="language-text highlight wrapped">', html)
    html = NAMES.sub(_link, html)
    html = CELL.sub(lambda cell: CODE.sub(_breakable, cell[0]), html)
    where = "" if page is None else page.file.src_uri
    if where == "choosing.md":
        html = html.replace(valley.PLACE, valley.figure())
    return schedule_curves.add(html) if where == "api/schedules.md" else html


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
