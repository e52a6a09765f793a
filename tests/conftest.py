"""A strict world: types checked at run time, no implicit promotion, four fake devices.

`test_shard_state.py` runs itself again with eight of them.
"""

import gc
import os
import shutil
import sys
from pathlib import Path

from jaxlib.version import __version_info__ as JAXLIB

# Before JAX and Slalom are imported: they read these once.
# A run on more devices repeats what has been checked.
os.environ["SLALOM_TYPECHECK"] = "0" if "SLALOM_TEST_DEVICES" in os.environ else "1"
os.environ["JAX_PLATFORMS"] = os.environ.get("SLALOM_TEST_PLATFORMS", "cpu")
# Compiling takes most of the time of the tests, and a third of it with XLA's older emitters and
# without LLVM's optimizations. Tests of bits need those of users: see `compiled_as_users`. XLA ends
# a process that passes an unknown flag, as this one may be in later versions.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=" + os.environ.get("SLALOM_TEST_DEVICES", "4"),
        ""
        if "SLALOM_TEST_AS_USERS" in os.environ or JAXLIB >= (0, 11)
        else "--xla_cpu_use_fusion_emitters=false",
    ]
)

import jax
import jaxtyping
import pytest
from jaxtyping import config as jaxtyping_config

AS_USERS = "fusion_emitters" not in os.environ["XLA_FLAGS"]

# Programs that another worker or an earlier run has compiled are read instead of compiled again.
PROGRAMS = Path(__file__).parents[1] / ".pytest_cache" / "jax"
jax.config.update("jax_compilation_cache_dir", str(PROGRAMS))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_disable_most_optimizations", not AS_USERS)

apply_checks = jaxtyping.jaxtyped
checks_of = {}


def jaxtyped(*, typechecker):
    """Checks the types of functions, of inner ones only if they are defined while checks are on.

    Inner functions are defined at each call of the outer one. Making their checks takes more than
    a millisecond each, and a quarter of the time of most tests. So they are made once.
    """

    def made_once(function):
        try:
            key = function.__module__, function.__code__, *function.__annotations__.items()
            if key not in checks_of:
                checks_of[key] = typechecker(function)
        except (AttributeError, TypeError):  # a class, or a hint that cannot be hashed
            return typechecker(function)
        return checks_of[key]

    def decorate(function):
        if jaxtyping_config.jaxtyping_disable and "<locals>" in function.__qualname__:
            return function
        return apply_checks(function, typechecker=made_once)

    return decorate


jaxtyping.jaxtyped = jaxtyped  # Slalom has not been imported yet

# Bytecode is cached as well. Compiling the sources again would double the time of collection.
sys.dont_write_bytecode = False
sys.pycache_prefix = str(PROGRAMS.with_name("bytecode"))


def pytest_configure(config):
    """Empties the cache of compiled programs when it has grown large, before any worker starts."""
    is_worker = hasattr(config, "workerinput")
    if not is_worker and sum(file.stat().st_size for file in PROGRAMS.glob("*")) > 500e6:
        shutil.rmtree(PROGRAMS)


def pytest_collection():
    """Turns the checks of types off while modules of tests are imported, but not before Slalom is.

    What is imported without them stays unchecked.
    """
    import slalom  # noqa: F401

    jaxtyping_config.update("jaxtyping_disable", True)


def pytest_collection_finish():
    """Lets every Python that a test starts be a user's: with checks, the import takes seconds."""
    os.environ["SLALOM_TYPECHECK"] = "0"
    # Tracing makes many objects, and searching them for cycles takes a fifteenth of the time.
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)


@pytest.fixture
def compiled_as_users():
    """Skips a test of bits unless programs are compiled as users compile them."""
    if not AS_USERS:
        pytest.skip("XLA's older emitters round in other places: set SLALOM_TEST_AS_USERS=1")


@pytest.fixture
def x64():
    """Double precision for one test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def as_on(monkeypatch):
    """A function that chooses the branches for a platform in what is traced from then on."""

    def choose(platform):
        def chosen(*arrays, default, **branches):
            return branches.get(platform, default)(*arrays)

        jax.clear_caches()  # of functions that were traced for another platform
        monkeypatch.setattr(jax.lax, "platform_dependent", chosen)

    yield choose
    jax.clear_caches()


TYPECHECKED = {
    *("docs", "refusals", "test_table", "test_types", "test_typecheck", "test_methods"),
    *("test_plan", "test_describe", "test_combine", "test_compute_dtype", "test_loop_tools"),
    *("test_checkpoint", "test_checkpoint_changes"),
}
"""The folders and files whose tests check types. `test_table` does so for all rows. Elsewhere it
would be the same again, and take a third of the time."""


@pytest.fixture(autouse=True)
def typecheck(request):
    """Turns the checks of types off in slow tests, and where other tests make them."""
    tiers = {mark.name for mark in request.node.iter_markers()}
    places = {request.path.stem, request.path.parent.name}
    off = bool(tiers & {"slow", "exhaustive"}) or not places & TYPECHECKED
    jaxtyping_config.update("jaxtyping_disable", off)
    yield
    jaxtyping_config.update("jaxtyping_disable", False)


@pytest.fixture
def typechecked(typecheck):
    """Checks types in a slow test too."""
    jaxtyping_config.update("jaxtyping_disable", False)


@pytest.fixture(scope="session")
def row(request):
    """A row of the table, with what its tests share."""
    from table.row import Row  # after Slalom's checks are set up

    return Row(request.param)


tests_run = []


@pytest.fixture(autouse=True)
def free_memory():
    """Forgets compiled programs now and then: kept, they take gigabytes.

    Not often: JAX would compile its own small programs again.
    """
    yield
    tests_run.append(None)
    if len(tests_run) % 400 == 0:
        jax.clear_caches()
        gc.collect()
