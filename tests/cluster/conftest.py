"""What several tests of the cluster layer start from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    """A Ray of this process, for the tests of one module."""
    from lexshard.cluster.lifecycle import start_local_ray

    start_local_ray()
    yield
    import ray

    ray.shutdown()
