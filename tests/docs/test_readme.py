"""Every snippet in the README and the docs runs, and shows what it says it shows.

The `python` blocks of a document run in order, in one namespace. An expression followed by
`# -> value` has that value; a `text` block is what the `python` block before it prints, or the
error it ends with. Both may leave parts out with `...`.
"""

import ast
import contextlib
import doctest
import io
import re
from pathlib import Path

import newcomer
import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = ["README.md", "CONTRIBUTING.md"] + [
    path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))
]
TYPES = "docs/guides/writing-a-transform.md"
FENCE = re.compile(r"^```(python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(document):
    """(first line, code, shown output or None) of each `python` block."""
    text = (ROOT / document).read_text()
    found = []
    for match in FENCE.finditer(text):
        line = text[: match.start(2)].count("\n") + 1
        language, body = match.groups()
        if language == "python":
            found.append((line, body, None))
        else:
            assert found[-1][2] is None, f"{document}:{line} shows the output of a second block"
            found[-1] = (*found[-1][:2], body)
    return found


def matches(shown, got):
    # Blanks count: columns of a table that are out of line are stale.
    shown, got = ("\n".join(map(str.rstrip, text.strip().splitlines())) for text in (shown, got))
    return doctest.OutputChecker().check_output(f"{shown}\n", f"{got}\n", doctest.ELLIPSIS)


def message(error):
    """An error as Python prints it, without the notes that JAX adds."""
    kind = type(error)
    name = ("" if kind.__module__ == "builtins" else f"{kind.__module__}.") + kind.__qualname__
    return without_arguments(f"{name}: {error}")


def without_arguments(text):
    """A type error without the arguments and signature it ends with, which the text leaves out."""
    return text.partition("\n----------------------\n")[0]


def run(code, namespace, document, line):
    """Runs a block with the document's own line numbers, checking each `# ->`."""
    tree = ast.increment_lineno(ast.parse(code, document), line - 1)
    lines = code.splitlines()
    checked = 0
    for statement in tree.body:
        _, arrow, shown = lines[statement.end_lineno - line].partition("  # -> ")
        if isinstance(statement, ast.Expr) and arrow:
            value = eval(compile(ast.Expression(statement.value), document, "eval"), namespace)
            place = f"{document}:{statement.lineno}"
            assert matches(shown, repr(value)), f"{place} says {shown}, got {value!r}"
            checked += 1
        else:
            exec(compile(ast.Module([statement], []), document, "exec"), namespace)
    assert checked == code.count("# ->"), f"{document}:{line}: a `# ->` follows no expression"


@pytest.mark.slow
@pytest.mark.parametrize("document", DOCUMENTS)
def test_snippets_run_and_show_what_they_say(document, request):
    if document == TYPES:
        request.getfixturevalue("typechecked")
    namespace = {"__name__": "__main__"}
    for line, code, shown in blocks(document):
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                run(code, namespace, document, line)
            got = printed.getvalue()
        except AssertionError:
            raise
        except Exception as error:
            if shown is None:
                raise
            got = message(error)
        if shown is not None:
            assert matches(shown, got), f"{document}:{line} shows\n{shown}\nbut gives\n{got}"


def test_links_lead_somewhere_and_both_front_pages_are_short():
    links = [
        (document, target)
        for document in DOCUMENTS
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / document).read_text())
    ]
    assert len(links) > 100
    links = [link for link in links if "../actions/" not in link[1]]  # GitHub's own pages
    assert [x for x in links if not (ROOT / x[0]).parent.joinpath(x[1]).exists()] == []

    words = {"README.md": 650, "docs/index.md": 700}
    assert all(len((ROOT / page).read_text().split()) <= limit for page, limit in words.items())
    first_screen = (ROOT / "README.md").read_text().split("\n## ")[0]
    assert 'pip install -e ".[examples]" && python examples/digits.py' in first_screen
    assert 'pip install -e ".[test]" && pytest' in first_screen

    # An extra would have another name in a clone than in a release.
    files = [ROOT / document for document in DOCUMENTS]
    files += (ROOT / "src").rglob("*.py")
    found = [file.name for file in files if "slalom[" in file.read_text()]
    assert not found


@pytest.mark.slow
def test_readme_runs_outside_of_the_strict_world_with_the_message_shown():
    [(code, shown)] = [(c, shown) for _, c, shown in blocks(TYPES) if c.startswith("# wrong.py")]
    done = newcomer.run("-c", code, SLALOM_TYPECHECK="1")
    assert done.returncode == 1
    _, *said = re.split(r"(?m)^(?=jaxtyping\.TypeCheckError: Type-check)", done.stderr)
    assert matches(shown, without_arguments(said[-1])), done.stderr
    done = newcomer.run("-c", code, SLALOM_TYPECHECK="0")
    assert done.returncode == 0, done.stderr

    error = re.compile(r"[\w.]+Error: ")
    code = "\n".join(x for _, x, shown in blocks("README.md") if not error.match(shown or ""))
    for checks in "01":
        done = newcomer.run("-c", code, SLALOM_TYPECHECK=checks)
        assert done.returncode == 0, done.stderr
        assert "Exception ignored" not in done.stderr
