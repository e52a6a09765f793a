"""Imports point down through the layers of the package, and public modules show only their own."""

import ast
import functools
import importlib
import inspect
import os
import pkgutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

import slalom as sl
from mutations.table import MUTATIONS, check_fit
from table import EVERYTHING

SOURCE = Path(sl.__file__).parent
MODULES = [name for _, name, _ in pkgutil.walk_packages([str(SOURCE)], prefix="slalom.")]

# From the bottom. A file imports only from its own layer and from those below.
LAYERS = [
    "tree",
    "where",
    "_core",
    "fields",
    "codecs",
    "schedules",
    "projections",
    "combine",
    "rules",
    "wrappers",
    "_loop.binding",
    "_loop.training",
    "checkpoint",
    "interop",
    "contrib",
    "__init__",
]


# The same inside `rules`. Below the rooms are `_base` and `_layout`, and above them nothing.
ROOMS = [
    "_base",
    "_layout",
    "shaping",
    "momentum",
    "adaptive",
    "low_memory",
    "rate_free",
    "measuring",
    "linesearch",
    "curvature",
    "matrices",
    "__init__",
]


def at_module_level(node):
    """What runs when a module is imported: no function bodies, nothing for type checkers only."""
    for child in ast.iter_child_nodes(node):
        for_types = isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING")
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.expr):
            continue
        if for_types and not ast.unparse(child.test).startswith("not "):
            continue
        yield child
        yield from at_module_level(child)


@functools.cache
def parsed():
    """The syntax tree of each file, by its path below the package."""
    return {p.relative_to(SOURCE): ast.parse(p.read_text()) for p in SOURCE.rglob("*.py")}


def imported(path, tree):
    """The modules of Slalom that a file imports at module level."""
    package = ["slalom", *path.parent.parts]
    known = {*MODULES, "slalom"}
    for node in at_module_level(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        if isinstance(node, ast.ImportFrom) and node.level:
            above = package[: len(package) - node.level + 1]
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield inner if inner in known else base


def named(path):
    return ".".join(["slalom", *(p for p in path.with_suffix("").parts if p != "__init__")])


@functools.cache
def graph():
    """Each module of Slalom with those that it imports."""
    return {named(file): set(imported(file, t)) - {named(file)} for file, t in parsed().items()}


# The rooms of `_loop` are two layers.
BINDING = {"binding", "programs", "reports", "sharding"}
TRAINING = {"training", "residual_losses", "tools"}


def layer(module):
    _, room, *inside = [*module.split("."), "__init__"]
    if room != "_loop":
        return room
    if inside[0] == "__init__":
        return "_loop.binding"
    assert inside[0] in BINDING | TRAINING, module
    return "_loop.binding" if inside[0] in BINDING else "_loop.training"


def room(module):
    return [*module.split("."), "__init__"][2]


@pytest.mark.slow
def test_imports_go_down_without_cycles_and_late_only_for_methods():
    rules = {
        module: {other for other in others if layer(other) == "rules"}
        for module, others in graph().items()
        if layer(module) == "rules"
    }
    for modules, place, order in ((graph(), layer, LAYERS), (rules, room, ROOMS)):
        assert {place(module) for module in modules} == set(order)
        for module, others in modules.items():
            below = order[: order.index(place(module)) + 1]
            above = [other for other in others if place(other) not in below]
            assert not above, f"{module} imports {above}"

    remaining = dict(graph())
    while remaining:
        lowest = [name for name, below in remaining.items() if not below & remaining.keys()]
        assert lowest, f"a cycle among {sorted(remaining)}"
        for name in lowest:
            del remaining[name]

    # An import inside a function hides a cycle. What is optional is not ours and may come late.
    for path, tree in parsed().items():
        module = ".".join(["slalom", *path.with_suffix("").parts])
        for function, node in late(tree):
            above = module.split(".")[1 : -node.level]
            target = above[0] if above else node.module.split(".")[0]
            allowed = LATE.get(layer(module), set())
            assert target in allowed, f"{module}.{function} imports {target}"


# Two fluent methods call functions that make wrappers.
LATE = {"_core": {"wrappers"}}


def late(node, inside=False):
    """What is imported inside of a function, with its name."""
    for child in ast.iter_child_nodes(node):
        if inside and isinstance(child, ast.ImportFrom) and child.level:
            yield inside, child
        if not isinstance(child, ast.expr):
            is_function = isinstance(child, ast.FunctionDef)
            yield from late(child, child.name if is_function else inside)


def test_modules_show_only_classes_and_names_of_their_own():
    for name in MODULES:
        for cls in vars(importlib.import_module(name)).values():
            if inspect.isclass(cls) and cls.__module__ == name:
                assert_abstract_or_final(cls)

    # The reference would show the module, since both have the same path.
    for name in MODULES:
        package, _, own = name.rpartition(".")
        shown = getattr(importlib.import_module(package), own, None)
        assert shown is None or inspect.ismodule(shown), f"{name} is a module and {shown!r}"

    for module, (name, value) in ((m, item) for m in PUBLIC for item in vars(m).items()):
        # The import hook that checks types leaves `jaxtyping` behind.
        if name[0] == "_" or name == "jaxtyping" or name in getattr(module, "__all__", ()):
            continue
        if isinstance(value, types.UnionType) or name in ("Params", "Updates", "Scalar"):
            continue  # an alias of types, which are others'
        home = value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", "")
        assert home.startswith("slalom"), f"{module.__name__}.{name} is {value!r}"


def assert_abstract_or_final(cls):
    for base in cls.__bases__:
        if base.__module__.startswith("slalom"):
            marked = base.__name__.lstrip("_").startswith("Abstract")
            assert marked or inspect.isabstract(base), f"{cls} subclasses {base}"
    if cls.__name__.lstrip("_").startswith("Abstract"):
        leaves_open = inspect.isabstract(cls) or getattr(cls, "__abstractvars__", ())
        ours = issubclass(cls, sl.AbstractTransform) and cls.__name__[0] != "_"
        assert leaves_open or not ours
    elif not inspect.isabstract(cls):
        assert not cls.__subclasses__(), f"{cls} is subclassed"


@pytest.mark.slow
def test_importing_and_building_touches_no_backend_and_imports_no_matplotlib():
    build = ", ".join(code for code in map(repr, EVERYTHING.values()) if "<" not in code)
    code = (
        "import slalom as sl, jax, sys\n"
        "from math import inf\n"
        f"built = [{build}]\n"
        "print(built)\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge._backends, xla_bridge._backends\n"
        "assert 'matplotlib' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | {"SLALOM_TYPECHECK": "0"},
    )
    assert done.returncode == 0, done.stderr


PUBLIC = (
    *(sl, sl.tree, sl.where, sl.schedules, sl.projections, sl.checkpoint, sl.codecs, sl.fields),
    *(sl.contrib, sl.wrappers),
)


def test_the_mutations_fit_the_source():
    check_fit(MUTATIONS, Path(__file__).parents[2])
