"""Where text comes from."""

from jdllm.config import ConfigError


class DataError(ConfigError):
    """Text, tokens or a cache that cannot be used; the message says what is wrong and what to do."""
