"""Checkpoints of another program: every difference is reported by path, and what fits is loaded."""

import jax.numpy as jnp
import pytest
from trained import MODEL, after_steps

import slalom as sl
from helpers import assert_same_bits, sampled


def test_every_difference_is_reported_by_path(path):
    tree = dict.fromkeys(("same", "grown", "cast", "old"), jnp.ones(2))
    sl.checkpoint.save(path, model=tree, n=1.5)
    mine = dict.fromkeys(("same", "new"), jnp.zeros(2))
    mine |= {"grown": jnp.zeros(3), "cast": jnp.zeros(2, "float16")}
    shapes = "model.grown is (2,) in the file and (3,) here"
    dtypes = (
        "model.cast is float32 in the file and float16 here, "
        "n is a Python float in the file and a Python int here"
    )
    with pytest.raises(sl.checkpoint.MismatchError) as caught:
        sl.checkpoint.load(path, model=mine, n=1)
    assert str(caught.value) == (
        f"The checkpoint '{path}' does not fit this program:\n"
        "  only in the program: model.new\n"
        "  only in the file: model.old\n"
        f"  other shapes: {shapes}\n"
        f"  other dtypes: {dtypes}\n"
        "Pass the same model and optimizer as when it was saved, or `strict=False` to load what "
        "fits and keep the program's values for the rest."
    )
    with pytest.raises(sl.checkpoint.MismatchError) as caught:
        sl.checkpoint.load(path, net=tree)
    assert "It was saved with the keywords n, model: load it with the same." in str(caught.value)
    loaded = sl.checkpoint.load(path, model=mine, n=1, strict=False)
    assert_same_bits(loaded["model"], mine | {"same": jnp.ones(2)})
    assert loaded["n"] == 1
    assert repr(loaded.report) == (
        "loaded:      model.same\n"
        "missing:     model.new\n"
        "unexpected:  model.old\n"
        f"reshaped:    {shapes}\n"
        f"retyped:     {dtypes}\n"
        "hyperparams: –"
    )


CHAINS = {
    "clipped": sl.ClipByGlobalNorm(1e9) | sl.adam(0.1),
    "named": sl.named_chain(rest=sl.adam(0.1)),
    "reordered": sl.ScaleByLearningRate(0.1) | sl.ScaleByAdam(),
    "longer": sl.Clip(3.0) | sl.Scale(2.0) | sl.adam(0.1),
    "with a schedule": sl.adam(sl.schedules.linear(0.1, 0.0, transition_steps=5)),
}


def test_a_changed_chain_and_moments_of_another_dtype_load(adam):
    for name, tx in CHAINS.items():
        loaded = sl.checkpoint.load(adam.path, opt=sl.Optimizer(tx, MODEL))
        assert loaded.report.fits, name
        state, old = (opt.state_of("scale_by_adam") for opt in (loaded["opt"], adam.opt))
        assert_same_bits(state, old)
        assert int(loaded["opt"].count) == 3, name

    tx = sl.ScaleByAdam(mu_dtype="bfloat16") | sl.ScaleByLearningRate(0.1)
    loaded = sl.checkpoint.load(adam.path, opt=sl.Optimizer(tx, MODEL))
    assert loaded.report.recoded == ("opt.scale_by_adam.mu.b", "opt.scale_by_adam.mu.w")
    assert_same_bits(loaded["opt"], adam.opt.rebind(MODEL, tx=tx)[0])


def test_a_lost_or_another_wrapper_is_reported_and_what_fits_is_loaded(path, adam):
    _, opt = after_steps(sl.adam(0.1).every_k(1))
    sl.checkpoint.save(path, opt=opt)
    plain = sl.Optimizer(sl.adam(0.1), MODEL)
    with pytest.raises(sl.checkpoint.MismatchError, match=r"only in the file: opt[.]every_k"):
        sl.checkpoint.load(path, opt=plain)
    lost = sl.checkpoint.load(path, opt=plain, strict=False)
    assert all("every_k" in name for name in lost.report.unexpected)
    averaged = sl.Optimizer(sl.adam(0.1).average(0.9), MODEL)
    gained = sl.checkpoint.load(adam.path, opt=averaged, strict=False)
    assert all(name.startswith("opt.average") for name in gained.report.missing)
    for loaded, saved in ((lost, opt), (gained, adam.opt)):
        states = (o.state_of("scale_by_adam") for o in (loaded["opt"], saved))
        assert_same_bits(*states)


CHANGED = {
    "clip and record": sl.ClipByGlobalNorm(1.0) | sl.adam(0.1).record(),
    "partition": sl.adam(0.1).partition({sl.where.path("b"): sl.adam(0.1)}),
    "average of every_k": sl.adam(0.1).every_k(2).average(0.9),
    "lion": sl.lion(0.1),
    "sgd": sl.sgd(0.1, momentum=0.9),
    "two": sl.adam(0.1) | sl.ScaleByAdam(),
}


@pytest.mark.parametrize("name", sampled(CHANGED, "clip and record", "lion"))
@pytest.mark.parametrize("grown", [False, True], ids=["same model", "grown model"])
def test_a_loaded_state_is_what_rebind_makes(adam, name, grown):
    model = {"w": MODEL["w"], "b": jnp.ones(5), "new": jnp.ones(2)} if grown else MODEL
    fresh = sl.Optimizer(CHANGED[name], model)
    loaded = sl.checkpoint.load(adam.path, opt=fresh, strict=False)
    expected, report = adam.opt.rebind(model, tx=CHANGED[name])
    assert_same_bits(loaded["opt"], expected)
    assert {f"opt.{name}" for name in report.carried} <= {*loaded.report.loaded}
    assert {*loaded.report.reshaped} <= {f"opt.{name}" for name in report.reshaped}
    assert {f"opt.{name}" for name in report.dropped} >= {*loaded.report.unexpected}


def test_hyperparameters_are_those_of_the_program_or_on_request_of_the_file(path):
    sl.checkpoint.save(path, opt=sl.Optimizer(sl.adam(0.1, b1=0.5), MODEL))
    mine = sl.Optimizer(sl.adam(0.01, b1=0.5), MODEL)
    with pytest.warns(UserWarning, match="other hyperparameters") as caught:
        loaded = sl.checkpoint.load(path, opt=mine)
    assert str(caught[0].message) == (
        f"The checkpoint '{path}' has other hyperparameters, and those of the program are kept: "
        "opt.scale_by_learning_rate.learning_rate is 0.1 in the file and 0.01 here. To continue "
        'with those of the file, pass `hyperparams="file"`.'
    )
    assert caught[0].filename == __file__
    assert float(loaded["opt"].hyperparams["learning_rate"]) == pytest.approx(0.01)
    assert loaded.report.hyperparams.keys() == {"opt.scale_by_learning_rate.learning_rate"}

    schedule = sl.schedules.linear(0.1, 0.0, transition_steps=10)
    _, opt = after_steps(sl.adam(schedule, b1=0.5))
    sl.checkpoint.save(path, opt=opt)
    tx = sl.ClipByGlobalNorm(1.0) | sl.adam(sl.schedules.linear(0.3, 0.2, transition_steps=9))
    mine = sl.Optimizer(tx, MODEL)
    only_here = r"program:\n  only in the program: opt[.]clip_by_global_norm[.]max_norm\nPass"
    with pytest.raises(sl.checkpoint.MismatchError, match=only_here):
        sl.checkpoint.load(path, opt=mine, hyperparams="file")
    loaded = sl.checkpoint.load(path, opt=mine, hyperparams="file", strict=False)["opt"]
    assert loaded.hyperparams["learning_rate"] == opt.hyperparams["learning_rate"]
    assert loaded.hyperparams["b1"] == 0.5
    assert loaded.hyperparams["max_norm"] == 1.0

    sl.checkpoint.save(path, opt=sl.Optimizer(sl.ClipByGlobalNorm(1.0) | sl.adam(0.1), MODEL))
    opt = sl.Optimizer(sl.adam(0.1), MODEL)
    assert sl.checkpoint.load(path, opt=opt).report.fits
    with pytest.raises(sl.checkpoint.MismatchError, match=r"in the file: opt[.]clip_by_gl"):
        sl.checkpoint.load(path, opt=opt, hyperparams="file")
