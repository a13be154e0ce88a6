"""What tests of several algorithms share."""

import pytest


@pytest.fixture
def few_orders(monkeypatch):
    """Let privacy accounting try few orders: with all of them, each configuration that is checked costs seconds."""
    from rayfed.privacy import gaussian  # which imports Opacus, as few of these tests need

    caches = (gaussian.noise_multiplier, gaussian._rdp_of_a_step)
    monkeypatch.setattr(gaussian, "ORDERS", [2, 4, 8, 16, 32, 64, 256, 1024])
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()
