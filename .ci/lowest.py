"""Prints the lowest versions of the run-time dependencies that pyproject.toml allows."""

import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
requirements = project["dependencies"] + project["optional-dependencies"]["typecheck"]
print("\n".join(requirement.replace(">=", "==") for requirement in requirements))
