"""The pages for users of Optax and PyTorch name everything those libraries have, and run."""

import functools
import importlib
import inspect
import itertools
import pkgutil
import re
import runpy
import types
from collections import Counter, defaultdict
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slalom as sl
from helpers import nested_dict

ROOT = Path(__file__).parents[2]
GENERATE = ROOT / "docs" / "migration" / "generate.py"
generate = types.SimpleNamespace(**runpy.run_path(str(GENERATE)))
LIBRARIES = list(generate.PAGES)
ROWS = {
    library: [row for table in generate.tables(library) for row in table.rows]
    for library in LIBRARIES
}


def public(module):
    return [name for name in dir(module) if not name.startswith("_")]


def optax_names():
    """Every public name of Optax, without the other names of one object.

    The same object under the same last name counts once, under its shortest path; so does
    `optax.tree_utils.tree_add`, which is `optax.tree.add`.
    """
    modules = [optax]
    for found in pkgutil.iter_modules(optax.__path__):
        if not found.name.startswith("_") and not found.name.endswith("_test"):
            modules.append(importlib.import_module(f"optax.{found.name}"))
    paths = defaultdict(list)
    for module in modules:
        for name in public(module):
            value = getattr(module, name)
            # A module of experiments counts as one name. All others were imported above.
            if isinstance(value, types.ModuleType) and module.__name__ != "optax.experimental":
                continue
            paths[name.removeprefix("tree_"), id(value)].append(f"{module.__name__}.{name}")
    return {min(found, key=lambda p: (p.count("."), len(p), p)) for found in paths.values()}


def torch_names(torch):
    """Every public name that the page promises."""
    optim = torch.optim
    methods = [n for n in public(optim.Optimizer) if callable(getattr(optim.Optimizer, n))]
    names = {
        "torch.optim": [n for n in optim.__all__ if inspect.isclass(getattr(optim, n))],
        "torch.optim.lr_scheduler": optim.lr_scheduler.__all__,
        "torch.optim.swa_utils": optim.swa_utils.__all__,
        "torch.nn.utils": [n for n in public(torch.nn.utils) if n[:9] == "clip_grad" != n],
        # Two annotations, which are attributes of instances.
        "Optimizer": [n for n in (*methods, "state", "param_groups") if n.islower()],
    }
    others = ("optim.swap_in_optimizer_params_and_state", "nn.utils.get_total_norm")
    names["torch"] = [*others, "amp.GradScaler"]
    return {f"{module}.{name}" for module, listed in names.items() for name in listed}


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
def test_no_name_is_missing_stale_or_listed_twice(library):
    if library == "optax":
        expected = optax_names()
    else:
        torch = pytest.importorskip("torch", reason="torch is not installed")
        expected = torch_names(torch)
    listed = Counter(name for row in ROWS[library] for name in row.names)
    assert expected - set(listed) == set(), "are missing"
    assert set(listed) - expected == set(), "are stale"
    assert [name for name, count in listed.items() if count > 1] == []


@functools.cache
def namespace():
    """What the code of the tables is about."""

    def loss_fn(model, x):
        return jnp.sum(model(x) ** 2)

    def f(x):
        return jnp.sum(x["w"] ** 2)

    def condition(context, updates):
        return context.step < 10

    def factor(n):
        return 1 / (n + 1)

    def fn(*given):
        return given[0]

    key = jax.random.key(0)
    model = eqx.nn.MLP(2, 1, 4, 1, key=key)
    params = new = old = eqx.filter(model, eqx.is_inexact_array)
    grads = updates = jax.tree.map(jnp.ones_like, params)
    x = y = v = {"w": jnp.ones(3)}
    tx, other = sl.adam(1e-3), sl.sgd(0.1)
    state, opt = tx.init(params), sl.Optimizer(tx.record(), model)
    context, where = sl.Context(step=0), sl.where.ndim(min=2)
    labels = {where: "a", ~where: "b"}
    schedule, plateau = sl.schedules.linear(1.0, 0.0, 10), sl.schedules.ReduceOnPlateau(1e-3)
    lr, steps, b1, age = 1e-3, 3, jnp.float32(0.9), jnp.array(3, jnp.int32)
    return globals() | locals()


OURS = re.compile(r"(sl|tx|opt|jax|jnp|eqx|optax)\.")


@pytest.mark.slow
def test_all_code_in_the_tables_runs():
    def run(code):
        eval(code, dict(namespace()))

    for row in itertools.chain(*ROWS.values()):
        in_remarks = [code for code in generate.code(row.differs) if OURS.match(code)]
        for code in [*generate.code(row.slalom), *in_remarks]:
            try:
                # Traced, because nothing needs to be compiled to see whether it runs.
                jax.eval_shape(functools.partial(run, code))
            except Exception as error:
                raise AssertionError(f"{row.names[0]}: `{code}` raises {error!r}") from error


def test_rows_say_what_to_do_and_pages_what_the_generator_writes():
    said = ("not yet", "use optax", "use jax", "use torch")
    for row in itertools.chain(*ROWS.values()):
        written = bool(generate.code(row.slalom)) or row.slalom in said
        assert written or (row.slalom == "" and row.differs), row.names

    for row in [row for row in ROWS["optax"] if not row.names[0].endswith("State")]:
        for code in generate.code(row.slalom):
            function = code.partition("(")[0]
            if re.fullmatch(r"sl(\.\w+)+", function):
                text = inspect.getdoc(functools.reduce(getattr, function.split(".")[1:], sl)) or ""
                differs = re.search(r"Differs\s+from\s+Optax", text)
                assert row.differs or not differs, f"{row.names[0]}: {function} differs from Optax"

    for library, page in generate.PAGES.items():
        assert page.read_text() == generate.page(library), "run python docs/migration/generate.py"

    # A rule that Slalom gains needs a new row: its name is no longer `not yet`.
    ours = {name.lower() for name in (*dir(sl), *dir(sl.contrib))}
    for name in [name for row in ROWS["optax"] if row.slalom == "not yet" for name in row.names]:
        last = name.rpartition(".")[2].replace("_", "").lower()
        assert last not in ours, f"{name} exists: say so in docs/migration/optax"


CALLS = [row for row in ROWS["torch"] if row.call]
OPTIMIZERS = [row for row in CALLS if "lr_scheduler" not in row.names[0]]
SCHEDULERS = [row for row in CALLS if "lr_scheduler" in row.names[0]]


def last(row):
    return row.names[0].rpartition(".")[2]


@pytest.mark.slow
@pytest.mark.parametrize("row", [pytest.param(row, id=last(row)) for row in OPTIMIZERS])
def test_optimizers_walk_the_path_of_their_calls(row):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    ours = nested_dict(jax.random.key(0))
    gradients = [nested_dict(jax.random.key(seed)) for seed in range(1, 6)]
    params = [torch.tensor(np.asarray(x), requires_grad=True) for x in jax.tree.leaves(ours)]
    known = {**vars(torch.optim), "params": params, "lr": 1e-3}
    theirs = eval(row.call, known)
    opt = sl.Optimizer(eval(generate.code(row.slalom)[0], dict(namespace())), ours)
    start = ours
    for grads in gradients:
        ours, opt = opt.step(ours, grads)
        for param, g in zip(params, jax.tree.leaves(grads), strict=True):
            param.grad = torch.tensor(np.asarray(g))
        theirs.step()
    for first, own, param in zip(*map(jax.tree.leaves, (start, ours)), params, strict=True):
        moved = np.abs(np.asarray(own - first)).max()
        np.testing.assert_allclose(own, param.detach().numpy(), atol=1e-3 * moved)


@pytest.mark.slow
def test_schedules_have_the_values_of_their_calls():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    known, steps = namespace(), np.arange(50)
    for row in SCHEDULERS:
        ours = jax.vmap(eval(generate.code(row.slalom)[0], known))(steps)
        lr = 0.1 if last(row) == "CyclicLR" else known["lr"]
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr)
        names = {**vars(torch.optim.lr_scheduler), "optimizer": optimizer, "lr": lr}
        theirs = eval(row.call, {**names, "factor": known["factor"]})
        expected = []
        for _ in steps:
            expected.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            theirs.step()
        np.testing.assert_allclose(ours, expected, rtol=1e-4, err_msg=last(row))


@pytest.mark.slow
def test_the_loop_in_pytorch_runs():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    (loop,) = re.findall(r"^```py\n(.*?)^```$", generate.PAGES["torch"].read_text(), re.M | re.S)
    model = torch.nn.Linear(2, 1)
    x = torch.ones(4, 2)

    def loss_fn(model, x, y):
        return torch.mean((model(x) - y) ** 2)

    before = loss_fn(model, x, 2.0).item()
    exec(loop, {"torch": torch, "model": model, "loss_fn": loss_fn, "batches": [(x, 2.0)] * 10})
    assert loss_fn(model, x, 2.0).item() < before


def test_the_figures_of_the_home_page_are_those_of_the_benchmarks():
    """The home page and the README show times that `python -m benchmarks` has measured."""
    page = (ROOT / "docs" / "performance.md").read_text()
    section = page.partition("### GPT-2 small: ")[2]
    times, costs = ({}, {})
    for line in section.partition("\n### ")[0].splitlines():
        name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        if "×" in line:
            times[name] = re.findall(r"([\d.]+)×", line)
        elif "%" in line:
            costs[name] = cells
    scratch, compilation = costs["clip, AdamW"], costs["AdamW"]
    home = (ROOT / "docs" / "index.md").read_text()
    for row in (
        "| 1 | {}× the time |".format(*times["AdamW every 4, idle step"]),
        "| 1 | {}× the time | {}× fused, {}× foreach |".format(*times["AdamW"]),
        f"| 1 | {times['clip, AdamW'][0]}× the time |",
        f"| {scratch[0]} of the parameters | {scratch[1]} |",
        f"| {compilation[4]} s | {compilation[5]} s |",
    ):
        assert row in home, f"docs/performance.md was measured again: write {row} in docs/index.md"
    for ratio in (times["clip, AdamW"][0], times["AdamW"][0]):
        assert f" {ratio}×" in (ROOT / "README.md").read_text()
