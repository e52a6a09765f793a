"""Checks that the wheel and the sdist in a folder contain what they should, and no more.

python .ci/contents.py dist
"""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
OTHERS = {"README.md", "CHANGELOG.md", "CITATION.cff", "LICENSE", "pyproject.toml", ".gitignore"}
METADATA = {"METADATA", "WHEEL", "RECORD", "licenses/LICENSE"}


def package():
    """The files of the package that git knows, from `src` on."""
    listed = subprocess.check_output(["git", "ls-files", "src/slalom"], cwd=ROOT, text=True)
    return {name.removeprefix("src/") for name in listed.splitlines()}


def check(what, found, expected):
    missing, unexpected = sorted(expected - found), sorted(found - expected)
    assert not missing, f"missing in the {what}: {missing}"
    assert not unexpected, f"not expected in the {what}: {unexpected}"
    print(f"the {what} contains {len(found)} files, as it should")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    name = "-".join(wheel.name.split("-")[:2])
    with zipfile.ZipFile(wheel) as file:
        info = {f"{name}.dist-info/{part}" for part in METADATA}
        check("wheel", set(file.namelist()), package() | info)
    with tarfile.open(sdist) as file:
        names = {member.name.removeprefix(f"{name}/") for member in file if member.isfile()}
        check("sdist", names, {f"src/{path}" for path in package()} | OTHERS | {"PKG-INFO"})
