"""The benchmarks run, count what they say they count, and compare. Nothing is timed here."""

import copy
import dataclasses
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from benchmarks import (
    __main__ as main,
    checkpoint,
    codec_peers,
    codecs,
    curvature,
    docs,
    donation,
    gpu,
    gradient_memory,
    loops,
    many_leaves,
    matrices,
    measure,
    precision,
    report,
    same_bits,
    several_losses,
    stacked_layers,
    torch_rival,
    widths,
)
from benchmarks.learning import __main__ as learning, data, figures
from benchmarks.learning.data import Run
from benchmarks.learning.recipes import RECIPES, Recipe
from benchmarks.learning.runs import FULL as FULL_RUNS, QUICK as QUICK_RUNS, Runs
from benchmarks.learning.tasks import TASKS, Task
from benchmarks.learning.tasks.burgers import exact
from benchmarks.rows import ROWS
from benchmarks.shapes import FULL, QUICK, TINY

import slalom as sl
from helpers import lenient

ENTRY = {
    "shape": str,
    "key": str,
    "row": str,
    "leaves": int,
    "parameters": int,
    "parameter_bytes": int,
    "bytes_per_second": float,
    "limit_bytes_per_parameter": float,
    "target": float,
    "scratch_target": float,
    "ratios": dict,
    "contenders": dict,
}
COST = {"trace_s", "compile_s", "scratch_bytes", "peak_bytes", "fusions", "copies"}
TIMED = {"seconds", "ns_per_parameter", "share_of_limit"}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A run on a tiny tree, with its files and a page."""
    folder = tmp_path_factory.mktemp("benchmarks")
    page = folder / "page.md"
    page.write_text(f"# Title\n\nbefore\n\n{docs.BEGIN}\nold\n{docs.END}\n\nafter\n")
    files = {"json": folder / "now.json", "docs": page}
    options = [part for name, path in files.items() for part in (f"--{name}", str(path))]
    with lenient():
        main.main(["--tiny", "--repetitions", "4", "--rows", "every 4", "--no-torch", *options])
    return json.loads(files["json"].read_text()), page


@pytest.mark.slow
def test_the_json_says_what_was_measured_and_on_what(measured):
    made, _ = measured
    assert made["schema"] == report.SCHEMA
    assert set(made["machine"]["versions"]) >= {"jax", "jaxlib", "optax", "equinox", "slalom"}
    assert [entry["row"] for entry in made["steps"]] == [
        "AdamW every 4",
        "AdamW every 4, idle step",
    ]
    for entry in made["steps"]:
        assert set(entry) == set(ENTRY)
        for name, kind in ENTRY.items():
            assert isinstance(entry[name], (int, float) if kind is float else kind), name
        assert set(entry["contenders"]) == {"slalom", "optax"}
        for contender in entry["contenders"].values():
            assert set(contender) == COST | TIMED
        for taken in (entry["ratios"]["optax"], entry["contenders"]["slalom"]["seconds"]):
            assert 0 < taken["low"] <= taken["median"] <= taken["high"]


def test_the_docs_get_tables_and_a_chart_between_the_marks(measured):
    made, page = measured
    text = page.read_text()
    assert text.startswith(f"# Title\n\nbefore\n\n{docs.BEGIN}\n")
    assert text.endswith(f"{docs.END}\n\nafter\n")
    assert "\nold\n" not in text
    assert "| AdamW every 4, idle step |" in text
    assert "![Time relative to Slalom](page.png)" in text
    assert page.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    docs.write(made, page, "page.png")
    assert page.read_text() == text


def test_a_page_without_marks_is_refused(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("nothing")
    with pytest.raises(ValueError, match="must have one line"):
        docs.write({}, page, "page.png")


@pytest.mark.slow
def test_donation_is_measured_for_each_choice():
    rows = donation.measure({"w": jnp.ones((8, 8))}, 8, 4)
    assert [row["donate"] for row in rows] == ["all", "opt", "False"] * 3
    spent = [row["bytes_per_parameter"] for row in rows]
    assert spent[0] < spent[1] < spent[2]
    assert donation.markdown(rows).count("\n| AdamW") == 9


@pytest.mark.slow
def test_the_memory_of_gradients_is_written_into_a_page(monkeypatch, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"{gradient_memory.BEGIN}\nold\n{gradient_memory.END}\n")
    name = "sl.ClipByGlobalNorm(1.0) | sl.adamw(1e-3)"
    monkeypatch.setattr(gradient_memory, "CASES", {name: gradient_memory.CASES[name]})
    with lenient():
        rows = gradient_memory.main(["--layers", "4", "--width", "64", "--docs", str(page)])
    assert rows[0][1] > 0.9
    assert r"| `sl.ClipByGlobalNorm(1.0) \| sl.adamw(1e-3)` |" in page.read_text()


@pytest.mark.slow
def test_the_time_to_compile_many_leaves_is_written_into_a_page(monkeypatch, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"{many_leaves.BEGIN}\nold\n{many_leaves.END}\n")
    monkeypatch.setattr(many_leaves, "CASES", [(title, 4) for title in many_leaves.TITLES])
    with lenient():
        rows = many_leaves.main(["--docs", str(page)])
    assert all(seconds > 0 for _, _, seconds in rows)
    assert r"| `(sl.ClipByGlobalNorm(1.0) \| sl.adamw(1e-3)).flatten()` | 4 |" in page.read_text()


@pytest.mark.slow
def test_stacked_layers_that_are_stepped_by_hand_need_less_memory(monkeypatch, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"{stacked_layers.BEGIN}\nold\n{stacked_layers.END}\n")
    monkeypatch.setattr(stacked_layers, "CASES", [stacked_layers.Case(12, 64, 4)])
    with lenient():
        rows = stacked_layers.main(["--repetitions", "1", "--docs", str(page)])
    (row,) = rows.values()
    assert row["by hand"][1] < 0.5 < 1 < row["ordinary"][1]
    assert "| 12 dense layers, 64 wide, 4 examples |" in page.read_text()


@pytest.mark.slow
def test_the_errors_of_curvature_are_written_into_a_page(monkeypatch, tmp_path):
    page, picture = tmp_path / "page.md", tmp_path / "picture.png"
    page.write_text(f"{curvature.BEGIN}\nold\n{curvature.END}\n")
    cases = [curvature.Case("burgers", "sl.adam(1e-2)", steps=2, adam=1)]
    monkeypatch.setattr(curvature, "GROUPS", {"burgers": cases, "poisson": [], "broyden": []})
    options = ["--results", str(tmp_path / "results.json"), "--docs", str(page)]
    with lenient():
        curvature.main(["burgers", *options, "--picture", str(picture)])
    ((_, seconds, error, loss),) = [
        run[-1] for run in curvature.read(tmp_path / "results.json").values()
    ]
    assert seconds > 0
    assert 0 < error < 1
    assert 0 < loss < 10
    assert "| `sl.adam(1e-2)` | 3 | " in page.read_text()
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_rates_and_rivals_have_tables(monkeypatch, tmp_path):
    page, known = tmp_path / "page.md", tmp_path / "results.json"
    page.write_text(f"{curvature.BEGIN}\nold\n{curvature.END}\n")
    # What the rivals left. Our run counts until the loss that Optimistix ends with.
    theirs = {f"autoencoder: {curvature.kfac_rival.NAME}, 0": [[20, 5.0, 0.03, 0.03]]}
    theirs["optimistix: optimistix, 0"] = [[20, 5.0, 0.1, 0.2]]
    theirs["optimistix: ours, 0"] = [[1, 0.1, 0.5, 0.6], [2, 0.2, 0.3, 0.2], [3, 0.3, 0.1, 0.1]]
    known.write_text(json.dumps(theirs))
    case = curvature.Case("autoencoder", "sl.adam(1e-2)", steps=2)
    rival = case._replace(code=curvature.kfac_rival.NAME)
    groups = {"autoencoder": [case, rival], "rates": [case], "poisson": [], "broyden": []}
    groups["optimistix"] = [case._replace(code=code) for code in ("optimistix", "ours")]
    monkeypatch.setattr(curvature, "GROUPS", groups | {"burgers": []})
    monkeypatch.setattr(curvature, "RATES", (1e-2,))
    options = ["--results", str(known), "--docs", str(page)]
    with lenient():
        curvature.main(
            ["autoencoder", "rates", *options, "--picture", str(tmp_path / "picture.png")]
        )
    text = page.read_text()
    assert "| `sl.adam(1e-2)` | 2 | " in text
    assert "| `kfac_jax.Optimizer` | 20 | 5.0 | 3.0e-02 | 3e-02 |" in text
    assert "| `ours` | 2 | 0.2 | 3.0e-01 | 2e-01 |" in text
    assert "| autoencoder, `sl.adam` | " in text


@pytest.mark.slow
def test_several_losses_are_measured(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"{several_losses.BEGIN}\nold\n{several_losses.END}\n")
    tiny = ["--layers=3", "--width=16", "--repetitions=1", "--steps=3", "--seeds=1"]
    with lenient():
        cost, error = several_losses.main([*tiny, "--docs", str(page)])
    assert len(cost) == len(error) == 4
    assert "| weights of the terms | relative error, of each seed |" in page.read_text()


@pytest.mark.slow
def test_loops_and_scans_are_compared(monkeypatch, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"{loops.BEGIN}\nold\n{loops.END}\n")
    mlp = [task for task in loops.tasks(10) if task.title == "MLP"]
    monkeypatch.setattr(loops, "tasks", lambda steps: mlp)
    with lenient():
        rows = loops.main(["--repetitions", "1", "--no-torch", "--docs", str(page)])
    assert [len(row) for row in rows] == [5, 5, 5]
    assert page.read_text().count("\n| MLP, ") == 3


@pytest.mark.slow
def test_each_codec_and_each_policy_is_measured(monkeypatch, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{precision.BEGIN}\nold\n{precision.END}\n\nafter\n")
    rules = [case.rule for case in precision.cases()]
    assert (rules.count("AdamW"), rules.count("Lion")) == (14, 8)
    kept = [
        case
        for case in precision.cases()
        if case.state in ("float32", '`.store("bfloat16")`', '`.write("master")`')
    ]
    monkeypatch.setattr(precision, "cases", lambda: kept)
    with lenient():
        rows = precision.main(["--width", "64", "--repetitions", "4", "--docs", str(page)])
    moved = [(row["rule"], round(row["bytes_per_parameter"])) for row in rows]
    assert moved == [("AdamW", 28), ("AdamW", 20), ("AdamW", 26), ("Lion", 20), ("Lion", 16)]
    text = page.read_text()
    assert text.count("\n| AdamW, ") == 3
    assert "\nold\n" not in text


@pytest.mark.slow
def test_the_host_rows_run_and_slalom_comes_first():
    from benchmarks.host import compare_host

    with lenient():
        entries = compare_host(calls=2, leaves=4)
    first = {entry["row"]: next(iter(entry["contenders"])) for entry in entries}
    assert first == {
        "training step": "sl.train_step",
        "step on its own": "opt.step",
        "reading a number": "opt.hyperparams",
        "reading a scheduled number": "opt.hyperparams",
        "binding": "sl.Optimizer",
    }
    for entry in entries:
        assert set(entry["ratios"]) == set(entry["contenders"]) - {first[entry["row"]]}
    report.host_table({"host": entries})


@pytest.mark.slow
def test_muon_is_compared_with_its_peers_and_with_plain_products():
    others = tuple(f"block{i}." for i in range(1, 12))
    params = {k: p for k, p in matrices.leaves(48).items() if not k.startswith(others)}
    with_torch = torch_rival.FOUND
    with lenient():
        found = matrices.compare(params, 2, with_torch=with_torch)
    assert set(found["costs"]) == {"AdamW", "muon", "Orthogonalize", "optax"}
    assert set(found["ratios"]) == {"optax", "torch"} if with_torch else {"optax"}
    assert set(found["shares"]) == {"muon", "Orthogonalize"}
    assert all(each["low"] > 0 for each in found["shares"].values())
    # Five steps of three products for the square matrix. The others have long sides, and two of
    # them are stacked.
    assert found["products"] == 15 + 18 + 18
    assert matrices.lines(found, params)[0] == "16 leaves, 4 matrices, 51 products"


# --- what the programs look like ------------------------------------------------------------

HLO = """
%fused_computation (param_0: f32[4,8]) -> f32[4,8] {
  ROOT %copy.1 = f32[4,8]{1,0} copy(%param_0), metadata={op_name="a fusion("}
}
ENTRY %main (a: f32[4,8]) -> (f32[4,8], s32[]) {
  %copy.2 = f32[4,8]{0,1:T(8,128)} copy(%a)
  %copy.3 = s32[] copy(%b)
  %copy_fusion = f32[4,8]{1,0} fusion(%copy.2), kind=kLoop, calls=%fused_computation
  ROOT %both.2 = (f32[4,8]{1,0}, f32[32]{0}) fusion(%a, %copy_fusion), kind=kLoop, calls=%other
}
"""


def test_fusions_and_copies_are_counted_in_the_text_of_a_program():
    assert measure.fusions(HLO) == 2
    assert measure.copies(HLO, {(4, 8), ()}) == 2
    assert measure.copies(HLO, {(32,), ()}) == 0


def test_fusions_and_copies_are_counted_in_a_program_of_a_known_form():
    params = {"w": jnp.ones((16, 8))}

    def swap(params, state, grads):
        return grads, state + 1

    # The gradients are not given away, so returning them needs a copy.
    cost = measure.Step(swap, params, jnp.ones(3), params).cost
    assert (cost.copies, cost.scratch_bytes) == (1, 0)
    cost = measure.slalom_step(sl.sgd(1e-3), params, params).cost
    assert (cost.copies, cost.fusions) == (0, 2)  # one for the array, one for the clock


def test_windows_and_idle_steps_are_told_apart():
    times = [1.0, 1.0, 1.0, 5.0, 2.0, 2.0, 2.0, 6.0]
    assert measure.windows(times, 4) == [2.0, 3.0]
    assert measure.windows(times, 1) == times
    assert measure.idle(times, 4) == [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]
    assert measure.ratio([2.0, 9.0, 4.0], [1.0, 3.0, 1.0]) == {"median": 3, "low": 2.5, "high": 3.5}


# --- another day ----------------------------------------------------------------------------


def made_up(ratio, scratch, row="AdamW"):
    cost = {"scratch_bytes": scratch, "trace_s": 1.0, "compile_s": 2.0, "fusions": 3, "copies": 0}
    spread = {"median": ratio, "low": ratio, "high": ratio}
    entry = {
        "shape": "tree",
        "row": row,
        "parameters": 100,
        "parameter_bytes": 400,
        "contenders": {"slalom": cost, "optax": cost},
        "ratios": {"optax": spread},
    }
    host = {"row": "training step", "ratios": {"optax, eqx.filter_jit": spread}}
    return {"schema": report.SCHEMA, "steps": [entry], "host": [host]}


def shown(table):
    """The cells of a table."""
    columns = [list(column.cells) for column in table.columns]
    return [list(row) for row in zip(*columns, strict=True)]


def test_compare_shows_what_changed_and_nothing_else():
    changes = report.compare(made_up(1.0, scratch=0), made_up(1.5, scratch=40))
    assert shown(changes) == [
        ["tree: AdamW", "optax / slalom", "1.00", "1.50", "+50%"],
        ["tree: AdamW", "scratch", "0.00", "0.10", "was 0"],
        ["host: training step", "optax, eqx.filter_jit / slalom", "1.00", "1.50", "+50%"],
    ]
    assert shown(report.compare(made_up(1.0, 0), made_up(1.04, 0))) == []


def test_compare_shows_rows_that_came_and_went():
    lines = shown(report.compare(made_up(1.0, 0, row="Lion"), made_up(1.0, 0)))
    assert {(line[0], line[-1]) for line in lines} == {
        ("tree: Lion", "gone"),
        ("tree: AdamW", "new"),
    }


def test_compare_refuses_figures_of_another_schema():
    old = copy.deepcopy(made_up(1.0, 0)) | {"schema": 0}
    with pytest.raises(ValueError, match="has schema 0, this one has 1"):
        report.compare(old, made_up(1.0, 0))


# --- what is asked for ----------------------------------------------------------------------


def test_repetitions_are_whole_windows():
    with pytest.raises(SystemExit):
        main.arguments(["--repetitions", "6"])


def test_shapes_have_the_leaves_they_are_named_for():
    leaves = {key: jax.eval_shape(shape.make) for key, shape in (FULL | QUICK | TINY).items()}
    sizes = {key: len(jax.tree.leaves(tree)) for key, tree in leaves.items()}
    assert sizes == {
        "gpt2": 148,
        "bf16": 148,
        "leaves": 1000,
        "mlp": 10,
        "one": 1,
        "gpt2/8": 148,
        "tiny": 2,
    }
    total = sum(x.size for x in jax.tree.leaves(leaves["gpt2"]))
    assert total == 124_439_808
    assert all(
        row in ROWS or row == "flatten(AdamW)" for s in FULL.values() for row in s.rows or ()
    )


@pytest.mark.slow
def test_saving_and_loading_are_timed(tmp_path):
    found = checkpoint.run(1e-5, tmp_path)
    assert [*found] == ["write, fsync", "save", "save, call only", "load", "load, Equinox"]
    assert all(len(seconds) == 8 for seconds in found.values())


# --- bits ---------------------------------------------------------------------------------------


def test_bits_are_compared_row_by_row(tmp_path, capsys):
    args = ["--rows", "SetToZero"]
    before = tmp_path / "before.npz"
    assert same_bits.main([*args, "--write", str(before)]) == 0
    assert same_bits.main([*args, "--against", str(before)]) == 0
    assert "0 rows differ, 0 are missing" in capsys.readouterr().out

    changed = {name: x + 1 for name, x in np.load(before).items()}
    np.savez(before, **changed)
    assert same_bits.main([*args, "--against", str(before)]) == 1
    assert "1 rows differ" in capsys.readouterr().out


def test_bits_of_matrices_may_differ_a_little():
    arrays = {"x": np.array([1.0, 1e-3], np.float32)}
    near = {"x": np.array([1.0, 1.001e-3], np.float32)}
    assert same_bits.difference(arrays, near, 1e-5) is None
    assert same_bits.difference(arrays, near, 0.0) == "x: 1.0e-06 apart"
    assert same_bits.difference(arrays, {}, 0.0) == "other arrays: ['x']"


# --- learning -----------------------------------------------------------------------------------


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
        found = Runs(slope(rate=0.5), QUICK_RUNS).train("sgd", Recipe(0.2, "sgd", constant=True))
    low, high = 0.1 * 10**-0.25, 0.1 * 10**0.25
    assert [(run.rate, run.seed) for run in found] == [
        (pytest.approx(low), 0),
        (pytest.approx(low), 1),
        (pytest.approx(high), 0),
        (pytest.approx(high), 1),
    ]
    # The first of 6 steps warms up.
    assert found[2].scores == pytest.approx([(1 - 2 * high) ** n for n in (1, 3, 5)])
    assert found[0].milliseconds > 0
    chosen = figures.best("sgd", found)
    assert (chosen.rate, chosen.at_edge) == (found[2].rate, True)
    assert chosen.share_to((1 - 2 * high) ** 2) == pytest.approx(2 / 3)
    assert chosen.share_to(0.0) == float("inf")


def test_a_rate_that_diverges_is_not_chosen():
    nan = float("nan")
    runs = [
        Run("sgd", rate, seed, 1.0, (1.0, last))
        for rate, lasts in ((1.0, (nan, nan)), (0.1, (nan, 0.5)), (0.3, (0.6, 0.4)))
        for seed, last in enumerate(lasts)
    ]
    chosen = figures.best("sgd", runs)
    assert (chosen.rate, chosen.at_edge, chosen.last) == (0.3, False, [0.6, 0.4])
    assert figures.best("sgd", runs[:4]).final == float("inf")


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


def test_runs_survive_the_file_and_only_whole_ones_are_kept(tmp_path):
    path = tmp_path / "new" / "slope.csv"
    first = [Run("sgd, slow", 0.31622776, 2, 0.123456, (1.0, 0.123456, float("nan")))]
    data.append(path, first)
    data.append(path, runs_of("lion", 1.0))
    assert path.read_text().splitlines() == [
        "optimizer,rate,seed,milliseconds,scores",
        '"sgd, slow",0.3162,2,0.1235,1 0.1235 nan',
        "lion,0.1,0,5,9 1",
    ]
    assert [run.cells() for run in data.read(path)] == [
        first[0].cells(),
        *(r.cells() for r in runs_of("lion", 1.0)),
    ]
    assert [each.name for each in path.parent.iterdir()] == ["slope.csv"]
    path.write_text("name,rate\n")
    with pytest.raises(ValueError, match="must have the columns optimizer, rate, seed"):
        data.read(path)


def test_the_stored_runs_are_whole():
    for path in data.FOLDER.glob("*.csv"):
        runs = data.read(path)
        assert path.stem in TASKS
        assert {run.optimizer for run in runs} <= set(RECIPES)
        keys = [(run.optimizer, run.rate, run.seed) for run in runs]
        assert len(set(keys)) == len(keys)
        for name in {run.optimizer for run in runs}:
            mine = [run for run in runs if run.optimizer == name]
            assert len({run.rate for run in mine}) == FULL_RUNS.rates
            assert len(mine) == FULL_RUNS.rates * len({run.seed for run in runs})
            assert {len(run.scores) for run in mine} == {FULL_RUNS.evaluations}


def test_the_solution_of_burgers_equation_solves_it():
    h, t, x = 1e-3, np.linspace(0.1, 0.9, 9), np.linspace(-0.9, 0.9, 9)
    u_t = (exact(t + h, x) - exact(t - h, x)) / (2 * h)
    u_x = (exact(t, x + h) - exact(t, x - h)) / (2 * h)
    u_xx = (exact(t, x + h) - 2 * exact(t, x) + exact(t, x - h)) / h**2
    np.testing.assert_allclose(u_t + exact(t, x) * u_x, 0.03 / np.pi * u_xx, atol=1e-3)


@pytest.mark.slow
def test_learning_goes_on_where_the_data_end_and_writes_its_page(tmp_path):
    page, file = tmp_path / "page.md", tmp_path / "data" / "digits.csv"
    page.write_text(f"before\n\n{learning.BEGIN}\nold\n{docs.END}\n\nafter\n")
    options = ["--quick", "--tasks", "digits", "--data", str(file.parent)]
    with lenient():
        learning.main([*options, "--optimizers", "adamw"])
        before = file.read_text()
        names = "adamw;sgd with momentum"
        learning.main([*options, "--optimizers", names, "--minutes", "0"])
        assert file.read_text() == before
        learning.main([*options, "--optimizers", names, "--docs", str(page)])
    assert file.read_text().startswith(before)
    assert [run.optimizer for run in data.read(file)[::4]] == ["adamw", "sgd with momentum"]
    text = page.read_text()
    assert text.startswith(f"before\n\n{learning.BEGIN}\n")
    assert "### Digits: a convolutional network" in text
    assert "| **adamw** |" in text
    assert "\nold\n" not in text
    for picture in ("page.png", "page-curves.png"):
        assert f"]({picture})" in text
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")


def test_quick_runs_are_not_mixed_with_the_stored_ones(capsys):
    with pytest.raises(SystemExit):
        learning.arguments(["--quick"])
    assert "--quick needs a folder of its own" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, r in RECIPES.items() if r.exists(name)])
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
        runs = Runs(network, QUICK_RUNS)
        found = figures.best(name, runs.train(name, RECIPES[name]))
        start = float(np.median(runs.scores(runs.start)))
    assert found.final < start


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_each_task_has_a_finite_score_at_the_start(name):
    with lenient():
        task = TASKS[name]()
        assert 0.1 < float(task.evaluate(task.model(jax.random.key(0)))) < 10


# --- widths -------------------------------------------------------------------------------------


def test_the_best_rate_is_the_lowest_point_of_a_parabola():
    rates = 2.0 ** np.arange(-8, 0)
    losses = {float(rate): 1 + (np.log2(rate) + 4.3) ** 2 for rate in rates}
    assert widths.optimum(losses) == pytest.approx(2**-4.3)
    losses[2.0**-3] = float("nan")
    assert widths.optimum(losses) == pytest.approx(2**-4.3)
    # At the edge there is nothing to fit.
    assert widths.optimum({rate: -rate for rate in losses}) == 2.0**-1
    assert widths.moved([0.1, 0.4, 0.2]) == pytest.approx(4)


@pytest.mark.slow
def test_rates_over_widths_are_stored_and_drawn(tmp_path):
    page, file = tmp_path / "page.md", tmp_path / "widths.csv"
    page.write_text(f"before\n\n{widths.BEGIN}\nold\n{widths.END}\n\nafter\n")
    options = ["--quick", "--rules", "adam", "--data", str(file)]
    options += ["--picture", str(tmp_path / "widths.png")]
    with lenient():
        widths.main(options)
        before = file.read_text()
        widths.main([*options, "--docs", str(page)])
    assert file.read_text() == before
    runs = data.read(file)
    assert len(runs) == 2 * 2 * 3 * 2
    # Without factors at the smallest width, and with some at the next.
    plain, factored = ([r.scores for r in runs[i : i + 6]] for i in (0, 6))
    assert plain == factored
    assert [r.scores for r in runs[12:18]] != [r.scores for r in runs[18:]]
    assert "| `sl.adam(...).transfer(...)` |" in page.read_text()
    assert (tmp_path / "widths.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_codecs_are_compared_and_only_what_is_missing_is_measured(tmp_path):
    page, file = tmp_path / "page.md", tmp_path / "file.json"
    page.write_text(f"before\n\n{codecs.BEGIN}\nold\n{docs.END}\n\nafter\n")
    options = ["--quick", "--tasks", "digits", "--optimizers", "Lion", "--json", str(file)]
    with lenient():
        before = codecs.main([*options, "--codecs", ""])
        made = codecs.main([*options, "--codecs", "int8", "--load", str(file), "--docs", str(page)])
    losses = made["losses"]["digits, Lion"]
    assert list(losses) == ["float32", "int8"]
    assert losses["float32"] == before["losses"]["digits, Lion"]["float32"]
    np.testing.assert_allclose(losses["int8"], losses["float32"], rtol=0.1)
    assert made["bytes"]["Lion"]["int8"][0] == pytest.approx(codecs.CODECS["int8"], abs=1e-3)
    text = page.read_text()
    assert '| Lion | `"int8"` | 1.06 | 1.06 |' in text
    assert 'for `"int8"` (Lion)' in text
    assert "\nold\n" not in text


# PyTorch warns of its own functions while it compiles.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", codec_peers.PEERS)
def test_the_state_of_peers_is_measured(name):
    pytest.importorskip("torch", reason="the peers are PyTorch's")
    if not codec_peers.available(name):
        pytest.skip(f"{name} is in a package that is not installed")
    with lenient():
        size = codec_peers.bytes_per_parameter(name, {"w": (256, 512)})
    assert size == pytest.approx(8 if name == "torch AdamW" else 2.03, abs=0.02)


@pytest.mark.slow
def test_the_benchmark_of_a_gpu_runs_dry(tmp_path):
    page, file = tmp_path / "page.md", tmp_path / "gpu.json"
    page.write_text(f"before\n\n{gpu.BEGIN}\nold\n{gpu.END}\n\nafter\n")
    with lenient():
        found = gpu.main(["--dry", "--no-torch", "--json", str(file), "--docs", str(page)])
    assert json.loads(file.read_text()) == found
    (memory,) = found["memory"]
    # Parameters, gradients, two moments, and a few numbers.
    assert 4 * 4 * 4160 <= memory["planned"] < 4.2 * 4 * 4160
    moved = {row["step"]: round(row["bytes_per_parameter"]) for row in found["bandwidth"]}
    assert (moved["AdamW"], moved["clip, AdamW"], moved["Lion"]) == (28, 32, 20)
    assert "\nold\n" not in page.read_text()
