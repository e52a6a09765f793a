"""Docstrings: their examples run, and every public name says what it is and what it takes."""

import ast
import doctest
import inspect
import re
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl
from helpers import slow_except
from public_api import public_objects

SOURCE = Path(sl.__file__).parent
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
FENCE = re.compile(r"^ *```python\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def documented(node, name):
    """(name, docstring, line) of every module, class and function below a syntax node."""
    docstring = ast.get_docstring(node)
    if docstring is not None:
        yield name, docstring, node.body[0].lineno
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef):
            yield from documented(child, f"{name}.{child.name}")


def module_name(path):
    return ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")


# From the source, not from the imported objects: what decorators wrap is found as well.
DOCSTRINGS = {
    name: (docstring, path, line)
    for path in sorted(SOURCE.rglob("*.py"))
    for name, docstring, line in documented(ast.parse(path.read_text()), module_name(path))
}
WITH_CODE = [name for name, (docstring, *_) in DOCSTRINGS.items() if "```" in docstring]


# One test each, for together they compile for a minute.
@pytest.mark.parametrize("name", slow_except(WITH_CODE, *WITH_CODE[1::11]))
def test_example_runs(name):
    docstring, path, line = DOCSTRINGS[name]
    blocks = FENCE.findall(docstring)
    assert docstring.count("```") == 2 * len(blocks), "code stands in a ```python block"
    for block in blocks:
        assert block.lstrip().startswith(">>>"), "code that is no example is never run"
        assert block.endswith("\n\n"), "doctest needs a blank line before the closing fence"

    known = {"sl": sl, "eqx": eqx, "jax": jax, "jnp": jnp, "np": np, "__name__": "examples"}
    example = doctest.DocTestParser().get_doctest(docstring, known, name, str(path), line)
    report = []
    doctest.DocTestRunner(verbose=False, optionflags=FLAGS).run(example, out=report.append)
    assert not report, "".join(report)


def public_names():
    """Every public class and function by its name, and every method that it defines anew."""
    for path, value in public_objects():
        own = getattr(value, "__module__", "").startswith("slalom")
        is_alias = not (inspect.isclass(value) or inspect.isfunction(value))
        if own and not is_alias and not path.startswith(("slalom.tree.", "slalom.interop.")):
            yield path, value
            if inspect.isclass(value):
                yield from methods(path, value)


def methods(path, cls):
    for name, value in vars(cls).items():
        if name[0] == "_" or not (callable(value) or isinstance(value, property | classmethod)):
            continue
        if isinstance(value, type) or any(hasattr(base, name) for base in cls.__mro__[1:]):
            continue  # overrides are documented where they are declared
        yield f"{path}.{name}", getattr(cls, name)


PUBLIC = dict(public_names())


def own_docstring(value):
    """The docstring of an object itself; a class inherits none here."""
    if inspect.isclass(value):
        docstring = vars(value).get("__doc__") or ""
        constructor = vars(value).get("__init__")
        return docstring + "\n" + inspect.cleandoc(getattr(constructor, "__doc__", None) or "")
    return inspect.getdoc(value) or ""


def parameters(value):
    if isinstance(value, property):
        return set()
    try:
        signature = inspect.signature(value)
    except ValueError:
        return set()
    return {name for name in signature.parameters if name not in ("self", "cls")}


def described(value, owner):
    """The parameters that the **Arguments:** section of an object describes."""
    _, _, section = own_docstring(value).partition("**Arguments:**")
    section = re.split(r"\*\*(?:Returns|Raises):\*\*|```|\?\?\?", section)[0]
    names = set()
    for item in re.split(r"^\s*- ", section, flags=re.MULTILINE)[1:]:
        head = item.partition(":")[0]
        names.update(re.findall(r"`(\w+)`", head))
    # "**Arguments:** as for `step`.": all that are described there.
    for other in re.findall(r"\A\s*as for `(\w+)`", section):
        every = (owner, sl.checkpoint, sl, sl.contrib, sl.AbstractTransform)
        homes = [home for home in every if other in dir(home)]
        found = getattr(homes[0], other)
        names |= described(found, owner)
    for method in re.findall(r"Made by `tx\.(\w+)`, which", own_docstring(value)):
        names |= {"inner"} | described(getattr(sl.AbstractTransform, method), None)
    return names


def test_docstrings_are_their_own_and_describe_every_argument():
    assert [name for name, value in PUBLIC.items() if not own_docstring(value).strip()] == []
    modules = map(module_name, sorted(SOURCE.rglob("*.py")))
    assert [name for name in modules if name not in DOCSTRINGS] == []

    inherit, say_nothing = [], []
    for name, value in PUBLIC.items():
        if name.rpartition(".")[0] in PUBLIC:
            continue  # a method
        docstring = inspect.getdoc(value)
        if any(inspect.getdoc(base) == docstring for base in getattr(value, "__mro__", ())[1:]):
            inherit.append(name)
        if not inspect.isclass(value) and "**Returns:**" not in docstring:
            say_nothing.append(name)
    assert not inherit, "show the docstring of a base class"
    assert not say_nothing, "have no **Returns:**"

    left_out = {}
    for name, value in PUBLIC.items():
        owner = PUBLIC.get(name.rpartition(".")[0])
        # A method may do without the list.
        if owner is None or "**Arguments:**" in own_docstring(value):
            left_out[name] = parameters(value) - described(value, owner)
    assert {name: missing for name, missing in left_out.items() if missing} == {}
