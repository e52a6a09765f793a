"""Files that nobody could read: they are not written, or refused, and older ones are found."""

import collections
import datetime
import enum
import errno
import json
import os
import random
import stat
import types
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
from trained import blank

import slalom as sl
from helpers import after_steps
from slalom.checkpoint import _file, _format, _replace


def test_header_text_is_readable_codecs_never_run_and_ages_complete(path):
    for trees, message in (
        ({"__metadata__": jnp.ones(2)}, "The name '__metadata__' is reserved"),
        ({"": jnp.ones(2)}, "names must not be empty"),
        ({"a.b": jnp.ones(2)}, "A tree cannot have the name 'a.b'"),
        ({"model": {"\ud800": jnp.ones(2)}}, r"The name 'model.\ud800' has a character"),
        ({"loader": {"\ud800": 1}}, r"The name 'loader.\ud800' has a character"),
        ({"x": np.array(["text"])}, "'x' is an array of dtype <U4"),
    ):
        with pytest.raises((ValueError, TypeError)) as caught:
            sl.checkpoint.save(path, **trees)
        assert message in str(caught.value)
        assert not path.exists()

    class Odd(sl.AbstractStatelessTransform):
        def apply(self, updates, params, context):
            return updates

        def __repr__(self):
            return "\ud800"

    sl.checkpoint.save(path, opt=sl.Optimizer(Odd() | sl.sgd(0.1), {"w": jnp.ones(2)}))
    with safetensors.safe_open(path, framework="numpy") as file:
        assert "opt.count" in [*file.keys()]

    model = {"w": jnp.ones(5000)}
    sl.checkpoint.save(path, opt=sl.Optimizer(sl.lion(0.1).store("int8"), model))
    texts = ["__import__('os').abort()", "sl.codecs.int8(x=1)", "sl.codecs.offload()", "(", "x" * 9]
    texts += ["sl.codecs.__dir__()", "sl.codecs.cast('nonsense')", "sl.codecs.int8(*[1] * 9)"]
    layouts, whole = sl.checkpoint.header(path)["layouts"], path.read_bytes()
    for text in texts:
        forged(path, with_text(layouts=layouts.replace("sl.codecs.int8()", text)))
        loaded = sl.checkpoint.load(path, opt=sl.Optimizer(sl.lion(0.1), model), strict=False)
        assert loaded.report.retyped == {"opt.scale_by_lion.mu.w": (text, "float32")}
        path.write_bytes(whole)

    model = {"w": jnp.ones(2), "b": jnp.ones(3)}
    opt = sl.Optimizer(sl.adam(0.1), model).reset(model, where=sl.where.path("b"))
    sl.checkpoint.save(path, opt=opt)
    layouts = json.loads(sl.checkpoint.header(path)["layouts"])
    last = layouts["opt"]["state"][-1]
    slot = last["slot"] | {"param": "z", "local": "nu.z"}
    layouts["opt"]["state"].append(last | {"slot": slot})
    forged(path, with_text(layouts=json.dumps(layouts)))
    with pytest.raises(sl.checkpoint.DamagedError, match=r"adam[.]age' does not have 3 entries"):
        sl.checkpoint.load(path, opt=sl.Optimizer(sl.adam(0.1), model))
    forged(path, with_text(layouts=sl.checkpoint.header(path)["layouts"].replace("age", "other")))
    with pytest.raises(sl.checkpoint.DamagedError, match=r"malformed .'opt.scale_by_adam[.]other'"):
        sl.checkpoint.load(path, opt=sl.Optimizer(sl.adam(0.1), model))


def test_a_header_that_is_too_large_is_refused(path, monkeypatch):
    sl.checkpoint.save(path, n=1)
    monkeypatch.setattr(_format, "LARGEST_HEADER", 10_000)
    with pytest.raises(ValueError, match=r"would have 200 arrays and a header of [\d,]+ bytes"):
        sl.checkpoint.save(path, model=[np.ones(1)] * 200)
    assert sl.checkpoint.load(path, n=0)["n"] == 1


@pytest.mark.parametrize("size", [10**6, pytest.param(101 * 10**6, marks=pytest.mark.slow)])
def test_long_state_of_a_loader_is_in_the_body(size, path):
    text = "\ud800ü" + "x" * size
    sl.checkpoint.save(path, loader={"text": text, "numbers": [3] * 1000, "z": 1 + 2j})
    like = {"text": "", "numbers": [0] * 1000, "z": 0j}
    loaded = sl.checkpoint.load(path, loader=like)["loader"]
    assert loaded["text"] == text
    assert loaded["numbers"] == [3] * 1000
    assert loaded["z"] == 1 + 2j
    with safetensors.safe_open(path, framework="numpy") as file:
        assert len(str(file.metadata())) < 5000


class Phase(enum.IntEnum):
    WARM = 1


class Foreign:
    """A module of another library."""

    def __call__(self):
        return self

    def state_dict(self):
        return {}


UNSAVABLE = {
    "x.name": Phase.WARM,
    "np.frombuffer(x, np.uint8)": b"bytes",
    "x.isoformat()": datetime.datetime(2026, 1, 2),
    "x.total_seconds()": datetime.timedelta(1),
    "x.bit_generator.state": np.random.default_rng(0),
    "x.get_state()": np.random.RandomState(0),
    "x.state`": np.random.PCG64(0),
    "x.getstate()": random.Random(0),
    "dict(x)": collections.Counter("aab"),
    "list(x)": collections.deque([1, 2]),
    "a list": {1, 2},
    "np.asarray(x)": types.SimpleNamespace(__array__=np.ones(2)),
    "x.state_dict()": Foreign(),
    "a plain Python number": type("Money", (float,), {})(1.5),
    "or leave it out": Path("data"),
}


@pytest.mark.parametrize("remedy", UNSAVABLE)
def test_no_leaf_is_left_out_in_silence(remedy, path):
    loader = {"epoch": 1, "x": UNSAVABLE[remedy]}
    calls = (
        lambda: sl.checkpoint.save(path, loader=loader),
        lambda: sl.checkpoint.to_dict(loader=loader),
        lambda: sl.checkpoint.from_dict({"loader.epoch": 1}, loader=loader),
    )
    for call in calls:
        with pytest.raises(TypeError) as caught:
            call()
        assert str(caught.value).startswith("'loader.x' is a `")
        assert remedy in str(caught.value)
    in_model = {"w": jnp.ones(2), "x": UNSAVABLE[remedy]}
    if remedy in ("np.asarray(x)", "x.state_dict()"):
        with pytest.raises(TypeError, match=r"'model[.]x' is a `"):
            sl.checkpoint.save(path, model=in_model)
    else:
        sl.checkpoint.save(path, model=in_model, functions=[jnp.tanh, jnp.float32, object()])


def forged(path, change=None, raw=None):
    """A file with a changed header, whose checksum is right."""
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    layout = json.loads(whole[8 : 8 + length])
    text = layout.pop("__metadata__")
    if change is not None:
        change(text, layout)
    text = {"header_checksum": "0" * 8} | {k: v for k, v in text.items() if k[:8] != "header_c"}
    head = json.dumps({"__metadata__": text} | layout).encode() if raw is None else raw
    at = head.index(b"0" * 8)
    head = head[:at] + f"{zlib.crc32(head):08x}".encode() + head[at + 8 :]
    path.write_bytes(len(head).to_bytes(8, "little") + head + whole[8 + length :])


START = '{"__metadata__": {"header_checksum": "00000000"'


def with_text(**changes):
    return lambda text, layout: text.update(changes)


def with_place(**changes):
    return lambda text, layout: layout["model.w"].update(changes)


TEXTS = {
    "checksums": ("{", "{}", "[1]"),
    "count": (3,),
    "format": ("x",),
    "format_version": ("0", "-1", "x", "²", "9" * 5000),
    "layouts": ("[1]", '{"opt": 3}'),
}
PLACES = {
    "dtype": ("F16", "X", []),
    "shape": ([3], [-2, -1], [2.0], [2**70], 2),
    "data_offsets": ([10**12, 10**12 + 8], []),
}
MALFORMED = {
    **{f"no {k}": lambda text, _, k=k: text.pop(k) for k in ("dtypes", *TEXTS) if k != "count"},
    **{f"{key} = {x!r}": with_text(**{key: x}) for key in TEXTS for x in TEXTS[key]},
    **{f"{key} = {x!r}": with_place(**{key: x}) for key in PLACES for x in PLACES[key]},
    "overlapping": lambda text, layout: layout.update(z=dict(layout["model.w"])),
    "no place": lambda text, layout: layout.update({"model.w": {}}),
    "a place that is a number": lambda text, layout: layout.update({"model.w": 3}),
}
RAW = {
    "deep": START + '}, "x": ' + "[" * 100_000,
    "metadata of numbers": '{"__metadata__": {"header_checksum": "00000000", "a": 3}}',
    "not JSON": START,
    "not UTF-8": START.encode() + b"\xff",
    "a huge number": START + '}, "x": ' + "9" * 10_000 + "}",
}


JUNK = None, 0, -1, 2**70, float("nan"), "", "x", "opt.count", [], {}, ["a"], "key<x>", [2**40] * 2
ODD_DTYPES = (
    ",",
    "longdouble",
    "O",
    "V99999999999",
    "f4,f4",
    "(2,)f4",
    "M8[s]",
    "int4",
    "[('a', 'f4')]",
)


def nodes_of(x):
    """All places in a tree of JSON: what holds each, and its key."""
    inside = x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list) else ()
    return [place for key, child in inside for place in ((x, key), *nodes_of(child))]


def mutated(x, random):
    """A tree of JSON in which something is replaced, removed, or where another part belongs."""
    (holder, key), (other, there) = random.choices(nodes_of(x), k=2)
    junk = random.choice(JUNK + (ODD_DTYPES if key == "dtype" else ()))
    holder[key] = random.choice([junk, json.loads(json.dumps(other[there]))])
    if random.random() < 0.2:
        holder.pop(key)
    return x


@pytest.mark.slow
def test_any_layout_is_loaded_or_refused_by_name(path):
    random_ = random.Random(0)
    model = {"w": jnp.ones((4, 40)), "b": jnp.ones(3)}
    groups = {sl.where.path("w"): sl.adamw(0.1).every_k(2)}
    opt = sl.Optimizer(sl.lion(0.1).partition(groups).store("int8", min_size=4), model)
    plain = sl.Optimizer(sl.lion(0.1).partition(groups), model)
    sl.checkpoint.save(path, model=model, opt=opt, n=1)
    whole, texts = path.read_bytes(), sl.checkpoint.header(path)
    refused = 0
    for _ in range(300):
        name = random_.choice(["layouts", "layouts", "checksums"])
        text = json.dumps(mutated(json.loads(texts[name]), random_))
        path.write_bytes(whole)
        forged(path, with_text(**{name: text}))
        try:
            fresh = {"model": model, "opt": random_.choice([opt, plain]), "n": 0}
            sl.checkpoint.load(path, strict=random_.random() < 0.5, **fresh)
        except (sl.checkpoint.DamagedError, sl.checkpoint.MismatchError):
            refused += 1
    assert refused > 100


@pytest.mark.parametrize("dtype", ODD_DTYPES)
def test_an_encoded_leaf_has_a_dtype_of_parameters(dtype, path):
    opt = sl.Optimizer(sl.lion(0.1).store("int8"), {"w": jnp.ones(5000)})
    sl.checkpoint.save(path, opt=opt)
    layouts = sl.checkpoint.header(path)["layouts"].replace("float32", dtype)
    forged(path, with_text(layouts=layouts))
    with pytest.raises(sl.checkpoint.DamagedError):
        sl.checkpoint.load(path, opt=opt)


@pytest.fixture
def two(tmp_path):
    """The last two checkpoints of a run, of steps 1 and 2."""
    rolling = sl.checkpoint.Rolling(tmp_path, keep=2)
    for n in (1, 2):
        rolling.save(n, model={"w": jnp.full(2, n, jnp.float32)})
    return rolling


def assert_the_first_is_found(rolling):
    with pytest.warns(UserWarning, match="It is skipped"):
        assert rolling.load(model={"w": jnp.ones(2)})["model"]["w"][0] == 1
    with pytest.warns(UserWarning, match="It is skipped"):
        assert rolling.latest().name == "step-00000001.safetensors"


def test_a_malformed_header_is_refused_and_an_older_file_is_found(two):
    path = two.latest()
    whole = path.read_bytes()
    for case in [*MALFORMED, *RAW]:
        path.write_bytes(whole)
        raw = RAW.get(case)
        forged(path, MALFORMED.get(case), raw.encode() if isinstance(raw, str) else raw)
        with pytest.raises(sl.checkpoint.DamagedError) as caught:
            sl.checkpoint.load(path, model={"w": jnp.ones(2)})
        assert f"'{path}' is damaged: its " in str(caught.value), case
        assert_the_first_is_found(two)


@pytest.mark.parametrize("version", range(1, _format.VERSION + 1))
def test_a_file_of_each_version_is_read(version, path):
    model = {"w": jnp.linspace(-1, 1, 6).reshape(2, 3), "b": jnp.ones(3, "bfloat16")}
    tx = sl.ClipByGlobalNorm(9.0) | sl.adam(0.1).store("int8", min_size=4).every_k(2)
    model, opt = after_steps(tx, 5, model, jax.tree.map(jnp.ones_like, model))
    order = np.arange(3)
    more = {"key": jax.random.key(3), "loader": {"n": 3, "x": "ü", "z": 1 + 2j, "order": order}}
    trees = {"model": model, "opt": opt, **more}
    fresh = {"n": 0, "x": "", "z": 0j, "order": 0 * order}
    fresh = {"model": blank(model), "opt": blank(opt), "key": jax.random.key(0), "loader": fresh}
    file = Path(__file__).parent / "files" / f"version-{version}.safetensors"
    loaded = sl.checkpoint.load(file, hyperparams="file", **fresh)
    for x, expected in zip(*map(jax.tree.leaves, (dict(loaded), trees)), strict=True):
        if isinstance(x, str) or jnp.issubdtype(jnp.asarray(x).dtype, jax.dtypes.prng_key):
            assert x == expected
        else:
            # Some entries are small differences of numbers near 1, so round-off is absolute.
            np.testing.assert_allclose(*map(np.complex128, (x, expected)), rtol=1e-5, atol=1e-7)
    if version == _format.VERSION:
        # A change of form raises the version.
        sl.checkpoint.save(path, **trees)
        texts = [sl.checkpoint.header(of) for of in (file, path)]
        assert [*texts[0]] == [*texts[1]]
        for name in ("layouts", "dtypes", "values"):
            assert texts[0][name] == texts[1][name]


def newer(path):
    path.unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_format, "VERSION", 2)
        sl.checkpoint.save(path, n=2)


def flipped(path):
    whole = path.read_bytes()
    at = whole.index(b'"format_version": "1"') + 19
    path.write_bytes(whole[:at] + b"3" + whole[at + 1 :])


def directory(path):
    path.unlink()
    path.mkdir()


def dangling(path):
    path.unlink()
    path.symlink_to(path.parent / "nowhere")


def unreadable(path):
    if os.geteuid() == 0:
        path.unlink()
        path.symlink_to(path)  # root may read everything, but no link to itself
    else:
        path.chmod(0)


def pipe(path):
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("spoil", [newer, flipped, directory, dangling, unreadable, pipe])
def test_rolling_passes_over_what_it_cannot_read(spoil, two):
    spoil(two.latest())
    assert_the_first_is_found(two)


def test_an_older_file_stays_until_the_new_one_is_known_to_be_whole(tmp_path, monkeypatch):
    rolling = sl.checkpoint.Rolling(tmp_path, keep=1)
    rolling.save(1, x=np.zeros(10))
    write = _file.write

    def written_badly(path, *args, **kwargs):
        write(path, *args, **kwargs)
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + b"\1")

    monkeypatch.setattr(_file, "write", written_badly)
    with pytest.raises(sl.checkpoint.DamagedError, match="does not match its checksum"):
        rolling.save(2, x=np.zeros(10))
    assert rolling.steps == (1, 2)
    with pytest.warns(UserWarning, match="It is skipped"):
        assert rolling.latest().name == "step-00000001.safetensors"


def test_every_name_that_a_file_may_have_can_be_saved_to(tmp_path):
    for name in ("r" * 255, "ü" * 127, "run\nagain"):
        path = tmp_path / name
        leftover = tmp_path / f".{_replace._shortened(name)}.00000000.partial"
        leftover.touch()
        sl.checkpoint.save(path, n=1)
        assert sl.checkpoint.load(path, n=0)["n"] == 1
        assert [p.name for p in tmp_path.iterdir()] == [name]
        path.unlink()
    with pytest.raises(OSError, match=r"its name has 256 bytes, which is too long. Shorten it"):
        sl.checkpoint.save(tmp_path / ("r" * 256), n=1)


def test_a_directory_that_cannot_be_synced_is_no_failed_save(path, monkeypatch):
    sl.checkpoint.save(path, n=1)

    def fail(directory):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(_replace, "_sync", fail)
    with pytest.raises(OSError, match="is written and in place") as caught:
        sl.checkpoint.save(path, n=2)
    assert "old file" not in str(caught.value)
    assert sl.checkpoint.load(path, n=0)["n"] == 2


def test_a_file_keeps_its_mode_and_what_is_no_file_stays(path, tmp_path):
    sl.checkpoint.save(path, n=1)
    path.chmod(0o600)
    sl.checkpoint.save(path, n=2)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="it is a device or a pipe, not a file"):
        sl.checkpoint.save(pipe, n=1)
    assert pipe.is_fifo()


def unable(*args):
    raise OSError(errno.ENOLCK, "No locks available")


@pytest.mark.parametrize("locks", [None, types.SimpleNamespace(flock=unable, LOCK_EX=2, LOCK_NB=4)])
def test_without_locks_only_old_temporary_files_are_removed(locks, path, monkeypatch):
    monkeypatch.setattr(_replace, "fcntl", locks)
    present, old = (path.parent / f".{path.name}.0000000{n}.partial" for n in (1, 2))
    for leftover in (present, old):
        leftover.touch()
    os.utime(old, (0, 0))
    sl.checkpoint.save(path, n=1)
    assert {*path.parent.iterdir()} == {path, present}
