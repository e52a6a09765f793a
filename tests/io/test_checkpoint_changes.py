"""Checkpoints of another program: differences are reported by path, and what fits is loaded."""

import itertools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from trained import MODEL, after_steps, blank

import slalom as sl
from helpers import assert_same_bits, sampled, slow_except


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
    assert "It was saved with the keywords model, n: load it with the same." in str(caught.value)
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
    "of another dtype": sl.ScaleByAdam(mu_dtype="bfloat16") | sl.ScaleByLearningRate(0.1),
}
"""What the whole state of `sl.adam(0.1)` fits."""


def test_changed_wrappers_load_what_fits(adam, path):
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
        assert_same_bits(*(x.state_of("scale_by_adam") for x in (loaded["opt"], saved)))


def test_copies_that_were_not_saved_do_not_follow_parameters_that_were(adam):
    model = blank(MODEL) | {"new": jnp.ones(2)}
    opt = sl.Optimizer((sl.adam(0.1) | sl.ScaleByDog()).lookahead(2, 0.5), model)
    names = [f"opt.outer.{x}.{y}" for x in ("scale_by_dog.init_params", "slow") for y in "bw"]
    with pytest.warns(UserWarning, match=f"not have {', '.join(names)}: these copies"):
        sl.checkpoint.load(adam.path, model=model, opt=opt, strict=False)


CHANGED = {
    "clip and record": sl.ClipByGlobalNorm(1.0) | sl.adam(0.1).record(),
    "partition": sl.adam(0.1).partition({sl.where.path("b"): sl.adam(0.1)}),
    "average of every_k": sl.adam(0.1).every_k(2).average(0.9),
    "lion": sl.lion(0.1),
    "sgd": sl.sgd(0.1, momentum=0.9),
    "two": sl.adam(0.1) | sl.ScaleByAdam(),
}


@pytest.mark.parametrize("name", [*CHAINS, *sampled(CHANGED, "clip and record", "lion")])
@pytest.mark.parametrize("grown", [False, True], ids=["same model", "grown model"])
def test_a_loaded_state_is_what_rebind_makes(adam, name, grown):
    model = {"w": MODEL["w"], "b": jnp.ones(5), "new": jnp.ones(2)} if grown else MODEL
    tx, is_whole = (CHAINS | CHANGED)[name], name in CHAINS and not grown
    loaded = sl.checkpoint.load(adam.path, opt=sl.Optimizer(tx, model), strict=is_whole)
    expected, report = adam.opt.rebind(model, tx=tx)
    assert_same_bits(loaded["opt"], expected)
    assert not is_whole or loaded.report.fits
    assert {*loaded.report.recoded} == {f"opt.{name}" for name in report.recoded}
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


PARAMS = {"w": jnp.linspace(-1, 1, 8192).reshape(64, 128), "b": jnp.ones(5)}


def saved(path, tx, params=PARAMS):
    grads = jax.tree.map(lambda p: jnp.sin(9 * p), params)
    _, opt = sl.Optimizer(tx, params).step(params, grads)
    sl.checkpoint.save(path, opt=opt)
    return opt


class halves(sl.codecs.AbstractCodec):
    """A codec that Slalom does not have."""

    def encode(self, x, spec, bits=None):
        return {"codes": x.astype(jnp.float16)}

    def decode(self, arrays, spec):
        return arrays["codes"].astype(spec.dtype)


STORED = {
    "plain": lambda tx: tx,
    "int8": lambda tx: tx.store("int8"),
    "dynamic8 and int4": lambda tx: tx.store({"nu": "dynamic8", "mu": "int4"}),
    "float8": lambda tx: tx.store("float8_e4m3fn"),
    "bfloat16": lambda tx: tx.store("bfloat16"),
    "mine": lambda tx: tx.store({"mu": halves()}),
}
PAIRS = [pair for pair in itertools.permutations(STORED, 2) if pair[0] != "mine"]
CASES = [(*pair, complex) for pair in PAIRS for complex in (False, True)]


@pytest.mark.parametrize("case", sampled(CASES, ("plain", "int8", False)), ids=repr)
def test_a_load_into_another_storage_is_what_rebind_makes(case, path):
    *pair, complex = case
    w = PARAMS["w"]
    params = {"w": jax.lax.complex(w, 2 * w) if complex else w, "b": PARAMS["b"]}
    before, after = (STORED[name](sl.adam(0.1)) for name in pair)
    opt = saved(path, before, params)
    expected, report = opt.rebind(params, tx=after)
    loaded = sl.checkpoint.load(path, opt=sl.Optimizer(after, params))
    assert_same_bits(loaded["opt"], expected)
    assert {*loaded.report.recoded} == {f"opt.{name}" for name in report.recoded} != set()
    assert loaded.report.fits
    assert "recoded:" in repr(loaded.report)
    abstract = eqx.filter_eval_shape(lambda: sl.Optimizer(after, params))
    assert_same_bits(sl.checkpoint.load(path, opt=abstract)["opt"], expected)


@pytest.mark.parametrize("outer", slow_except(["every_k", "average"], "average"))
def test_storage_changes_together_with_a_wrapper(outer, path):
    opt = saved(path, sl.adam(0.1))
    stored = sl.adam(0.1).store("int8")
    tx = stored.every_k(2) if outer == "every_k" else stored.average(0.9)
    loaded = sl.checkpoint.load(path, opt=sl.Optimizer(tx, PARAMS), strict=False)
    expected, _ = opt.rebind(PARAMS, tx=tx)
    assert_same_bits(loaded["opt"], expected)


CHANGES = {
    "missing": lambda x: None,
    "reshaped": lambda x: jnp.concatenate([x, x]),
    "retyped": lambda x: x.astype("float32" if x.dtype != jnp.float32 else "int32"),
}


@pytest.mark.parametrize("codec", slow_except(["int8", "dynamic8", "int4"], "int8"))
def test_arrays_of_an_encoded_leaf_are_taken_together_or_not_at_all(codec, path):
    tx = sl.adam(0.1).store(codec, min_size=1)
    opt, fresh = saved(path, tx), sl.Optimizer(tx, PARAMS)
    items, initial = (sl.checkpoint.to_dict(opt=x) for x in (opt, fresh))
    of_w = [name for name in items if ".mu.w." in name]
    assert len(of_w) > 1
    for name, (field, change) in itertools.product(of_w, CHANGES.items()):
        changed = {n: change(x) if n == name else x for n, x in items.items()}
        changed = {n: x for n, x in changed.items() if x is not None}
        with pytest.raises(sl.checkpoint.MismatchError, match=re.escape(name.rpartition(".")[0])):
            sl.checkpoint.from_dict(changed, opt=fresh)
        loaded = sl.checkpoint.from_dict(changed, opt=fresh, strict=False)
        assert not loaded.report.fits, field
        found = sl.checkpoint.to_dict(**loaded)
        assert_same_bits([found[n] for n in of_w], [initial[n] for n in of_w])
        # The other mean of the parameter starts anew with it, and those of others go on.
        for n in items:
            if ".nu.w" in n or ".mu.b" in n:
                assert_same_bits(found[n], (initial if ".nu.w" in n else items)[n])


def test_state_in_another_code_or_shape_or_with_another_is_reported_once(path):
    tx = sl.lion(0.1).store({"mu": halves()})
    sl.checkpoint.save(path, opt=sl.Optimizer(tx, PARAMS))
    name = "opt.store.scale_by_lion.mu.w.codes is halves() in the file and sl.codecs.int8() here"
    with pytest.raises(sl.checkpoint.MismatchError, match=re.escape(f"other dtypes: {name}\n")):
        sl.checkpoint.load(path, opt=sl.Optimizer(sl.lion(0.1).store("int8"), PARAMS))
    # Its own optimizer has it.
    assert sl.checkpoint.load(path, opt=sl.Optimizer(tx, PARAMS)).report.fits

    sl.checkpoint.save(path, opt=sl.Optimizer(sl.lion(0.1).store("int8"), PARAMS))
    params = {"w": jnp.ones((128, 64)), "b": jnp.ones(5)}
    for tx in (sl.lion(0.1).store("int8"), sl.lion(0.1).store("int4"), sl.lion(0.1)):
        loaded = sl.checkpoint.load(path, opt=sl.Optimizer(tx, params), strict=False)
        report = loaded.report
        assert [*report.reshaped.values()] == [("(64, 128)", "(128, 64)")]
        assert [*report.missing, *report.unexpected, *report.retyped] == []

    saved(path, sl.adam(0.1))
    params = {"w": jnp.ones((2, 3)), "b": jnp.ones(6)}
    with pytest.raises(sl.checkpoint.MismatchError) as caught:
        sl.checkpoint.load(path, opt=sl.Optimizer(sl.adam(0.1), params))
    assert "only in" not in str(caught.value)
    loaded = sl.checkpoint.load(path, opt=sl.Optimizer(sl.adam(0.1), params), strict=False)
    assert loaded.report.restarted == ("opt.scale_by_adam.age",)
    assert len(loaded.report.reshaped) == 4
    assert "restarted:   opt.scale_by_adam.age" in repr(loaded.report).splitlines()
