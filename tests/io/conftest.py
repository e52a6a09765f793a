"""Checkpoints that several tests read."""

import types

import pytest
from trained import after_steps

import slalom as sl


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.safetensors"


@pytest.fixture(scope="session")
def adam(tmp_path_factory):
    """A model, its optimizer after three steps of Adam, and the file that both are saved in."""
    model, opt = after_steps(sl.adam(0.1))
    path = tmp_path_factory.mktemp("adam") / "run.safetensors"
    sl.checkpoint.save(path, model=model, opt=opt)
    return types.SimpleNamespace(model=model, opt=opt, path=path)
