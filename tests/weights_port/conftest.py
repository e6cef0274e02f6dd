"""Tiny checkpoints on the disk, each with the model that was saved."""

import pytest

from weights_port.tiny import KINDS, save_tiny


@pytest.fixture(scope="module", params=KINDS)
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return folder, save_tiny(request.param, folder)


@pytest.fixture
def llama(tmp_path):
    return tmp_path, save_tiny("llama", tmp_path)
