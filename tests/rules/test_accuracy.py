"""Every rule computes its formula to a few units in the last place, at any age and size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from benchmarks import accuracy
from benchmarks.formulas import ROWS

import slalom as sl
from helpers import lenient, sampled, slow_except
from table import RULES

# Rules without a row, and why.
WITHOUT_FORMULA = {
    # They compute nothing.
    *("Identity", "SetToZero", "Snapshot", "Monitor", "Freeze", "ApplyEvery", "CheckFinite"),
    # One product, or a comparison.
    *("ScaleByLearningRate", "ScaleBySchedule", "ScaleBy", "Clip", "ScaleBySign", "ZeroNans"),
    *("KeepParamsNonnegative", "Stateless", "StatelessPerLeaf"),
    # The same norms as in a rule with a row.
    *("ScaleByParamBlockNorm", "UnitwiseClip", "AdaptiveGradClip"),
    *("PerExampleGlobalNormClip", "MeasureWithEma", "ZClip"),
    # They depend on a key, on earlier parameters or on a loss, and have tests of their own.
    *("AddNoise", "ScaleByDistanceOverGradients", "ScaleByPolyak", "ScaleByLbfgs"),
    *("ScaleByIvon", "ScaleByMadgrad", "ScaleBySophia"),
    *("ScaleByBacktrackingLinesearch", "ScaleByZoomLinesearch"),
    # They depend on singular vectors and on a random projection, and have tests of their own.
    *("ScaleByGalore", "ScaleByApollo", "ScaleByDion"),
    *("ScaleByProdigy", "ScaleByDAdaptAdam", "ScaleByDog", "ScaleByDowg"),
    *("ScaleByMomo", "ScaleByMomoAdam", "ScaleByCocob"),
    # Signs, and step sizes that are products; a difference that cancels.
    *("ScaleByRprop", "Centralize", "AddDecayToInitialParams"),
    # Signs, norms, and products of matrices: `test_preconditioners.py` has dense formulas.
    *("Cautious", "KeepInitialNorm", "ScaleBySoap", "ScaleByKlSoap", "ScaleBySplus"),
    *("ScaleByKron", "ScaleByShampoo"),
    # `test_gauss_newton.py` and `test_problems.py` have damped solutions and certified values.
    *("ScaleByGaussNewton", "ScaleByLevenbergMarquardt"),
    *("PinRadius", "RadialBrake", "UpdateFloor"),
    # `test_quasi_newton.py` has those of the authors.
    "ScaleBySelfScaledBroyden",
    *("CorrectByMars", "Orthogonalize", "ScaleByRowRms", "NormalizeColumns", "ScaleByFanIn"),
    # `test_qk_clip.py` has the logits that it bounds.
    "QKClip",
}


EVERYDAY = ("ScaleByAdam", "ScaleByAdopt", "ScaleByRadam", "ScaleBySm3", "Average")
HALF_AND_WIDER = [(name, dtype) for name in ROWS for dtype in accuracy.DTYPES[1:]]
CASES = [
    *slow_except([(name, "float32") for name in ROWS], *((name, "float32") for name in EVERYDAY)),
    *sampled(HALF_AND_WIDER, ("ScaleByAdam", "complex64")),
]


@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_one_step_is_accurate_at_any_age_and_size(case):
    name, dtype = case
    row = ROWS[name]
    with lenient():
        errors = accuracy.measure(row, dtype)
    # Updates are computed in float32, so in half precision only the stored means are rounded.
    half = dtype in ("bfloat16", "float16")
    assert errors.update <= (0.51 if half else row.ulp)
    assert errors.state <= 4


def test_every_rule_has_a_formula_whose_bound_a_slightly_wrong_number_exceeds():
    rows = {type(row.rule).__name__ for row in ROWS.values()}
    for name in RULES:
        rule = name.partition(",")[0]
        assert (rule in rows) != (rule in WITHOUT_FORMULA), rule

    row = ROWS["ScaleByAdam"]
    for wrong in (sl.ScaleByAdam(b2=0.9990001), sl.ScaleByAdam(eps=1.00001e-8)):

        def formula(h, *args, rule=wrong):
            wrong = accuracy.numbers(rule, jnp.finfo(jnp.float32))
            return row.formula(wrong, *args)

        with lenient():
            errors = accuracy.measure(row._replace(formula=formula), "float32", (2,), (1e-3, 1e-10))
        assert errors.update > 2 * row.ulp


@pytest.mark.slow
def test_the_page_is_written(tmp_path, capsys, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{accuracy.BEGIN}\nold\n{accuracy.END}\nafter\n")
    monkeypatch.setattr(accuracy, "ROWS", {"Scale": ROWS["Scale"]})
    monkeypatch.setattr(accuracy, "DECAYS", (0.9,))
    with lenient():
        accuracy.main(["--docs", str(page)])
    text = page.read_text()
    assert capsys.readouterr().out.strip() in text
    assert "| Scale | 0.5 | < 0.1 | < 0.1 | 0.4 | 0.5 |" in text
    assert "| 0.9 | " in text
    assert text.startswith("before")
    assert text.endswith("after\n")


@pytest.mark.usefixtures("compiled_as_users")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_stored_mean_stops_short_of_a_constant_gradient_by_a_few_roundings(dtype):
    decays = np.array([0.5, 0.9, 0.99])
    least_change = float(jnp.finfo(dtype).eps) / 2
    assert np.all(accuracy.shortfalls(decays, dtype, 3_000) <= 1.1 * least_change / (1 - decays))


@pytest.mark.usefixtures("compiled_as_users", "x64")
@pytest.mark.parametrize("name", ["ScaleByAmsgrad", "ScaleBySign", "ScaleByLion, smooth"])
def test_derivatives_of_running_maxima_and_complex_signs_are_those_of_finite_differences(name):
    @jax.jit
    def end(by):
        params = by + jnp.linspace(0.0, 1.0, 64)
        params = params if "Amsgrad" in name else jax.lax.complex(params, jnp.flip(params))
        state = RULES[name].init(params)
        for _ in range(3):
            grads = 0.3 * params + 0.1 * params**2 + 0.2
            params, state = RULES[name].step(grads, state, params)
        return jnp.sum(params.real * 3 + params.imag)

    derivative = jax.jit(lambda: jax.jvp(end, (0.0,), (1.0,))[1])()
    np.testing.assert_allclose(derivative, (end(1e-6) - end(-1e-6)) / 2e-6, rtol=1e-6)
