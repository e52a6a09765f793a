"""No test of this folder looks at bits, and most of their time is spent in compiling."""

import pytest

from helpers import unoptimized

# Their steps take longer than their programs.
LONG_RUNS = ("test_networks", "test_nist")


@pytest.fixture(autouse=True)
def compile_quickly(request):
    if request.module.__name__ in LONG_RUNS:
        yield
    else:
        with unoptimized():
            yield
