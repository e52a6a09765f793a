"""A strict world: types checked at run time, no implicit promotion, four fake devices.

`test_shard_state.py` runs itself again with eight of them.
"""

import gc
import os

# Before JAX and Slalom are imported: they read these once.
os.environ["SLALOM_TYPECHECK"] = "1"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count="
    + os.environ.get("SLALOM_TEST_DEVICES", "4")
)

import jax
import pytest
from jaxtyping import config as jaxtyping_config

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


files_run = []


@pytest.fixture
def x64():
    """Double precision for one test."""
    with jax.enable_x64(True):
        yield


NOT_TYPECHECKED = {
    "test_parity",
    "test_projections",
    "test_reset_and_rebind",
    "test_resume",
    "test_schedule_clock",
    "test_schedules",
    "test_shard_state",
}
"""Files that take long, and whose rules and schedules are type-checked by other files too. Checking
types takes a third of the time of a test."""


@pytest.fixture(scope="module", autouse=True)
def typecheck(request):
    """Turns the checks of types off where others make them."""
    jaxtyping_config.update("jaxtyping_disable", request.module.__name__ in NOT_TYPECHECKED)
    yield
    jaxtyping_config.update("jaxtyping_disable", False)


@pytest.fixture(scope="module", autouse=True)
def free_memory():
    """Forgets compiled programs after every few files: kept, they take gigabytes.

    Not after each: JAX would compile its own small programs again for every file.
    """
    yield
    files_run.append(None)
    if len(files_run) % 5 == 0:
        jax.clear_caches()
        gc.collect()
