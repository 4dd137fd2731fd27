"""A server per test, checked for leftovers afterwards."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.server.harness import Served, in_process, on_loopback


@pytest.fixture
async def app() -> AsyncIterator[Served]:
    """The application in process."""
    async with in_process() as served:
        yield served
        await served.check_idle()


@pytest.fixture
async def server() -> AsyncIterator[Served]:
    """A server on loopback."""
    async with on_loopback() as served:
        yield served
        await served.check_idle()
