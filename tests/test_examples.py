"""The example scripts run as a newcomer runs them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
DIGITS, DQN = EXAMPLES / "digits.py", EXAMPLES / "dqn.py"


def run(*command):
    """Runs Python as a newcomer does: without the strictness of the tests."""
    strict = ("SLALOM_TYPECHECK", "XLA_FLAGS")
    environment = {name: value for name, value in os.environ.items() if name not in strict}
    return subprocess.run(
        [sys.executable, *map(str, command)],
        env=environment,
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
