from __future__ import annotations

from hypothesis import HealthCheck, settings

# Tests save and load files: how long an example takes says more about the machine than about the code.
settings.register_profile("files", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("files")


def pytest_collection_modifyitems(config, items):
    """Leave the long sweeps out unless a `-m` expression decides about them."""
    if config.option.markexpr:
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if not item.get_closest_marker("slow")]
