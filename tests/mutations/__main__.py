"""Breaks the source in thirty ways, and shows which tests notice.

    python -m tests.mutations                       # with the everyday tests
    python -m tests.mutations --tier both '*SOAP*'  # with the slow ones too, where these pass

The nearest tests of each mutation run first, and with `--whole` all others of the tier if they
pass. Everything happens in a copy of the checkout, which shares the cache of compiled programs.
"""

import argparse
import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .table import MUTATIONS, Mutation, check_fit

MARKS = {
    "everyday": "not slow and not exhaustive",
    "slow": "slow and not exhaustive",
    "exhaustive": "exhaustive",
}
TIERS = {name: [name] for name in MARKS} | {"both": ["everyday", "slow"]}
LIMIT = 3600
"""The seconds after which tests count as failed, since a mutation may never end."""


def check(mutations: dict[str, Mutation], checkout: Path) -> None:
    """Raises an error for a mutation that does not fit the checkout, or uncommitted changes."""
    check_fit(mutations, checkout)
    files = [f"src/slalom/{mutation.file}" for mutation in mutations.values()]
    status = ["git", "status", "--porcelain", "--", *files]
    if changes := subprocess.check_output(status, cwd=checkout, text=True):
        raise ValueError(f"Commit these files first:\n{changes}")


def first_failure(copy: Path, tier: str, paths: list[str], workers: int) -> str | None:
    """The first test that fails, or `None`."""
    options = ["-x", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider", "-n", str(workers)]
    command = [sys.executable, "-m", "pytest", *options, "-m", MARKS[tier], *paths]
    # A narrow terminal would cut the names of tests.
    env = os.environ | {"PYTHONPATH": f"{copy / 'src'}{os.pathsep}{copy}", "COLUMNS": "1000"}
    try:
        ran = subprocess.run(
            command, cwd=copy, env=env, capture_output=True, text=True, timeout=LIMIT
        )
    except subprocess.TimeoutExpired:
        return f"no end after {LIMIT} s"
    if ran.returncode in (0, 5):  # all passed, or there were none
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (\S+?(?:\[.*?\])?)(?: - .*)?$", ran.stdout, re.MULTILINE)
    if failed is None:
        raise RuntimeError(ran.stdout[-2000:] + ran.stderr[-2000:])
    return failed[1]


def outcome(mutation: Mutation, copy: Path, tiers: list[str], whole: bool) -> dict[str, object]:
    """Which tier catches the mutation, by which test, and how long that took."""
    start, test, tier = time.monotonic(), None, None
    path = copy / "src/slalom" / mutation.file
    before = path.read_text()
    try:
        path.write_text(before.replace(mutation.old, mutation.new))
        for tier in tiers:
            near = [f"tests/{name}" for name in mutation.near.split()]
            test = first_failure(copy, tier, near, workers=0)
            if test is None and whole:
                test = first_failure(copy, tier, ["tests"], workers=2)
            if test is not None:
                break
    finally:
        path.write_text(before)
    caught_by = None if test is None else tier
    seconds = round(time.monotonic() - start)
    return {"caught_by": caught_by, "test": test, "seconds": seconds}


def main() -> None:
    """Runs the mutations that the command names."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("names", nargs="*", default=["*"], help="globs over names; default: all")
    parser.add_argument("--tier", choices=TIERS, default="everyday")
    parser.add_argument("--whole", action="store_true", help="run all tests if the nearest pass")
    parser.add_argument("--near", help="tests to run in place of the nearest ones")
    parser.add_argument("--out", type=Path, help="a file to append results to, as lines of JSON")
    parser.add_argument("--checkout", type=Path, default=Path(__file__).parents[2])
    args = parser.parse_args()
    names = dict.fromkeys(n for glob in args.names for n in fnmatch.filter(MUTATIONS, glob))
    chosen = {name: MUTATIONS[name] for name in names}
    if args.near is not None:
        chosen = {name: mutation._replace(near=args.near) for name, mutation in chosen.items()}
    checkout = args.checkout.resolve()
    check(chosen, checkout)
    cache = checkout / ".pytest_cache"
    cache.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "checkout"
        ignored = shutil.ignore_patterns(".git", ".coverage*", "__pycache__", ".[a-z]*_cache")
        shutil.copytree(checkout, copy, ignore=ignored)
        (copy / cache.name).symlink_to(cache)
        for name, mutation in chosen.items():
            found = {"mutation": name} | outcome(mutation, copy, TIERS[args.tier], args.whole)
            print(*(x if x is not None else "-" for x in found.values()), sep=" | ", flush=True)
            if args.out is not None:
                with args.out.open("a") as file:
                    file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
