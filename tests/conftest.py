from __future__ import annotations


def pytest_collection_modifyitems(config, items):
    """Leave the long sweeps out unless a `-m` expression decides about them."""
    if config.option.markexpr:
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if not item.get_closest_marker("slow")]
