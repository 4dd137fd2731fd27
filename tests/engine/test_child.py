"""The engine's process before it knows what to run: never left behind, never in the way."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time

from caudal.engine.child import EngineChild


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_child_nobody_configured_is_gone_after_the_block() -> None:
    """A model that cannot be found must not leave a process behind."""
    with EngineChild() as child:
        assert is_alive(child.pid)
    assert not is_alive(child.pid)


def test_a_child_ends_when_its_parent_dies_before_configuring_it() -> None:
    code = (
        "import os; from caudal.engine.child import EngineChild;"
        "print(EngineChild().pid, flush=True); os._exit(1)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    pid = int(done.stdout)
    deadline = time.monotonic() + 20
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_alive(pid)
    assert done.stderr == ""


async def test_configuring_a_dead_child_is_no_error_and_its_end_is_seen_by_all_waiters() -> None:
    child = EngineChild()
    child.kill()
    waiters = [asyncio.create_task(child.wait()) for _ in range(2)]
    async with asyncio.timeout(10):
        assert await child.wait() < 0
        assert await asyncio.gather(*waiters) == [child.returncode] * 2
    child.configure(b"{}")


async def test_giving_up_waiting_does_not_lose_the_end() -> None:
    """`stop` waits with a timeout, kills, and waits again."""
    child = EngineChild()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(child.wait(), 0.01)
    child.kill()
    assert await asyncio.wait_for(child.wait(), 10) < 0
    child.configure(b"")
