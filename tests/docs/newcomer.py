"""Python as a newcomer runs it."""

import os
import subprocess
import sys


def environment(**variables):
    """The environment without the strictness of the tests."""
    strict = ("SLALOM_TYPECHECK", "XLA_FLAGS")
    return {k: v for k, v in os.environ.items() if k not in strict} | variables


def run(*command, **variables):
    return subprocess.run(
        [sys.executable, *map(str, command)],
        env=environment(**variables),
        capture_output=True,
        text=True,
        check=False,
    )
