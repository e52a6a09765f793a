import pytest

from helpers import unchecked


@pytest.fixture(autouse=True)
def as_users_run(typecheck):
    """Without checks of types, which would refuse some of the bad inputs first."""
    with unchecked():
        yield
