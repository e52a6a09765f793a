"""The example scripts run as a newcomer runs them."""

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
DIGITS, DQN = EXAMPLES / "digits.py", EXAMPLES / "dqn.py"
DISTRIBUTED, SWEEP = EXAMPLES / "distributed.py", EXAMPLES / "sweep.py"


def without_strictness():
    """The environment of a newcomer: without the strictness of the tests."""
    strict = ("SLALOM_TYPECHECK", "XLA_FLAGS")
    return {name: value for name, value in os.environ.items() if name not in strict}


def run(*command):
    """Runs Python as a newcomer does."""
    return subprocess.run(
        [sys.executable, *map(str, command)],
        env=without_strictness(),
        capture_output=True,
        text=True,
        check=False,
    )


def accuracy_on_test(output):
    (accuracy,) = re.findall(r"test accuracy ([\d.]+)%", output)
    return float(accuracy) / 100


@pytest.mark.slow
def test_digits_prints_optimizer_and_accuracy_and_draws(tmp_path):
    picture = tmp_path / "tmp.png"
    done = run(DIGITS, "--quick", "--out", picture)
    assert done.returncode == 0, done.stderr
    assert "sl.ClipByGlobalNorm(1.0)" in done.stdout
    assert ").every_k(2)" in done.stdout
    assert 0.5 < accuracy_on_test(done.stdout) <= 1  # two epochs; one in ten is chance
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.slow
def test_digits_says_how_to_install_what_it_misses():
    code = f"""
import runpy, sys
sys.modules["tqdm"] = None
runpy.run_path({str(DIGITS)!r}, run_name="__main__")
"""
    done = run("-c", code)
    assert done.returncode == 1
    assert "tqdm" in done.stderr
    assert 'pip install -e ".[examples]"' in done.stderr


@pytest.mark.slow
def test_digits_reaches_97_percent(tmp_path):
    done = run(DIGITS, "--out", tmp_path / "digits.png")
    assert done.returncode == 0, done.stderr
    assert accuracy_on_test(done.stdout) >= 0.97


def steps_upright(output):
    (steps,) = re.findall(r"stays up for ([\d.]+) of 200 steps", output)
    return float(steps)


@pytest.mark.slow
def test_dqn_learns_and_draws(tmp_path):
    picture = tmp_path / "dqn.png"
    done = run(DQN, "--quick", "--out", picture)
    assert done.returncode == 0, done.stderr
    assert steps_upright(done.stdout) > 60  # random actions last for about 20
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.slow
def test_sweep_finds_a_learning_rate_and_draws(tmp_path):
    picture = tmp_path / "sweep.png"
    done = run(SWEEP, "--quick", "--out", picture)
    assert done.returncode == 0, done.stderr
    assert "sweep of 12 runs (learning_rate: 4, weight_decay: 3) with 44 steps" in done.stdout
    (accuracy,) = re.findall(r"test accuracy of the best run ([\d.]+)%", done.stdout)
    assert float(accuracy) > 70  # two epochs
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


# --- several processes --------------------------------------------------------------------------


HEARTBEAT = 10  # seconds, as the example states


def worker(process, port, log):
    """Starts one of the processes that `examples/distributed.py` starts."""
    command = [DISTRIBUTED, "--process", process, "--port", port, "--epochs", 10_000]
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, *map(str, command)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**without_strictness(), "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"},
        )


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def wait_for(condition, seconds):
    """Whether a condition becomes true in time."""
    end = time.monotonic() + seconds
    while not (true := condition()) and time.monotonic() < end:
        time.sleep(0.1)
    return true


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@pytest.mark.slow
def test_processes_and_one_process_end_with_the_same_bits(tmp_path):
    picture = tmp_path / "distributed.png"
    done = run(DISTRIBUTED, "--quick", "--out", picture)
    assert done.returncode == 0, done.stderr
    assert "one process with 4 devices: the same bits" in done.stdout
    assert re.search(r"one process with 1 device: apart by [\d.]+e-0[4-9]", done.stdout)
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.slow
@pytest.mark.parametrize("survivor", [0, 1])
def test_a_process_whose_peer_dies_ends_within_the_heartbeat_timeout(tmp_path, survivor):
    port, logs = free_port(), [tmp_path / f"{i}.txt" for i in range(2)]
    both = [worker(i, port, log) for i, log in enumerate(logs)]
    try:
        # They print the plan right before they compile the step.
        ready = wait_for(lambda: all("total" in log.read_text() for log in logs), 90)
        assert ready, [log.read_text() for log in logs]
        time.sleep(8)
        assert [process.poll() for process in both] == [None, None]
        both[1 - survivor].kill()
        start = time.monotonic()
        status = both[survivor].wait(timeout=60)
        assert time.monotonic() - start < HEARTBEAT + 5
        assert status != 0
    finally:
        for process in both:
            process.kill()
            process.communicate()


@pytest.mark.slow
def test_processes_end_with_a_launcher_that_is_killed(tmp_path):
    command = [sys.executable, DISTRIBUTED, "--epochs", "10000", "--out", tmp_path / "plot.png"]
    launcher = subprocess.Popen(
        list(map(str, command)), env=without_strictness(), stdout=subprocess.DEVNULL
    )
    try:
        path = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
        assert wait_for(lambda: len(path.read_text().split()) == 2, 60)
        children = path.read_text().split()
    finally:
        launcher.kill()
        launcher.wait()
    assert wait_for(lambda: not any(map(is_running, children)), 30)
