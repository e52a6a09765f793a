"""What a release promises: the public API, and one version everywhere."""

import re
from pathlib import Path

import public_api
import slalom as sl

ROOT = Path(__file__).parents[2]


def test_the_public_api_is_the_one_that_was_decided_with_one_version_everywhere():
    decided = public_api.FILE.read_text().splitlines()
    changed = sorted({*decided} ^ {*public_api.lines()})
    assert not changed, "if you mean it, write `python -m tests.public_api`, and the changelog"

    version = re.escape(sl.__version__)
    for file, line in {
        "pyproject.toml": f'version = "{version}"',
        "CITATION.cff": f"version: {version}",
        "CHANGELOG.md": f"## {version}",
        "docs/index.md": f"Version {version}",
        "docs/about/citation.md": f"version = {{{version}}}",
    }.items():
        assert re.search(line, (ROOT / file).read_text()), file
