"""The public API as text: every public name with its signature and defaults.

python -m tests.public_api

writes it to `public_api.txt`, which a test compares. A change of that file is a decision: see
"Versions and deprecations" in CONTRIBUTING.md.
"""

import inspect
import re
from pathlib import Path

import slalom as sl

FILE = Path(__file__).with_name("public_api.txt")
MODULES = [name for name, value in vars(sl).items() if inspect.ismodule(value) and name[0] != "_"]


def public(owner):
    """The public names of a module, and what they stand for."""
    names = getattr(owner, "__all__", None) or [name for name in vars(owner) if name[0] != "_"]
    return {name: getattr(owner, name) for name in names}


def public_objects():
    """Everything public, by its full name, but modules."""
    for module in (sl, *(getattr(sl, name) for name in MODULES)):
        for name, value in public(module).items():
            if not inspect.ismodule(value):
                yield f"{module.__name__}.{name}", value


def entries(path, owner):
    """A line for each name in a module, and for each method of its classes."""
    for name, value in public(owner).items():
        if inspect.ismodule(value):
            continue
        if inspect.isclass(value) and value.__module__.startswith("slalom"):
            yield f"{path}.{name}{signature(value)}"
            yield from members(f"{path}.{name}", value)
        else:
            yield f"{path}.{name}{signature(value) if inspect.isfunction(value) else ''}"


def members(path, cls):
    """A line for each method and property, unless a public class that it extends has it too."""
    for name in dir(cls):
        home = next(base for base in cls.__mro__ if name in vars(base))
        listed = (base for base in cls.__mro__[1:] if base.__name__ in vars(sl))
        is_own = home.__module__.startswith("slalom") and name[0] != "_"
        if not is_own or any(hasattr(base, name) for base in listed):
            continue
        value = vars(home)[name]
        if isinstance(value, property):
            yield f"{path}.{name}"
        elif callable(getattr(cls, name)) and not inspect.isclass(value):
            yield f"{path}.{name}{signature(getattr(cls, name))}"


def signature(value):
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    bare = inspect.Parameter.empty
    plain = [p.replace(annotation=bare) for p in found.parameters.values() if p.name[0] != "_"]
    text = str(found.replace(parameters=plain, return_annotation=bare))
    return re.sub(r"<(?:function )?([\w.]+)[^>]*>", r"\1", text)


def lines():
    found = {*entries("sl", sl)}
    for name in MODULES:
        found.update(entries(f"sl.{name}", getattr(sl, name)))
    return sorted(found)


if __name__ == "__main__":
    FILE.write_text("\n".join(lines()) + "\n")
