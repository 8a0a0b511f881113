from __future__ import annotations

import gc
from importlib.metadata import version

import pytest
from hypothesis import HealthCheck, settings

# Tests save and load files: how long an example takes says more about the machine than about the
# code.
settings.register_profile("files", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("files")


OF_TORCH_2_6 = ("TypedStorage is deprecated", "torch.distributed is unavailable or uninitialized")
"""Warnings of its own torch.distributed.checkpoint."""


def pytest_configure(config):
    for text in OF_TORCH_2_6 if version("torch").startswith("2.6.") else ():
        config.addinivalue_line("filterwarnings", f"ignore:{text}:UserWarning")


def pytest_collection_modifyitems(config, items):
    """Leave the long sweeps out unless a `-m` expression decides about them."""
    if config.option.markexpr:
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if not item.get_closest_marker("slow")]


def pytest_collection_finish():
    """Collect garbage less often, and not in what stays to the end: it took a tenth of the time of
    small tests.
    """
    gc.freeze()
    gc.set_threshold(10_000)


@pytest.fixture(scope="module")
def run():
    """The `run` of the harness, but the tests of a module share the processes of ranks."""
    from tests.support.harness import kept_ranks

    with kept_ranks() as run:
        yield run


@pytest.fixture
def one_rank():
    """A process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# Imported by those tests only that need a server: moto takes seconds.
@pytest.fixture(scope="session")
def s3_server():
    """The URL of a real S3 server."""
    from tests.support.s3_server import running_server

    with running_server() as url:
        yield url


@pytest.fixture
def server(s3_server):
    """The URL of a real S3 server that this process, and those it starts, find through the
    environment.
    """
    from tests.support.s3_server import reached_at

    with reached_at(s3_server):
        yield s3_server


@pytest.fixture
def bucket(server):
    """The URL of an empty bucket, such as `s3://bucket-0123`."""
    from tests.support.s3_server import new_bucket

    return new_bucket(server)


@pytest.fixture(scope="session")
def azurite():
    """The URL of Azure's emulator."""
    from tests.support.cloud_servers import running_azurite

    with running_azurite() as url:
        yield url


@pytest.fixture(scope="session")
def fake_gcs():
    """The URL of fake-gcs-server."""
    from tests.support.cloud_servers import running_fake_gcs

    with running_fake_gcs() as url:
        yield url


@pytest.fixture
def s3_store(s3_server):
    from tests.support.cloud_servers import s3_store

    with s3_store(s3_server) as store:
        yield store


@pytest.fixture
def google_store(fake_gcs):
    from tests.support.cloud_servers import google_store

    with google_store(fake_gcs) as store:
        yield store


@pytest.fixture
def azure_store(azurite):
    from tests.support.cloud_servers import azure_store

    with azure_store(azurite) as store:
        yield store


@pytest.fixture(params=["s3", "google", "azure"])
def cloud(request):
    """An empty place in a store of each kind, and a way to let its requests fail."""
    return request.getfixturevalue(f"{request.param}_store")


@pytest.fixture
def memory():
    """The prefix of an empty in-memory object store."""
    import fsspec

    files = fsspec.filesystem("memory")
    files.store.clear()
    files.pseudo_dirs[:] = [""]
    yield "memory://bucket"
    files.store.clear()
    files.pseudo_dirs[:] = [""]


@pytest.fixture
def no_saves_left():
    """Let no save of one test go on into the next, and no error of it surface there."""
    import distckpt
    from distckpt._io import background
    from distckpt._operations import planned_save

    yield
    background.wait_for_all()
    planned_save._saves_of_groups.clear()
    distckpt.release_staging_memory()
