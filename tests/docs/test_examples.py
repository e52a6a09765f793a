"""The example scripts run as a newcomer runs them."""

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from newcomer import environment, run

EXAMPLES = Path(__file__).parents[2] / "examples"
DIGITS, DISTRIBUTED = EXAMPLES / "digits.py", EXAMPLES / "distributed.py"
SCRIPTS = sorted(path.stem for path in EXAMPLES.glob("*.py"))
PAGES = EXAMPLES.parent / "docs" / "examples"
PNG = b"\x89PNG\r\n\x1a\n"


def quick(name, folder):
    """What a script prints with `--quick`, and what it draws.

    `.ci/run` has run every example already, and says in which folder it left both.
    """
    if ready := os.environ.get("SLALOM_QUICK_RUNS"):
        printed, picture = (Path(ready) / f"{name}{end}" for end in (".txt", ".png"))
        return printed.read_text(), picture.read_bytes()
    picture = folder / f"{name}.png"
    done = run(EXAMPLES / f"{name}.py", "--quick", "--out", picture)
    assert done.returncode == 0, done.stderr
    return done.stdout, picture.read_bytes()


def test_every_script_has_a_page_that_shows_it():
    for name in SCRIPTS:
        page = (PAGES / f"{name}.md").read_text()
        script = f"examples/{name}.py"
        assert f'--8<-- "{script}"' in page or f"notebook: {script}\n" in page, name
        for picture in re.findall(r"!\[.+\]\((.+)\)", page):
            size = (PAGES / picture).stat().st_size
            assert size < 100_000, f"{picture} has {size} bytes"


HELP = """
import runpy, sys
for script in sys.argv[1:]:
    sys.argv = [script, "--help"]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        assert not end.code, script
    print(end="\\0")
"""


@pytest.mark.slow
def test_help_names_the_options_and_what_to_install():
    # In one process, which imports JAX and Matplotlib once. Short runs have one for each script.
    done = run("-c", HELP, *(EXAMPLES / f"{name}.py" for name in SCRIPTS))
    assert done.returncode == 0, done.stderr
    *helps, rest = done.stdout.split("\0")
    assert rest == ""
    for name, shown in zip(SCRIPTS, helps, strict=True):
        for text in ("--quick", "--out", f"python examples/{name}.py"):
            assert text in shown, name

    code = f"""
import runpy, sys
sys.modules["tqdm"] = None
runpy.run_path({str(DIGITS)!r}, run_name="__main__")
"""
    done = run("-c", code)
    assert done.returncode == 1
    assert "tqdm" in done.stderr
    assert 'pip install -e ".[examples]"' in done.stderr


# A number that each script prints, what it reaches with `--quick`, and what it must stay below.
BELOW = {
    "transformer": (r"held-out loss ([\d.]+)", 2.72, 3.2),  # the frequencies of characters: 3.2
    "muon": (r"Muon: held-out loss ([\d.]+)", 2.50, 2.8),  # AdamW: 2.87
    "speedrun": (r"not for the head: loss ([\d.]+)", 2.77, 2.9001),
    "gan": (r"generated ([\d.]+)", 2.82, 4.0),  # untrained: 6.1
    "pinn": (r"Levenberg–Marquardt: relative error ([\d.e+-]+)", 0.096, 0.3),  # L-BFGS: 0.44
    "meta_learning": (r"steps, meta-learned: ([\d.]+)", 2.03, 3.5),  # the mean of all sines: 4.4
    "neural_ode": (r"unseen starts: ([\d.]+)", 0.22, 0.8),  # untrained: 1.1
    "bfloat16": (r"ecc: loss ([\d.]+)", 1.27, 1.5),  # to the nearest: 1.65
    "gaussian_process": (r"loss ([\d.]+), reached", 12.95, 20.0),  # one start in six reaches it
    "custom_transform": (r"quasi-hyperbolic: training loss ([\d.]+)", 0.29, 1.0),  # chance: 2.3
}
# Others, and what they must stay above.
ABOVE = {
    "digits": (r"test accuracy ([\d.]+)%", 50),  # two epochs; chance is 10 %
    "dqn": (r"stays up for ([\d.]+) of 200 steps", 60),  # random actions last for about 20
    "sweep": (r"test accuracy of the best run ([\d.]+)%", 70),  # two epochs
    "finetuning": (r"new head ([\d.]+)%, then all layers", 20),  # chance is 10 %
    "wave_function": (r"helium: energy -([\d.]+)", 2.88),  # exact: 2.9037
}
PRINTED = {
    "digits": ("sl.ClipByGlobalNorm(1.0)", ").every_k(2)"),
    "sweep": ("sweep of 12 runs (learning_rate: 4, weight_decay: 3) with 44 steps",),
    "finetuning": ("carried:  scale_by_adam.age, scale_by_adam.mu.head.weight",),
    "distributed": ("one process with 4 devices: the same bits",),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_short_run_learns_and_draws(name, tmp_path):
    printed, picture = quick(name, tmp_path)
    assert picture.startswith(PNG)
    assert [text for text in PRINTED.get(name, ()) if text not in printed] == []
    if name in BELOW:
        pattern, usual, limit = BELOW[name]
        (reached,) = re.findall(pattern, printed)
        assert float(reached) < limit, f"usually {usual}"
    if name in ABOVE:
        pattern, limit = ABOVE[name]
        (reached,) = re.findall(pattern, printed)
        assert limit < float(reached) <= 200
    if name == "finetuning":  # unfreezing the layers helps
        ((head, whole),) = re.findall(r"new head ([\d.]+)%, then all layers ([\d.]+)%", printed)
        assert float(head) < float(whole)
    if name == "distributed":
        assert re.search(r"one process with 1 device: apart by [\d.]+e-0[4-9]", printed)
    assert name in BELOW | ABOVE | PRINTED, "what does it reach?"


@pytest.mark.slow
def test_digits_reaches_97_percent(tmp_path):
    done = run(DIGITS, "--out", tmp_path / "digits.png")
    assert done.returncode == 0, done.stderr
    (accuracy,) = re.findall(ABOVE["digits"][0], done.stdout)
    assert float(accuracy) >= 97


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
            env=environment(JAX_PLATFORMS="cpu", PYTHONUNBUFFERED="1"),
        )


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
@pytest.mark.parametrize("survivor", [0, 1])
def test_a_process_whose_peer_dies_ends_within_the_heartbeat_timeout(tmp_path, survivor):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    logs = [tmp_path / f"{i}.txt" for i in range(2)]
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
    command = list(map(str, command))
    launcher = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL)
    try:
        path = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
        assert wait_for(lambda: len(path.read_text().split()) == 2, 60)
        children = path.read_text().split()
    finally:
        launcher.kill()
        launcher.wait()
    assert wait_for(lambda: not any(map(is_running, children)), 30)
