"""The comparison of optimizers by what they learn: its runs, its data and its figures."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from benchmarks import widths
from benchmarks.learning import __main__ as learning, data, figures
from benchmarks.learning.data import Run
from benchmarks.learning.recipes import RECIPES, Recipe
from benchmarks.learning.runs import FULL, QUICK, Runs
from benchmarks.learning.tasks import TASKS, Task
from benchmarks.learning.tasks.burgers import exact

from helpers import lenient, sampled

PNG = b"\x89PNG"
PRESENT = [name for name, recipe in RECIPES.items() if recipe.exists(name)]


def slope(**changes):
    """A task whose score is the distance from 0."""
    task = Task(
        title="A slope: one number",
        score="distance",
        model=lambda key: jnp.ones(()) + 0 * jax.random.normal(key),
        batch=lambda key: None,
        loss=lambda model, batch: model**2,
        evaluate=lambda model: abs(model),
        steps=300,
    )
    return dataclasses.replace(task, **changes)


@pytest.mark.slow
def test_each_learning_rate_and_seed_is_a_run():
    with lenient():
        found = Runs(slope(rate=0.5), QUICK).train("sgd", Recipe(0.2, "sgd", constant=True))
    low, high = 0.1 * 10**-0.25, 0.1 * 10**0.25
    assert [run.rate for run in found] == pytest.approx([low, low, high, high])
    assert [run.seed for run in found] == [0, 1, 0, 1]
    # The first of 6 steps warms up.
    assert found[2].scores == pytest.approx([(1 - 2 * high) ** n for n in (1, 3, 5)])
    assert found[0].milliseconds > 0
    chosen = figures.best("sgd", found)
    assert (chosen.rate, chosen.at_edge) == (found[2].rate, True)
    assert chosen.share_to((1 - 2 * high) ** 2) == pytest.approx(2 / 3)
    assert chosen.share_to(0.0) == float("inf")


def test_stored_runs_are_whole_and_the_best_is_the_lowest_of_a_parabola():
    nan = float("nan")
    runs = [
        Run("sgd", rate, seed, 1.0, (1.0, last))
        for rate, lasts in ((1.0, (nan, nan)), (0.1, (nan, 0.5)), (0.3, (0.6, 0.4)))
        for seed, last in enumerate(lasts)
    ]
    chosen = figures.best("sgd", runs)
    assert (chosen.rate, chosen.at_edge, chosen.last) == (0.3, False, [0.6, 0.4])
    assert figures.best("sgd", runs[:4]).final == float("inf")

    rates = 2.0 ** np.arange(-8, 0)
    losses = {float(rate): 1 + (np.log2(rate) + 4.3) ** 2 for rate in rates}
    assert widths.optimum(losses) == pytest.approx(2**-4.3)
    losses[2.0**-3] = float("nan")
    assert widths.optimum(losses) == pytest.approx(2**-4.3)
    # At the edge there is nothing to fit.
    assert widths.optimum({rate: -rate for rate in losses}) == 2.0**-1
    assert widths.moved([0.1, 0.4, 0.2]) == pytest.approx(4)

    for path in data.FOLDER.glob("*.csv"):
        runs = data.read(path)
        assert path.stem in TASKS
        assert {run.optimizer for run in runs} <= set(RECIPES)
        keys = [(run.optimizer, run.rate, run.seed) for run in runs]
        assert len(set(keys)) == len(keys)
        for name in {run.optimizer for run in runs}:
            mine = [run for run in runs if run.optimizer == name]
            assert len({run.rate for run in mine}) == FULL.rates
            assert len(mine) == FULL.rates * len({run.seed for run in runs})
            assert {len(run.scores) for run in mine} == {FULL.evaluations}

    h, t, x = 1e-3, np.linspace(0.1, 0.9, 9), np.linspace(-0.9, 0.9, 9)
    u_t = (exact(t + h, x) - exact(t - h, x)) / (2 * h)
    u_x = (exact(t, x + h) - exact(t, x - h)) / (2 * h)
    u_xx = (exact(t, x + h) - 2 * exact(t, x) + exact(t, x - h)) / h**2
    np.testing.assert_allclose(u_t + exact(t, x) * u_x, 0.03 / np.pi * u_xx, atol=1e-3)


def runs_of(name, *finals, rate=0.1):
    """Runs that come down to these scores from 9, in two evaluations."""
    return [Run(name, rate, seed, 5.0, (9.0, x)) for seed, x in enumerate(finals)]


def test_the_text_says_what_the_runs_say():
    nan = float("nan")
    runs = [
        *runs_of("sgd", nan, nan, 9.5),
        *runs_of("adamw", 2.0, 3.0, 4.0),
        *runs_of("lion", 1.0, 1.5, 1.9),
        *runs_of("lamb", 2.5, 2.0, 5.0),
    ]
    result = figures.Result("slope", slope(), runs)
    assert [each.optimizer for each in result.order] == ["lion", "lamb", "adamw", "sgd"]
    assert figures.verdict(result) == (
        "By the median score, AdamW is number 3 of 4. lion is better with every seed than AdamW "
        "with any, and 1 is worse with every seed."
    )
    assert figures.table(result).splitlines()[2:] == [
        "| lion | 1.5 | 1–1.9 | 0.1 (edge) | 5 | 300 | 1.5 |",
        "| lamb | 2.5 | 2–5 | 0.1 (edge) | 5 | 300 | 1.5 |",
        "| **adamw** | 3 | 2–4 | 0.1 (edge) | 5 | 300 | 1.5 |",
        "| sgd | diverged | 9.5–diverged | 0.1 (edge) | 5 | – | – |",
    ]
    assert figures.wins([result, result]).splitlines()[2:] == [
        "| lion | 6 of 6 | 61%–100% | **0.50** | **0.50** |",
        "| **adamw** |  |  | 1 | 1 |",
        "| lamb | 2 of 6 | 10%–70% | 1.25 | 1.25 |",
        "| sgd | 0 of 6 | 0%–39% | diverged | diverged |",
    ]
    # By the closed form of Wilson's interval.
    assert figures.interval(0, 6) == pytest.approx((0, 1.96**2 / (6 + 1.96**2)))


def test_runs_survive_the_file_and_quick_ones_are_not_mixed_in(tmp_path, capsys):
    path = tmp_path / "new" / "slope.csv"
    first = [Run("sgd, slow", 0.31622776, 2, 0.123456, (1.0, 0.123456, float("nan")))]
    second = runs_of("lion", 1.0)
    data.append(path, first)
    data.append(path, second)
    assert path.read_text().splitlines() == [
        "optimizer,rate,seed,milliseconds,scores",
        '"sgd, slow",0.3162,2,0.1235,1 0.1235 nan',
        "lion,0.1,0,5,9 1",
    ]
    assert [run.cells() for run in data.read(path)] == [run.cells() for run in first + second]
    assert [each.name for each in path.parent.iterdir()] == ["slope.csv"]
    path.write_text("name,rate\n")
    with pytest.raises(ValueError, match="must have the columns optimizer, rate, seed"):
        data.read(path)

    with pytest.raises(SystemExit):
        learning.arguments(["--quick"])
    assert "--quick needs a folder of its own" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_learning_goes_on_where_the_data_end_and_writes_its_page(tmp_path, written):
    file = tmp_path / "data" / "digits.csv"
    options = ["--quick", "--tasks", "digits", "--data", str(file.parent)]
    names = ["--optimizers", "adamw;sgd with momentum"]
    with lenient():
        learning.main([*options, "--optimizers", "adamw"])
        before = file.read_text()
        learning.main([*options, *names, "--minutes", "0"])
    assert file.read_text() == before
    _, text = written(learning, *options, *names)
    assert file.read_text().startswith(before)
    assert [run.optimizer for run in data.read(file)[::4]] == ["adamw", "sgd with momentum"]
    assert "### Digits: a convolutional network" in text
    assert "| **adamw** |" in text
    for picture in ("page.png", "page-curves.png"):
        assert f"]({picture})" in text
        assert (tmp_path / picture).read_bytes().startswith(PNG)


@pytest.mark.parametrize("name", sampled(PRESENT))
def test_each_optimizer_of_the_comparison_lowers_the_loss(name):
    network = dataclasses.replace(
        slope(),
        model=lambda key: eqx.nn.MLP(2, 1, 4, 1, key=key),
        batch=lambda key: jax.random.normal(key, (8, 2)),
        loss=lambda model, x: jnp.mean((jax.vmap(model)(x)[:, 0] - x.sum(axis=1)) ** 2),
        evaluate=lambda model: jnp.abs(model(jnp.ones(2))[0] - 2),
        steps=2000,
    )
    with lenient():
        runs = Runs(network, QUICK)
        found = figures.best(name, runs.train(name, RECIPES[name]))
        start = float(np.median(runs.scores(runs.start)))
    assert found.final < start


@pytest.mark.parametrize("name", sampled(TASKS))
def test_each_task_has_a_finite_score_at_the_start(name):
    with lenient():
        task = TASKS[name]()
        assert 0.1 < float(task.evaluate(task.model(jax.random.key(0)))) < 10


@pytest.mark.exhaustive
def test_rates_over_widths_are_stored_and_drawn(tmp_path, written):
    file, picture = tmp_path / "widths.csv", tmp_path / "widths.png"
    options = ["--quick", "--rules", "adam", "--data", file, "--picture", picture]
    with lenient():
        widths.main([*map(str, options)])
    before = file.read_text()
    _, text = written(widths, *options)
    assert file.read_text() == before
    runs = data.read(file)
    assert len(runs) == 2 * 2 * 3 * 2
    # Without factors at the smallest width, and with some at the next.
    plain, factored = ([r.scores for r in runs[i : i + 6]] for i in (0, 6))
    assert plain == factored
    assert [r.scores for r in runs[12:18]] != [r.scores for r in runs[18:]]
    assert "| `sl.contrib.transfer(sl.adam(...), ...)` |" in text
    assert picture.read_bytes().startswith(PNG)
