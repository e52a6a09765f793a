"""Hooks of the build, which `mkdocs.yml` names."""

import re
import sys
from pathlib import Path

import slalom as sl

sys.path.append(str(Path(__file__).parent))
import memory
import notebooks
import schedule_curves
import times
import valley

ERROR = re.compile(r'<div class="language-text highlight">(?=<pre>(?:<[^>]+>)*[\w.]+Error: )')
NAMES = re.compile(
    r"<(?P<tag>a|autoref|pre|h[1-6])\b.*?</(?P=tag)>|<code>sl\.(?P<name>[\w.]+)(?:\([^<]*\))?</code>",
    re.DOTALL,
)
CELL = re.compile(r"<td\b.*?</td>", re.DOTALL)
CODE = re.compile(r"<code>[^<]*</code>")


ROOT = Path(__file__).parents[2]
ADDRESS = "$SLALOM_REPOSITORY"
SOURCE = '<details class="mkdocstrings-source"'
PICTURES = {
    "choosing.md": (valley.PLACE, valley.figure),
    "guides/schedules.md": (schedule_curves.GUIDE_PLACE, schedule_curves.in_the_guide),
    "guides/sharding.md": (memory.DEVICES_PLACE, memory.devices),
    "guides/memory.md": (memory.CODECS_PLACE, memory.codecs),
}
"""The place of a picture on a page, and what draws it."""
DRAWN_TIMES = {"index.md": times.times_at_home, "performance.md": times.times}


def on_config(config):
    """Leaves the links to the repository out where its address is not known."""
    if not config["repo_url"]:
        config["edit_uri"] = None
    return config


def on_page_markdown(markdown, page, config, **_):
    """Shows a notebook, or a file of the repository with links that lead to the pages."""
    markdown = with_address(markdown, config["repo_url"])
    if "notebook" in page.meta:
        return "\n\n".join([markdown, _ways_to_run(page), notebooks.markdown(_source(page))])
    name = page.meta.get("include")
    if name is None:
        return markdown
    text = (ROOT / name).read_text().replace("](CONTRIBUTING.md", "](contributing.md")
    return re.sub(r"\]\(docs/", "](../", text)


def with_address(markdown, address):
    """Puts in the address of the repository. Lines that need it are left out if it is not set."""
    if address:
        return markdown.replace(ADDRESS, address)
    return "".join(line for line in markdown.splitlines(keepends=True) if ADDRESS not in line)


def _ways_to_run(page):
    script = Path(page.meta["notebook"])
    return (
        "This page was run when the site was built. "
        f'<a href="{script.stem}.ipynb" download>Download the notebook</a>, or run the script: '
        f"`python {script}`."
    )


def _source(page):
    return (ROOT / page.meta["notebook"]).read_text()


def on_post_page(output, page, **_):
    """Writes the notebooks to download beside their pages."""
    if "notebook" in page.meta:
        path = Path(page.file.abs_dest_path).parent / f"{Path(page.meta['notebook']).stem}.ipynb"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(notebooks.ipynb(page.title, _source(page)))
    return output


def on_page_content(html, page=None, **_):
    """Links public names to the reference, and lets error messages and names in tables wrap."""
    # The source of an entry can be unfolded, but is not searched.
    html = html.replace(SOURCE, f"{SOURCE} data-search-exclude")
    html = ERROR.sub('<div class="language-text highlight wrapped">', html)
    html = NAMES.sub(_link, html)
    html = CELL.sub(lambda cell: CODE.sub(_breakable, cell[0]), html)
    if page is not None and "notebook" in page.meta:
        html = notebooks.with_outputs(html, _source(page))
    where = "" if page is None else page.file.src_uri
    if where in PICTURES:
        place, draw = PICTURES[where]
        html = html.replace(place, draw())
    if where in DRAWN_TIMES:
        html = times.PICTURE.sub(lambda _: DRAWN_TIMES[where](), html)
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
