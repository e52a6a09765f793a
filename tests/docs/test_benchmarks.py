"""The benchmarks run, count what they say they count, and compare. Nothing is timed here.

Those that train or compile for more than a few seconds are exhaustive.
"""

import json

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
)
from benchmarks.fits import __main__ as fits
from benchmarks.gpu import __main__ as gpu
from benchmarks.rows import ROWS
from benchmarks.shapes import FULL, QUICK, TINY

import slalom as sl
from helpers import lenient

ENTRY = {
    *("shape", "key", "row", "leaves", "parameters", "parameter_bytes", "bytes_per_second"),
    *("limit_bytes_per_parameter", "target", "scratch_target", "ratios", "contenders"),
}
COST = {"trace_s", "compile_s", "scratch_bytes", "peak_bytes", "fusions", "copies"}
TIMED = {"seconds", "ns_per_parameter", "share_of_limit"}
PNG = b"\x89PNG"


@pytest.mark.slow
def test_the_command_writes_what_was_measured_and_a_page(written, tmp_path):
    file, picture = tmp_path / "now.json", tmp_path / "page.png"
    options = ["--tiny", "--repetitions", 4, "--rows", "every 4", "--no-torch", "--json", file]
    _, text = written(main, *options)
    assert "| AdamW every 4, idle step |" in text
    assert "![Time relative to Slalom](page.png)" in text
    assert picture.read_bytes().startswith(PNG)

    made = json.loads(file.read_text())
    assert made["schema"] == report.SCHEMA
    assert set(made["machine"]["versions"]) >= {"jax", "jaxlib", "optax", "equinox", "slalom"}
    measured = [entry["row"] for entry in made["steps"]]
    assert measured == ["AdamW every 4", "AdamW every 4, idle step"]
    for entry in made["steps"]:
        assert set(entry) == ENTRY
        assert set(entry["contenders"]) == {"slalom", "optax"}
        for contender in entry["contenders"].values():
            assert set(contender) == COST | TIMED
        for taken in (entry["ratios"]["optax"], entry["contenders"]["slalom"]["seconds"]):
            assert 0 < taken["low"] <= taken["median"] <= taken["high"]

    page = tmp_path / "again.md"
    page.write_text(text)
    docs.write(made, page, "page.png")
    assert page.read_text() == text


def test_what_makes_no_sense_is_refused_and_results_of_two_days_are_compared(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("nothing")
    with pytest.raises(ValueError, match="must have one line"):
        docs.write({}, page, "page.png")
    with pytest.raises(SystemExit):
        main.arguments(["--repetitions", "6"])  # no whole windows

    before = made_up(1.0)
    assert changes(before, made_up(1.5, scratch=40)) == [
        ("tree: AdamW", "1.50", "+50%"),
        ("tree: AdamW", "0.10", "was 0"),
        ("host: training step", "1.50", "+50%"),
    ]
    assert changes(before, made_up(1.04)) == []
    found = {(row, change) for row, _, change in changes(made_up(1.0, row="Lion"), before)}
    assert found == {("tree: Lion", "gone"), ("tree: AdamW", "new")}
    with pytest.raises(ValueError, match="has schema 0, this one has 1"):
        report.compare(before | {"schema": 0}, before)


@pytest.mark.exhaustive
def test_donation_hosts_and_files_are_measured(tmp_path):
    rows = donation.measure({"w": jnp.ones((8, 8))}, 8, 4)
    assert [row["donate"] for row in rows] == ["all", "opt", "False"] * 3
    spent = [row["bytes_per_parameter"] for row in rows]
    assert spent[0] < spent[1] < spent[2]
    assert donation.markdown(rows).count("\n| AdamW") == 9

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

    found = checkpoint.run(1e-5, tmp_path)
    assert [*found] == ["write, fsync", "save", "save, call only", "load", "load, Equinox"]
    assert all(len(seconds) == 8 for seconds in found.values())


@pytest.mark.exhaustive
def test_memory_of_gradients_and_layers_and_the_time_to_compile_are_measured(monkeypatch, written):
    name = "sl.ClipByGlobalNorm(1.0) | sl.adamw(1e-3)"
    monkeypatch.setattr(gradient_memory, "CASES", {name: gradient_memory.CASES[name]})
    rows, text = written(gradient_memory, "--layers", 4, "--width", 64)
    assert rows[0][1] > 0.9
    assert r"| `sl.ClipByGlobalNorm(1.0) \| sl.adamw(1e-3)` |" in text

    monkeypatch.setattr(many_leaves, "CASES", [(title, 4) for title in many_leaves.TITLES])
    rows, text = written(many_leaves)
    assert all(seconds > 0 for _, _, seconds in rows)
    assert r"| `(sl.ClipByGlobalNorm(1.0) \| sl.adamw(1e-3)).flatten()` | 4 |" in text

    monkeypatch.setattr(stacked_layers, "CASES", [stacked_layers.Case(12, 64, 4)])
    rows, text = written(stacked_layers, "--repetitions", 1)
    (row,) = rows.values()
    assert row["by hand"][1] < 0.5 < 1 < row["ordinary"][1]
    assert "| 12 dense layers, 64 wide, 4 examples |" in text


@pytest.mark.exhaustive
def test_fits_of_several_solvers_are_compared(tmp_path, written):
    known = tmp_path / "fits.json"
    theirs = "linear_full_rank, `optimistix.LevenbergMarquardt`, float64"
    scipy = f"linear_full_rank, {fits.SCIPY}, float64"
    rows = {theirs: [[0, True, 7, 5.0], [-1, False, 9, 6.0]], scipy: [[0, True, 5, 5.0]] * 2}
    known.write_text(json.dumps(rows))
    options = ["--solvers", "lbfgs", "--results", known]
    found, text = written(fits, "linear_full_rank", "Misra1a", *options)
    for name in ("linear_full_rank", "Misra1a"):
        said = found[f"{name}, `sl.lbfgs()`, float64"]
        assert [row[:2] for row in said] == [[0, True]] * len(said)
    assert "**float64**" in text
    assert "**float32**" in text
    assert "| `sl.lbfgs()` | 2 of 2 | 2 of 2 | 0 |" in text
    assert "It takes 8 evaluations to get there, and SciPy 10: 0.80 times" in text
    assert "| `optimistix.LevenbergMarquardt` | 1 of 2 | 1 of 1 | 0 | 7 | 0 of 10 |" in text


@pytest.mark.slow
def test_errors_of_curvature_are_measured_and_compared_with_rivals(monkeypatch, tmp_path, written):
    known, picture = tmp_path / "results.json", tmp_path / "picture.png"
    # What the rivals left. Our run counts until the loss that Optimistix ends with.
    theirs = {f"autoencoder: {curvature.kfac_rival.NAME}, 0": [[20, 5.0, 0.03, 0.03]]}
    theirs["optimistix: optimistix, 0"] = [[20, 5.0, 0.1, 0.2]]
    theirs["optimistix: ours, 0"] = [[1, 0.1, 0.5, 0.6], [2, 0.2, 0.3, 0.2], [3, 0.3, 0.1, 0.1]]
    known.write_text(json.dumps(theirs))
    burgers = curvature.Case("burgers", "sl.adam(1e-2)", steps=2, adam=1)
    case = curvature.Case("autoencoder", "sl.adam(1e-2)", steps=2)
    rival = case._replace(code=curvature.kfac_rival.NAME)
    groups = {"burgers": [burgers], "autoencoder": [case, rival], "rates": [case]}
    groups["optimistix"] = [case._replace(code=code) for code in ("optimistix", "ours")]
    monkeypatch.setattr(curvature, "GROUPS", groups | {"poisson": [], "broyden": []})
    monkeypatch.setattr(curvature, "RATES", (1e-2,))
    options = ["--results", known, "--picture", picture]
    _, text = written(curvature, "burgers", "autoencoder", "rates", *options)

    ((*_, (step, seconds, error, loss)),) = [
        run for name, run in curvature.read(known).items() if name.startswith("burgers")
    ]
    assert step == 3
    assert seconds > 0
    assert 0 < error < 1
    assert 0 < loss < 10
    assert "| `sl.adam(1e-2)` | 3 | " in text
    assert "| `sl.adam(1e-2)` | 2 | " in text
    assert "| `kfac_jax.Optimizer` | 20 | 5.0 | 3.0e-02 | 3e-02 |" in text
    assert "| `ours` | 2 | 0.2 | 3.0e-01 | 2e-01 |" in text
    assert "| autoencoder, `sl.adam` | " in text
    assert picture.read_bytes().startswith(PNG)


@pytest.mark.exhaustive
def test_several_losses_loops_and_scans_are_compared(written, monkeypatch):
    tiny = ["--layers=3", "--width=16", "--repetitions=1", "--steps=3", "--seeds=1"]
    (cost, error), text = written(several_losses, *tiny)
    assert len(cost) == len(error) == 4
    assert "| weights of the terms | relative error, of each seed |" in text

    mlp = [task for task in loops.tasks(10) if task.title == "MLP"]
    monkeypatch.setattr(loops, "tasks", lambda steps: mlp)
    rows, text = written(loops, "--repetitions", 1, "--no-torch")
    assert [len(row) for row in rows] == [5, 5, 5]
    assert text.count("\n| MLP, ") == 3


@pytest.mark.exhaustive
def test_each_codec_and_each_policy_is_measured(monkeypatch, written):
    cases = precision.cases()
    rules = [case.rule for case in cases]
    assert (rules.count("AdamW"), rules.count("Lion")) == (14, 8)
    some = ("float32", '`.store("bfloat16")`', '`.write("master")`')
    monkeypatch.setattr(precision, "cases", lambda: [c for c in cases if c.state in some])
    rows, text = written(precision, "--width", 64, "--repetitions", 4)
    moved = [(row["rule"], round(row["bytes_per_parameter"])) for row in rows]
    assert moved == [("AdamW", 28), ("AdamW", 20), ("AdamW", 26), ("Lion", 20), ("Lion", 16)]
    assert text.count("\n| AdamW, ") == 3


@pytest.mark.exhaustive
def test_codecs_are_compared_and_only_what_is_missing_is_measured(tmp_path, written):
    file = tmp_path / "file.json"
    options = ["--quick", "--tasks", "digits", "--optimizers", "Lion", "--json", file]
    before, _ = written(codecs, *options, "--codecs", "")
    made, text = written(codecs, *options, "--codecs", "int8", "--load", file)
    losses = made["losses"]["digits, Lion"]
    assert list(losses) == ["float32", "int8"]
    assert losses["float32"] == before["losses"]["digits, Lion"]["float32"]
    np.testing.assert_allclose(losses["int8"], losses["float32"], rtol=0.1)
    assert made["bytes"]["Lion"]["int8"][0] == pytest.approx(codecs.CODECS["int8"], abs=1e-3)
    assert '| Lion | `"int8"` | 1.06 | 1.06 |' in text
    assert 'for `"int8"` (Lion)' in text


# PyTorch warns of its own functions while it compiles.
@pytest.mark.exhaustive
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
def test_the_benchmark_of_a_gpu_runs_dry(tmp_path, written):
    file = tmp_path / "gpu.json"
    found, _ = written(gpu, "--dry", "--json", file, "--only", "memory", "bandwidth")
    assert json.loads(file.read_text()) == found
    (memory,) = found["memory"]
    # Parameters, gradients, two moments, and a few numbers.
    assert 4 * 4 * 4160 <= memory["planned"] < 4.2 * 4 * 4160
    moved = {row["step"]: round(row["bytes_per_parameter"]) for row in found["bandwidth"]}
    assert (moved["AdamW"], moved["clip, AdamW"], moved["Lion"]) == (28, 32, 20)


@pytest.mark.exhaustive
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


def test_figures_of_programs_and_of_times_are_counted():
    assert measure.fusions(HLO) == 2
    assert measure.copies(HLO, {(4, 8), ()}) == 2
    assert measure.copies(HLO, {(32,), ()}) == 0

    # In programs of a known form.
    params = {"w": jnp.ones((16, 8))}

    def swap(params, state, grads):
        return grads, state + 1

    # The gradients are not given away, so returning them needs a copy.
    cost = measure.Step(swap, params, jnp.ones(3), params).cost
    assert (cost.copies, cost.scratch_bytes) == (1, 0)
    cost = measure.step_of(sl.sgd(1e-3), params, params).cost
    assert (cost.copies, cost.fusions) == (0, 2)  # one for the array, one for the clock

    times = [1.0, 1.0, 1.0, 5.0, 2.0, 2.0, 2.0, 6.0]
    assert measure.windows(times, 4) == [2.0, 3.0]
    assert measure.windows(times, 1) == times
    assert measure.idle(times, 4) == [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]
    assert measure.ratio([2.0, 9.0, 4.0], [1.0, 3.0, 1.0]) == {"median": 3, "low": 2.5, "high": 3.5}


def made_up(ratio, scratch=0, row="AdamW"):
    cost = {"scratch_bytes": scratch, "trace_s": 1.0, "compile_s": 2.0, "fusions": 3, "copies": 0}
    entry = {"shape": "tree", "row": row, "parameters": 100, "parameter_bytes": 400}
    entry["contenders"] = {"slalom": cost, "optax": cost}
    entry["ratios"] = {"optax": {"median": ratio, "low": ratio, "high": ratio}}
    host = {"row": "training step", "ratios": entry["ratios"]}
    return {"schema": report.SCHEMA, "steps": [entry], "host": [host]}


def changes(before, after):
    """The rows of the table that compares two results, without the figures before."""
    columns = [[*column.cells] for column in report.compare(before, after).columns]
    return [(row[0], *row[-2:]) for row in zip(*columns, strict=True)]


@pytest.mark.slow
def test_bits_are_compared_row_by_row_and_those_of_matrices_may_differ(tmp_path, capsys):
    args = ["--rows", "SetToZero"]
    before = tmp_path / "before.npz"
    assert same_bits.main([*args, "--write", str(before)]) == 0
    assert same_bits.main([*args, "--against", str(before)]) == 0
    assert "0 rows differ, 0 are missing" in capsys.readouterr().out

    changed = {name: x + 1 for name, x in np.load(before).items()}
    np.savez(before, **changed)
    assert same_bits.main([*args, "--against", str(before)]) == 1
    assert "1 rows differ" in capsys.readouterr().out

    shapes = (FULL | QUICK | TINY).items()
    leaves = {key: jax.tree.leaves(jax.eval_shape(shape.make)) for key, shape in shapes}
    models = dict.fromkeys(("gpt2", "bf16", "gpt2/8"), 148)
    others = {"leaves": 1000, "mlp": 10, "one": 1, "tiny": 2}
    assert {key: len(arrays) for key, arrays in leaves.items()} == models | others
    assert sum(x.size for x in leaves["gpt2"]) == 124_439_808
    asked = {row for shape in FULL.values() for row in shape.rows or ()}
    assert asked <= {*ROWS, "flatten(AdamW)"}

    arrays = {"x": np.array([1.0, 1e-3], np.float32)}
    near = {"x": np.array([1.0, 1.001e-3], np.float32)}
    assert same_bits.difference(arrays, near, 1e-5) is None
    assert same_bits.difference(arrays, near, 0.0) == "x: 1.0e-06 apart"
    assert same_bits.difference(arrays, {}, 0.0) == "other arrays: ['x']"
