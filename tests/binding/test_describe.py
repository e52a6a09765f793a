"""Tables and trees of optimizers: plain text, rich and HTML."""

import io
import re
import sys
from html.parser import HTMLParser

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl
from table import rows

B = sl.where.path("b")
EVIL = "<script>alert('&')</script>"


def params():
    return {"b": jnp.ones(2), "w": jnp.ones((3, 2)), "n": jnp.arange(4)}


def bound(tx=None, **options):
    return sl.Optimizer(sl.adam(0.1) if tx is None else tx, params(), **options)


class Checker(HTMLParser):
    """The tags and the text of a piece of HTML. Raises an error if they are not nested."""

    def __init__(self, html):
        super().__init__()
        self.open, self.tags, self.texts = [], [], []
        self.feed(html)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.texts.append(data)

    @property
    def text(self):
        return " ".join(self.texts)


# --- totals -----------------------------------------------------------------------------------


def test_totals_count_parameters_and_bytes():
    totals = bound(trainable=~B).describe(params()).totals
    assert (totals.arrays, totals.parameters, totals.trainable) == (3, 12, 6)
    assert (totals.parameter_bytes, totals.trainable_bytes) == (48, 24)
    # Two moments, and the age that all parameters share.
    assert (totals.state_bytes, totals.shared_state_bytes) == (2 * 24 + 4, 4)


@pytest.mark.parametrize(
    "tx",
    [
        sl.sgd(0.1),
        sl.adam(0.1).every_k(2),
        sl.adam(0.1).flatten(),
        sl.adafactor(0.1),
        sl.adam(0.1).partition({B: sl.sgd(0.1, momentum=0.9)}).if_finite(),
    ],
    ids=["sgd", "every_k", "flatten", "adafactor", "partition"],
)
def test_the_state_of_the_rows_and_the_shared_state_are_all_of_it(tx):
    opt = bound(tx)
    table = opt.describe(params())
    rows = sum(row["state_bytes"] for row in table.to_dict().values())
    size = sum(x.nbytes for x in jax.tree.leaves(opt.state))
    assert rows + table.totals.shared_state_bytes == table.totals.state_bytes == size


def test_the_last_line_has_the_totals():
    lines = repr(bound().describe(params())).splitlines()
    assert lines[-1] == (
        "total: 12 parameters (48 B), 8 trainable (32 B), state 68 B, of which 4 B shared"
    )
    stateless = repr(bound(sl.sgd(0.1)).describe(params())).splitlines()
    assert stateless[-1] == "total: 12 parameters (48 B), 8 trainable (32 B), state 0 B"


# --- in a terminal and in a pipe --------------------------------------------------------------


def rich_text(value, width=120, **options):
    console = pytest.importorskip("rich.console")
    stream = io.StringIO()
    console.Console(file=stream, width=width, **options).print(value)
    return stream.getvalue()


def test_rich_prints_a_table():
    text = rich_text(bound(sl.adamw(0.1)).describe(params()))
    rows = [line.split() for line in text.splitlines() if line.strip()]
    assert ["path", "array", "rate", "decay", "bytes", "transform"] in rows
    (row,) = [row for row in rows if row[:1] == ["w"]]
    assert row[:2] == ["w", "float32[3,2]"]
    assert "scale_by_adam" in row
    assert any(row[0] == "n" and row[-1] == "frozen" for row in rows)
    assert "total: 12 parameters" in text
    assert "group" not in text  # a column that says nothing


@pytest.mark.slow
@pytest.mark.parametrize("width", [80, 120])
def test_rich_cuts_no_path_and_no_number(width):
    model = eqx.nn.MLP(2, 1, 16, 2, key=jax.random.key(0))
    tx = sl.adamw(1e-3).partition({sl.where.path("**.bias"): sl.sgd(1e-4)}).every_k(2)
    text = rich_text(sl.Optimizer(tx, model).describe(model), width)
    assert all(len(line) <= width for line in text.splitlines())
    assert "…" not in text
    assert "0.0001" in text
    assert all(f"layers.{i}.weight" in text for i in range(3))


def test_rich_takes_brackets_literally():
    model = {"[bold]w[/bold]": jnp.ones(2)}
    assert "[bold]w[/bold]" in rich_text(sl.Optimizer(sl.sgd(0.1), model).describe(model))


def test_show_prints_plain_text_to_a_pipe(capsys):
    table = bound().describe(params())
    table.show()
    assert capsys.readouterr().out == f"{table!r}\n" == f"{table}\n"


def test_show_prints_a_table_to_a_terminal(capsys, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("FORCE_COLOR", "1")  # what makes rich believe that it is in a terminal
    table = bound().describe(params())
    table.show()
    assert "\x1b[" in capsys.readouterr().out


def test_show_needs_no_rich(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    table = bound().describe(params())
    table.show()
    assert capsys.readouterr().out == f"{table}\n"


# --- in a notebook ----------------------------------------------------------------------------


def test_a_table_in_a_notebook():
    page = Checker(bound().describe(params())._repr_html_())
    assert page.tags.count("tr") == 1 + 3 + 1
    assert "total: 12 parameters" in page.text
    assert "0.1" in page.text


@rows(2)
def test_every_transform_has_a_tree(row):
    page = Checker(row.tx._repr_html_())
    assert page.tags.count("details") == page.tags.count("summary") >= 1
    assert {"script", "link", "img"}.isdisjoint(page.tags)


def test_a_tree_names_the_parts_and_their_fields():
    tx = (sl.ClipByGlobalNorm(1.0) | sl.adam(0.1)).every_k(4)
    page = Checker(tx._repr_html_())
    for text in ("every_k", "EveryK", "k = 4", "clip_by_global_norm", "b1 = 0.9", "scale_by_adam"):
        assert text in page.text
    assert page.tags.count("details") == 4
    assert "links" not in page.text  # the parts have elements of their own


def test_the_tree_of_an_optimizer_has_its_state_and_the_next_values():
    opt = bound((sl.Clip(1.0) | sl.adam(sl.schedules.linear(1.0, 0.0, 4))).every_k(2))
    page = Checker(opt._repr_html_())
    assert "Optimizer" in page.text
    assert "count=0" in page.text
    assert "(next step: 1.0)" in page.text
    adam = opt.state_of("scale_by_adam")
    arrays = jax.tree.leaves(adam)
    assert f"state: {len(arrays)} arrays, {sum(x.nbytes for x in arrays)} B" in page.text
    states = [int(t.split("state: ")[1].split()[0]) for t in page.texts if "state: " in t]
    assert sum(states) == len(jax.tree.leaves(opt.state))


def test_html_escapes_what_users_wrote():
    model = {EVIL: jnp.ones(2)}
    tx = sl.named_chain(**{EVIL: sl.Clip(1.0)}) | sl.sgd(0.1).mask(sl.where.path(EVIL[:7] + "*"))
    opt = sl.Optimizer(tx, model)
    for value in (tx, opt, opt.describe(model)):
        html = value._repr_html_()
        assert "<script" not in html
        assert "alert" in Checker(html).text


def test_a_donated_and_an_abstract_optimizer_have_trees():
    def loss_fn(model):
        return jnp.sum(model["w"])

    opt = bound(sl.adam(sl.schedules.linear(1.0, 0.0, 4)))
    sl.train_step(loss_fn)(params(), opt)
    assert "donated" in Checker(opt._repr_html_()).text
    struct = {"w": jax.ShapeDtypeStruct((2,), jnp.float32)}
    assert "scale_by_adam" in Checker(sl.Optimizer(sl.adam(0.1), struct)._repr_html_()).text


def test_a_donated_optimizer_cannot_be_described():
    opt = bound()
    sl.train_step(lambda model: jnp.sum(model["w"]))(params(), opt)
    with pytest.raises(ValueError, match="This optimizer was donated to a training step"):
        opt.describe(params())


def test_numbers_and_sweeps_show_as_tables_in_a_notebook():
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
