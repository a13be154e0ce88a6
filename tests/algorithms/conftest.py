"""What tests of several algorithms share."""

import pytest

from rayfed.channel import accounting


@pytest.fixture
def few_orders(monkeypatch):
    """Let privacy accounting try few orders: with all of them, each configuration that is checked costs seconds."""
    caches = (accounting.noise_multiplier, accounting._rdp_of_a_step)
    monkeypatch.setattr(accounting, "orders", lambda: [2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 256.0, 1024.0])
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()
