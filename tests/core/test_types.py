"""The types that a static checker infers: those in the comments of `tests/types/*.py`."""

import importlib.util
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "types"
REVEALED = re.compile(r'Type of "(.*)" is "(.*)"', re.DOTALL)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("basedpyright") is None,
        reason="basedpyright is not installed: pip install -e '.[dev]'",
    ),
]


def diagnostics(path):
    """What the checker says of each line of a file: (severity, message)."""
    done = subprocess.run(
        [sys.executable, "-m", "basedpyright", "--outputjson", str(path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=FOLDER.parents[1],
    )
    found = {}
    for each in json.loads(done.stdout)["generalDiagnostics"]:
        found.setdefault(each["range"]["start"]["line"], (each["severity"], each["message"]))
    return found


def expected(path):
    """The comment above each line that has one."""
    lines = path.read_text().splitlines()
    pairs = enumerate(itertools.pairwise(lines), start=1)
    return {n: above.strip()[2:] for n, (above, _) in pairs if above.strip().startswith("# ")}


@pytest.mark.parametrize(
    "name",
    ["training", "optimizer"],
)
def test_revealed_types_are_those_of_the_comments(name):
    path = FOLDER / f"{name}.py"
    inferred = {}
    for number, (severity, message) in diagnostics(path).items():
        revealed = REVEALED.search(message)
        inferred[number] = revealed[2] if revealed else severity
    assert inferred == expected(path)


def test_a_strict_file_of_a_user_has_no_error():
    assert diagnostics(FOLDER / "strict.py") == {}


def test_an_unknown_type_in_a_strict_file_is_found(tmp_path):
    path = tmp_path / "strict.py"
    path.write_text("# pyright: strict\nfrom jaxtyping import PyTree\n\ntree: PyTree = {}\n")
    assert diagnostics(path)
