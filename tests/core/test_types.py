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


@pytest.fixture(scope="module")
def diagnostics(tmp_path_factory):
    """What the checker says of each line of each file: (severity, message)."""
    unknown = tmp_path_factory.mktemp("types") / "unknown.py"
    unknown.write_text("# pyright: strict\nfrom jaxtyping import PyTree\n\ntree: PyTree = {}\n")
    files = [*FOLDER.glob("*.py"), unknown]
    # Without its own option the checker resolves imports in the environment on PATH.
    checker = [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable]
    done = subprocess.run(
        [*checker, "--outputjson", *map(str, files)],
        capture_output=True,
        text=True,
        check=False,
        cwd=FOLDER.parents[1],
    )
    found = {path.name: {} for path in files}
    for each in json.loads(done.stdout)["generalDiagnostics"]:
        lines = found[Path(each["file"]).name]
        lines.setdefault(each["range"]["start"]["line"], (each["severity"], each["message"]))
    return found


def expected(path):
    """The comment above each line that has one."""
    lines = path.read_text().splitlines()
    pairs = enumerate(itertools.pairwise(lines), start=1)
    return {n: above.strip()[2:] for n, (above, _) in pairs if above.strip().startswith("# ")}


def test_types_are_those_of_the_comments_and_strict_files_have_no_unknown_ones(diagnostics):
    inferred = {}
    for number, (severity, message) in diagnostics["inferred.py"].items():
        revealed = REVEALED.search(message)
        inferred[number] = revealed[2] if revealed else severity
    assert inferred == expected(FOLDER / "inferred.py")

    assert diagnostics["strict.py"] == {}
    assert diagnostics["unknown.py"]
