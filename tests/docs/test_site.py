"""The documentation site: what it must contain, and the check of what was built."""

import functools
import importlib
import importlib.util
import json
import re
from collections import Counter
from pathlib import Path

import equinox as eqx
import pytest

import slalom as sl
from public_api import MODULES, public_objects
from slalom._core.methods.fluent import FLUENT

ROOT = Path(__file__).parents[2]
API = sorted((ROOT / "docs" / "api").rglob("*.md"))


def tool(name):
    """A module of `docs/_tools`, which is no package."""
    tools = str(ROOT / "docs" / "_tools")
    spec = importlib.util.spec_from_file_location(name, f"{tools}/{name}.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tools)  # for what it imports from beside it
        spec.loader.exec_module(module)
    return module


# (name, options, page) of every entry of the reference.
ENTRIES = [
    (*entry, page.name)
    for page in API
    for entry in re.findall(r"^::: (\S+)\n((?: +.*\n)*)", page.read_text(), re.MULTILINE)
]


def test_every_public_name_and_method_is_on_one_page_and_every_entry_exists():
    for name in MODULES:
        assert importlib.import_module(f"slalom.{name}") is getattr(sl, name)

    names = [name for name, _ in public_objects()]
    count = Counter(name for name, *_ in ENTRIES)
    methods = [f"slalom.AbstractTransform.{name}" for name in FLUENT if name[0] != "_"]
    assert not [name for name in (*names, *methods) if count[name] == 0], "not in docs/api"
    assert not [name for name, times in count.items() if times > 1], "several times in docs/api"

    missing = []
    for name, options, page in ENTRIES:
        owner = functools.reduce(lambda x, part: getattr(x, part, None), name.split(".")[1:], sl)
        known = {*dir(owner), *getattr(owner, "__dataclass_fields__", {})}
        members = re.findall(r"^ +- (\w+)$", options.partition("members:\n")[2], re.MULTILINE)
        missing += [f"{page}: {name}.{member}" for member in members if member not in known]
        missing += [f"{page}: {name}"] if owner is None else []
    assert missing == []

    (options,) = [options for name, options, _ in ENTRIES if name == "slalom.Optimizer"]
    listed = set(re.findall(r"^ +- (\w+)$", options, re.MULTILINE))
    public = {name for name in dir(sl.Optimizer) if name[0] != "_"}
    assert listed == public - {*dir(eqx.Module), "binding", "arrays"}


def test_every_page_is_in_the_navigation_once_by_its_title():
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    listed = Counter(re.findall(r": (\S+\.md)$", nav, re.MULTILINE))
    docs = ROOT / "docs"
    assert set(listed) == {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")}
    assert set(listed.values()) == {1}
    for label, page in re.findall(r"- ([^:\n]+): (\S+\.md)$", nav, re.MULTILINE):
        title = re.search(r"^# (.*)$", (docs / page).read_text(), re.MULTILINE)
        assert title, f"{page} has no title"
        assert title[1] == label, page


FORMULAS = {
    "mₜ₋₁": "<msub><mi>m</mi><mi>t</mi><mo>−</mo><mn>1</mn></msub>",
    "β₂ᵗ": "<msubsup><mi>β</mi><mn>2</mn><mi>t</mi></msubsup>",
    "√(v + ε)": "<msqrt><mi>v</mi><mo>+</mo><mi>ε</mi></msqrt>",
    "a·b / (c + d)": "<mfrac><mi>a</mi><mo>·</mo><mi>b</mi><mi>c</mi><mo>+</mo><mi>d</mi></mfrac>",
    "a + b / c": "<mi>a</mi><mo>+</mo><mfrac><mi>b</mi><mi>c</mi></mfrac>",
    "a / b·c": "<mfrac><mi>a</mi><mi>b</mi></mfrac><mo>·</mo><mi>c</mi>",
    "a / max(1, b)": "<mfrac><mi>a</mi><mi>max</mi>"
    '<mo form="prefix" fence="true" stretchy="false">(</mo>'
    '<mn>1</mn><mo separator="true">,</mo><mi>b</mi>'
    '<mo form="postfix" fence="true" stretchy="false">)</mo></mfrac>',
    "x^−c": "<msup><mi>x</mi><mo>−</mo><mi>c</mi></msup>",
    "v̂": '<mover accent="true"><mi>v</mi><mo stretchy="false">^</mo></mover>',
    "decay_rate": '<mtext class="name">decay_rate</mtext>',
}


def test_the_hooks_write_mathml_link_public_names_and_let_lines_break():
    convert = tool("formulas").to_mathml
    made = {f: re.sub(r"<math[^>]*>|</math>|</?mrow>", "", convert(f)) for f in FORMULAS}
    assert made == FORMULAS

    convert = tool("hooks").on_page_content
    assert convert(f"<p>{NAME}</p>") == f"<p>{LINK}</p>"
    broken = "<td><code>a.<wbr>b_<wbr>c</code> d.e</td>"
    assert convert(broken.replace("<wbr>", "")) == broken
    for kept in (
        f'<a href="x">{NAME}</a>',
        "<code>sl.nothing</code>",
        "<h2><code>sl.adam</code></h2>",
        "<p><code>a.b_c</code></p>",
        "<td><code>sl.nothing(0.1)</code></td>",
    ):
        assert convert(kept) == kept
    block = '<div class="language-text highlight"><pre><span></span><code>{}</code></pre></div>'
    assert "wrapped" in convert(block.format("ValueError: a long line"))
    assert "wrapped" not in convert(block.format("path  dtype  shape"))


NAME = "<code>sl.schedules.linear(1.0, 0.0, 10)</code>"
LINK = f'<autoref identifier="slalom.schedules.linear" optional>{NAME}</autoref>'


GOOD = {
    "index.html": '<h1 id="top">A</h1><a href="b/#here">b</a><a href=".">home</a>'
    '<link rel="stylesheet" href="site.css"><a href="https://arxiv.org">paper</a>',
    "b/index.html": '<h2 id="here">B</h2><a href="..">home</a>',
    "site.css": '/* url("https://example.org/comment") */ @font-face { src: url("font.woff2") }',
    "font.woff2": "",
}


def faults(folder, **changed):
    names = {"home": "index.html", "page": "b/index.html", "style": "site.css"}
    for name, text in {**GOOD, **{names[key]: text for key, text in changed.items()}}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "search").mkdir()
    index = {"docs": [{"location": ""}, {"location": "b/#here"}]}
    (folder / "search" / "search_index.json").write_text(json.dumps(index))
    return tool("check_site").check(folder)


FAULTS = [
    ("page", '<script src="https://cdn.org/x.js"></script>', "from another host"),
    ("page", '<img src="//cdn.org/x.png">', "from another host"),
    ("page", "<style>@import 'https://cdn.org/x.css'</style>", "from another host"),
    ("style", "a { background: url(https://cdn.org/x.png) }", "from another host"),
    ("page", '<link rel="stylesheet" href="https://cdn.org/x.css">', "from another host"),
    ("style", "a { background: url(no.png) }", "loads no.png, which does not exist"),
    ("page", '<h2 id="here"></h2><a href="../no/">no</a>', "which does not exist"),
    ("page", "<h2>B</h2>", "no such anchor"),
    ("home", "<h1>A</h1>", "is not in the navigation"),
]


def test_a_good_site_has_no_faults_and_each_fault_is_found(tmp_path):
    assert faults(tmp_path / "good") == []
    for i, (place, text, fault) in enumerate(FAULTS):
        found = faults(tmp_path / str(i), **{place: text})
        assert any(fault in line for line in found), text


def test_queries_curves_and_notebooks_lead_to_what_exists():
    pairs = tool("check_search").PAIRS
    assert len(pairs) >= 20
    for page in pairs.values():
        assert (ROOT / "docs" / f"{page.rstrip('/') or 'index'}.md").exists()

    drawn = {type(schedule).__name__ for schedule in tool("schedule_curves").CURVES}
    page = (ROOT / "docs/api/schedules.md").read_text()
    for name in re.findall(r"^::: slalom\.schedules\.([a-z_]+)$", page, re.MULTILINE):
        assert name in drawn or name == "join"

    pages = "\n".join(path.read_text() for path in (ROOT / "docs/examples").glob("*.md"))
    scripts = re.findall(r"^notebook: (\S+)$", pages, re.MULTILINE)
    assert len(scripts) >= 3
    for script in scripts:
        assert len(tool("notebooks").cells((ROOT / script).read_text())) > 5


NOTEBOOK = """# %%
import matplotlib.pyplot as plt

# %% tags=["script"]
raise SystemExit("this is for the script only")

# %% [markdown]
# ## A title
#
# Some prose.

# %%
figure, axes = plt.subplots()
axes.plot([1, 2])
print("printed")
display(figure)
display([1, 2])
"""


def test_a_notebook_shows_what_its_cells_show():
    notebooks = tool("notebooks")
    page = notebooks.markdown(NOTEBOOK)
    assert "## A title\n\nSome prose." in page
    assert "```text\nprinted\n```" in page
    assert "```text\n[1, 2]\n```" in page
    assert "script" not in page
    shown = notebooks.with_outputs(page, NOTEBOOK)
    assert shown.count("<svg") == 1
    assert notebooks.PLACE.format(0) not in shown
    assert "fill: currentColor" in shown
    assert notebooks.INK not in shown

    # And as a download.
    made = json.loads(notebooks.ipynb("A page", NOTEBOOK))
    kinds = [cell["cell_type"] for cell in made["cells"]]
    assert kinds == ["markdown", "code", "markdown", "code"]
    outputs = made["cells"][-1]["outputs"]
    assert [output["output_type"] for output in outputs] == ["stream", "display_data", "stream"]
    assert "image/svg+xml" in outputs[1]["data"]


def test_bars_times_and_pictures_are_those_of_the_tables():
    rows = [("a", [("4", [(0, 4.0)])]), ("b", [("2", [(0, 1.0), (1, 1.0)])])]
    shown = tool("bars").figure(rows, "title", ("x", "y"))
    assert [float(w) for w in re.findall(r"width:([\d.]+)%", shown)] == [78.0, 19.5, 19.5]

    found = dict(tool("times").ratios())
    assert len(found) > 10
    assert all(ratios[0] is not None for ratios in found.values())
    assert sum(x is not None for x in found["AdamW"]) == 3

    for name, page in {"codecs": "memory", "devices": "sharding"}.items():
        text = (ROOT / "docs/guides" / f"{page}.md").read_text()
        assert getattr(tool("memory"), f"{name.upper()}_PLACE") in text
