"""How mkdocstrings reads Slalom: an extension of Griffe, which parses the source.

- Modules of Equinox get the signature of the constructor that their fields make.
- Indented blocks of docstrings, which are formulas, become MathML.
- Examples become `pycon` blocks, and public names in backticks become links.
"""

import dataclasses
import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import griffe

import slalom

sys.path.append(str(Path(__file__).parent))
from formulas import to_html

FORMULA = re.compile(r"(?:(?<=\n\n)|\A)((?: {4}[^\n]*(?:\n|\Z))+)")
EXAMPLE = re.compile(r"^( *)```python\n(.*?)\n\s*```$", re.MULTILINE | re.DOTALL)
CITATION = re.compile(r"^\?\?\? cite \"(.*?)\"$", re.MULTILINE | re.DOTALL)
NAME = re.compile(r"(?<!\[)`(?:(sl|eqx|opt|tx)\.)?([A-Za-z_][\w.]*)(\([^`]*\))?`(?!\])")
ARGUMENTS = re.compile(r"(?<=\*\*Arguments:\*\*\n\n)(?:- .*\n?(?: +\S.*\n?)*)+")
ITEM = re.compile(r"^- (.*(?:\n +\S.*)*)", re.MULTILINE)
NAMED = re.compile(r"((?:`\w+`(?:,\s+)?)+):\s+(.*)", re.DOTALL)
DEFAULT = re.compile(r"\s*Defaults? to [^.]*\.(?=\s|$)")
REFERENCE = re.compile(r"as\s+in\s+`([\w.]+)`\.\s*(.*)", re.DOTALL)
MODULES = (
    "checkpoint",
    "combine",
    "contrib",
    "fields",
    "interop",
    "projections",
    "schedules",
    "tree",
    "where",
    "wrappers",
)


class Slalom(griffe.Extension):
    """The extension, which `mkdocs.yml` names."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        if pkg.path != "slalom":
            return
        self.package = pkg
        self.pages = _public()
        for thing in _everything(pkg):
            if isinstance(thing, griffe.Class):
                self._construct(thing)
            if isinstance(thing, griffe.Function):
                for parameter in thing.parameters:
                    if isinstance(parameter.default, str):
                        parameter.default = _shortest(parameter.default)
        documented = [x for x in _everything(pkg) if x.docstring is not None]
        texts = {id(x): self._with_arguments(x) for x in documented}
        for thing in documented:
            thing.docstring.value = texts[id(thing)]
            thing.docstring.value = self._docstring(thing)

    # --- signatures -------------------------------------------------------------------------

    def _construct(self, thing: griffe.Class) -> None:
        """Adds the `__init__` that a dataclass generates, with the annotations of the source."""
        cls = _imported(thing.path)
        if not dataclasses.is_dataclass(cls) or cls.__init__.__code__.co_filename != "<string>":
            return  # written by hand, so Griffe finds it itself
        parameters = [griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)]
        for parameter in inspect.signature(cls).parameters.values():
            default = parameter.default
            parameters.append(
                griffe.Parameter(
                    parameter.name,
                    annotation=self._annotation(cls, parameter.name),
                    kind=getattr(griffe.ParameterKind, parameter.kind.name.lower()),
                    default=None if default is parameter.empty else _shown(default),
                )
            )
        init = griffe.Function("__init__", parameters=griffe.Parameters(*parameters))
        thing.set_member("__init__", init)

    def _annotation(self, cls: type, name: str) -> Any:
        for base in cls.__mro__:
            if base.__module__.startswith("slalom"):
                path = f"{base.__module__}.{base.__qualname__}".removeprefix("slalom.")
                members = self.package[path].members
                if name in members:
                    return members[name].annotation
        return None

    # --- docstrings -------------------------------------------------------------------------

    def _with_arguments(self, thing: griffe.Object) -> str:
        """The docstring with the meaning and the default of every argument.

        References such as "as in `ScaleByAdam`" are replaced by what that one says.
        """
        text = thing.docstring.value
        section = ARGUMENTS.search(text)
        if section is None:
            return text
        defaults = {p.name: p.default for p in _signature(thing)}
        explained = _explained(text)
        entries = []
        for names, said in _items(section[0]):
            if REFERENCE.match(said):
                entries += [([name], explained[name]) for name in names]
            else:
                entries.append((names, said))
        listed = {name for names, _ in entries for name in names}
        unexplained = [name for name in defaults if name != "self" and name not in listed]
        if unexplained and thing.path in self.pages:
            raise ValueError(f"{thing.path} does not explain {', '.join(unexplained)}")
        order = {name: i for i, name in enumerate(defaults)}
        entries.sort(key=lambda entry: min((order.get(n, 999) for n in entry[0]), default=999))
        lines = [_entry(names, said, defaults) for names, said in entries]
        return text[: section.start()] + "\n".join(lines) + "\n" + text[section.end() :]

    def _docstring(self, thing: griffe.Object) -> str:
        text = thing.docstring.value
        kept: list[str] = []

        def keep(markup: str) -> str:
            kept.append(markup)
            return f"\0{len(kept) - 1}\0"

        def example(match: re.Match[str]) -> str:
            indent, code = match.groups()
            return keep(f"{indent}```pycon\n{code.rstrip()}\n{indent}```")

        def formula(match: re.Match[str]) -> str:
            block = "\n".join(line[4:] for line in match[1].rstrip().split("\n"))
            return keep(to_html(block)) + "\n"

        def citation(match: re.Match[str]) -> str:
            # A title may be wrapped in the source, but not in Markdown.
            title = re.sub(r"\s*\n\s*", " ", match[1])
            return keep(f"<p class='cite'>{_links(title)}</p>")

        text = EXAMPLE.sub(example, text)
        text = FORMULA.sub(formula, text)
        text = CITATION.sub(citation, text)
        text = NAME.sub(lambda match: self._link(match, thing), text)
        return re.sub("\0(\\d+)\0", lambda match: kept[int(match[1])], text)

    def _link(self, match: re.Match[str], thing: griffe.Object) -> str:
        prefix, name, call = match.groups()
        owners = {"sl": "slalom.", "opt": "slalom.Optimizer.", "tx": "slalom.AbstractTransform."}
        if prefix == "eqx" or name == thing.name or (prefix is None and call):
            return match[0]
        if prefix is None and name in _parameters(thing):
            return match[0]
        tries = [owners[prefix] + name] if prefix else [f"slalom.{name}"]
        if prefix is None and thing.parent is not None:
            home = self.pages.get(thing.parent.canonical_path)
            tries.insert(0, f"{home or thing.parent.path}.{name}")
            tries.extend(f"slalom.{module}.{name}" for module in MODULES if module in thing.path)
        for path in tries:
            if path in self.pages.values():
                return f"[{match[0]}][{path}]"
        return match[0]


def _signature(thing: griffe.Object) -> list[Any]:
    """The parameters of a function or a constructor."""
    init = thing.members.get("__init__") if isinstance(thing, griffe.Class) else thing
    return list(init.parameters) if isinstance(init, griffe.Function) else []


def _items(section: str) -> list[tuple[list[str], str]]:
    """(names, what is said) of each item in the list of arguments."""
    found = []
    for item in ITEM.findall(section):
        named = NAMED.match(item)
        names = re.findall(r"`(\w+)`", named[1]) if named else []
        found.append((names, named[2] if named else item))
    return found


def _explained(text: str) -> dict[str, str]:
    """What a docstring says of each argument, itself or by reference to another one."""
    section = ARGUMENTS.search(text)
    own: dict[str, str] = {}
    for names, said in _items(section[0]) if section else []:
        if reference := REFERENCE.match(said):
            there, rest = _explained(_text_of(reference[1])), reference[2]
            for name in names:
                # `adam_b1` of `sl.muon` is the `b1` of `sl.adamw`.
                meaning = there.get(name) or f"for AdamW: {there[name.removeprefix('adam_')]}"
                if "efault" in rest:
                    meaning = DEFAULT.sub("", meaning)
                own[name] = f"{meaning} {rest}".strip()
        else:
            own |= dict.fromkeys(names, said)
    return own


def _text_of(name: str) -> str:
    """The docstring of `ScaleByAdam`, `tx.schedule_free`, `sl.where.matrix` or of a name in
    `sl.contrib`."""
    value: Any = slalom.AbstractTransform if name.startswith("tx.") else slalom
    for part in name.removeprefix("tx.").removeprefix("sl.").split("."):
        value = getattr(value, part, None) or getattr(slalom.contrib, part)
    text = inspect.getdoc(value) or ""
    return text if "**Arguments:**" in text else inspect.getdoc(value.__init__) or ""


def _entry(names: list[str], said: str, defaults: dict[str, Any]) -> str:
    """One item of the list of arguments, with the defaults."""
    if not names:
        return f"- {said}"
    shown = [f"`{defaults[n]}`" for n in names if defaults.get(n) is not None]
    if shown and "efault" not in said:
        verb = "Defaults" if len(names) == 1 else "Default"
        values = shown[:1] if len(set(shown)) == 1 else shown
        said = f"{said.rstrip('.')}. {verb} to {' and '.join(values)}."
    return f"- {', '.join(f'`{n}`' for n in names)}: {said}"


def _parameters(thing: griffe.Object) -> set[str]:
    """The arguments of a function, a class or a constructor."""
    init = thing.members.get("__init__") if isinstance(thing, griffe.Class) else thing
    return {p.name for p in init.parameters} if isinstance(init, griffe.Function) else set()


def _links(text: str) -> str:
    """Markdown's links as HTML, since Markdown does not look into HTML."""
    return re.sub(r"\[([^]]+)\]\(([^)]+)\)", r'<a href="\2">\1</a>', text)


def _public() -> dict[str, str]:
    """The public path of everything public, by its path in the source."""
    found = {}
    for module in (slalom, *(getattr(slalom, m) for m in MODULES if hasattr(slalom, m))):
        names = getattr(module, "__all__", None) or [n for n in vars(module) if n[0] != "_"]
        for name in names:
            value = getattr(module, name)
            path = f"{module.__name__}.{name}"
            if inspect.ismodule(value):
                continue
            if inspect.isclass(value) or inspect.isfunction(value):
                found.setdefault(f"{value.__module__}.{value.__qualname__}", path)
            else:
                found.setdefault(path, path)
            if value in (slalom.Optimizer, slalom.AbstractTransform):
                for attribute in dir(value):
                    if attribute[0] != "_":
                        found[f"{path}.{attribute}"] = f"{path}.{attribute}"
    return found


def _everything(thing: griffe.Object) -> Any:
    for member in thing.members.values():
        if not member.is_alias:
            yield member
            yield from _everything(member)


def _imported(path: str) -> Any:
    parts = path.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for part in parts[cut:]:
            value = getattr(value, part, None)
        return value
    return None


def _shown(default: Any) -> str:
    if inspect.isclass(default):
        return default.__name__
    return "..." if repr(default).startswith("<") else _shortest(repr(default))


def _shortest(number: str) -> str:
    """A number as one writes it: `1e-8` instead of `1e-08`."""
    return re.sub(r"^(\d.*e-)0(\d)$", r"\1\2", number)
