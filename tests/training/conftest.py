"""What tests of whole runs share."""

import jax
import pytest


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory):
    """Every call of `train` makes its own jitted step; the second one finds it here."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("compiled")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    yield
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
