"""Fixtures for the tests of pages and benchmarks."""

import jax
import pytest
from benchmarks import docs

from helpers import lenient


@pytest.fixture(autouse=True)
def single_precision():
    """A page may switch to double precision, as its readers do."""
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.fixture
def written(tmp_path):
    """Runs the command of a benchmark, and returns what it found and the page that it wrote."""

    def run(benchmark, *options):
        page = tmp_path / "page.md"
        begin = getattr(benchmark, "BEGIN", docs.BEGIN)
        end = getattr(benchmark, "END", docs.END)
        page.write_text(f"# Title\n\nbefore\n\n{begin}\nold\n{end}\n\nafter\n")
        with lenient():
            found = benchmark.main([*map(str, options), "--docs", str(page)])
        text = page.read_text()
        assert text.startswith(f"# Title\n\nbefore\n\n{begin}\n")
        assert text.endswith(f"{end}\n\nafter\n")
        assert "\nold\n" not in text
        return found, text

    return run
