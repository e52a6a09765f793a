"""Tables and trees of optimizers: plain text, rich and HTML."""

import io
import re
import sys
from types import SimpleNamespace
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl
from helpers import mlp
from table import rows

B = sl.where.path("b")
EVIL = "<script>alert('&')</script>"


def params():
    return {"b": jnp.ones(2), "w": jnp.ones((3, 2)), "n": jnp.arange(4)}


def bound(tx=None, **options):
    return sl.Optimizer(sl.adam(0.1) if tx is None else tx, params(), **options)


def parsed(html):
    """The tags and the texts of a piece of HTML. Raises an error if tags are not nested."""
    tree = ElementTree.fromstring(f"<div>{html.replace('<details open>', '<details>')}</div>")
    for style in tree.findall("style"):
        tree.remove(style)
    texts = [*tree.itertext()]
    return SimpleNamespace(tags=[x.tag for x in tree.iter()], texts=texts, text=" ".join(texts))


def rich_text(value, width=120, **options):
    console = pytest.importorskip("rich.console")
    stream = io.StringIO()
    console.Console(file=stream, width=width, **options).print(value)
    return stream.getvalue()


@pytest.mark.slow
def test_rich_prints_tables_and_totals_count_all_parameters_and_state():
    text = rich_text(bound(sl.adamw(0.1)).describe(params()))
    rows = [line.split() for line in text.splitlines() if line.strip()]
    assert ["path", "array", "rate", "decay", "bytes", "transform"] in rows
    (row,) = [row for row in rows if row[:1] == ["w"]]
    assert row[:2] == ["w", "float32[3,2]"]
    assert "scale_by_adam" in row
    assert any(row[0] == "n" and row[-1] == "frozen" for row in rows)
    assert "total: 12 parameters" in text
    assert "group" not in text  # a column that says nothing
    model = {"[bold]w[/bold]": jnp.ones(2)}  # brackets are taken literally
    assert "[bold]w[/bold]" in rich_text(sl.Optimizer(sl.sgd(0.1), model).describe(model))

    totals = bound(trainable=~B).describe(params()).totals
    assert (totals.arrays, totals.parameters, totals.trainable) == (3, 12, 6)
    assert (totals.parameter_bytes, totals.trainable_bytes) == (48, 24)
    # Two moments, and the age that all parameters share.
    assert (totals.state_bytes, totals.shared_state_bytes) == (2 * 24 + 4, 4)

    for tx in (
        sl.sgd(0.1),
        sl.adam(0.1).every_k(2),
        sl.adam(0.1).flatten(),
        sl.adafactor(0.1),
        sl.adam(0.1).partition({B: sl.sgd(0.1, momentum=0.9)}).if_finite(),
    ):
        opt = bound(tx)
        table = opt.describe(params())
        rows = sum(row["state_bytes"] for row in table.to_dict().values())
        size = sum(x.nbytes for x in jax.tree.leaves(opt.state))
        assert rows + table.totals.shared_state_bytes == table.totals.state_bytes == size, tx

    lines = repr(bound().describe(params())).splitlines()
    assert lines[-1] == (
        "total: 12 parameters (48 B), 8 trainable (32 B), state 68 B, of which 4 B shared"
    )
    stateless = repr(bound(sl.sgd(0.1)).describe(params())).splitlines()
    assert stateless[-1] == "total: 12 parameters (48 B), 8 trainable (32 B), state 0 B"


@pytest.mark.slow
def test_rich_cuts_no_path_and_no_number():
    model = mlp(depth=2)
    tx = sl.adamw(1e-3).partition({sl.where.path("**.bias"): sl.sgd(1e-4)}).every_k(2)
    table = sl.Optimizer(tx, model).describe(model)
    for width in (80, 120):
        text = rich_text(table, width)
        assert all(len(line) <= width for line in text.splitlines())
        assert "…" not in text
        assert "0.0001" in text
        assert all(f"layers.{i}.weight" in text for i in range(3))


def test_show_prints_a_table_to_a_terminal_and_plain_text_to_a_pipe(capsys, monkeypatch):
    table = bound().describe(params())
    table.show()
    assert capsys.readouterr().out == f"{table!r}\n" == f"{table}\n"
    pytest.importorskip("rich")
    monkeypatch.setenv("FORCE_COLOR", "1")  # what makes rich believe that it is in a terminal
    table.show()
    assert "\x1b[" in capsys.readouterr().out
    # It needs no rich.
    monkeypatch.setitem(sys.modules, "rich.console", None)
    table.show()
    assert capsys.readouterr().out == f"{table}\n"


def test_tables_of_optimizers_numbers_and_sweeps_in_a_notebook_are_escaped():
    page = parsed(bound().describe(params())._repr_html_())
    assert page.tags.count("tr") == 1 + 3 + 1
    assert "total: 12 parameters" in page.text
    assert "0.1" in page.text

    model = {EVIL: jnp.ones(2)}
    tx = sl.named_chain(**{EVIL: sl.Clip(1.0)}) | sl.sgd(0.1).mask(sl.where.path(EVIL[:7] + "*"))
    opt = sl.Optimizer(tx, model)
    for value in (tx, opt, opt.describe(model)):
        html = value._repr_html_()
        assert "<script" not in html
        assert "alert" in parsed(html).text

    opt = sl.Optimizer(sl.adam(0.1).record(), {"w": jnp.ones(2)})
    for numbers in (opt.hyperparams, opt.metrics):
        html = numbers._repr_html_()
        assert all(f"<td>{name}</td>" in html for name in numbers)
        assert html.count('<td class="slalom-number">') == len(numbers)

    losses = np.array([[[3.0], [1.0]], [[2.0], [np.nan]]])
    grid = {"learning_rate": np.array([0.1, 0.2]), "weight_decay": np.array([0.0, 1.0])}
    html = sl.SweepResult(grid, losses)._repr_html_()
    assert re.findall(r'number">([^<]*)</td></tr>', html) == ["1", "2", "3", "nan"]
    assert "sweep of 4 runs" in html


@rows()
def test_every_transform_has_a_tree(row):
    page = parsed(row.tx._repr_html_())
    assert page.tags.count("details") == page.tags.count("summary") >= 1
    assert {"script", "link", "img"}.isdisjoint(page.tags)


def test_a_tree_names_the_parts_their_fields_and_the_state():
    tx = (sl.ClipByGlobalNorm(1.0) | sl.adam(0.1)).every_k(4)
    page = parsed(tx._repr_html_())
    for text in ("every_k", "EveryK", "k = 4", "clip_by_global_norm", "b1 = 0.9", "scale_by_adam"):
        assert text in page.text
    assert page.tags.count("details") == 4
    assert "links" not in page.text  # the parts have elements of their own

    opt = bound((sl.Clip(1.0) | sl.adam(sl.schedules.linear(1.0, 0.0, 4))).every_k(2))
    page = parsed(opt._repr_html_())
    assert "Optimizer" in page.text
    assert "count=0" in page.text
    assert "(next step: 1.0)" in page.text
    adam = opt.state_of("scale_by_adam")
    arrays = jax.tree.leaves(adam)
    assert f"state: {len(arrays)} arrays, {sum(x.nbytes for x in arrays)} B" in page.text
    states = [int(t.split("state: ")[1].split()[0]) for t in page.texts if "state: " in t]
    assert sum(states) == len(jax.tree.leaves(opt.state))

    opt = bound(sl.adam(sl.schedules.linear(1.0, 0.0, 4)))
    sl.train_step(lambda model: jnp.sum(model["w"]))(params(), opt)
    assert "donated" in parsed(opt._repr_html_()).text
    for read in (lambda: opt.describe(params()), lambda: opt.state_of("scale_by_adam")):
        with pytest.raises(ValueError, match="This optimizer was donated to a training step"):
            read()
    struct = {"w": jax.ShapeDtypeStruct((2,), jnp.float32)}
    assert "scale_by_adam" in parsed(sl.Optimizer(sl.adam(0.1), struct)._repr_html_()).text
