"""A batch server per test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.batch.harness import BatchServer, batch_server


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[BatchServer]:
    """The application in process with an empty data directory."""
    async with batch_server(tmp_path / "data") as server:
        yield server
    assert server.served.state.num_active == 0
    assert server.served.state.bodies.num_used == 0
    assert server.served.engine.stats.num_running == 0
