"""Files without tests of bits compile what they compare without LLVM's optimizations."""

import pytest

from helpers import unoptimized

WITHOUT_BITS = ("test_combine", "test_microbatches", "test_sweep")


@pytest.fixture(autouse=True)
def compile_quickly(request):
    if request.module.__name__ in WITHOUT_BITS:
        with unoptimized():
            yield
    else:
        yield
