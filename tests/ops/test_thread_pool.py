"""The native thread pool: fork, exit, oversubscription, sharing between Python threads."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from caudal import _native

PRELUDE = """
import os, sys, threading, time
import numpy as np
from caudal import _native

def compute(num_threads=2):
    x = np.ones((64, 32), np.float32)
    out = _native.testing.rms_norm("ref", x, np.ones(32, np.float32), 0.0, num_threads)
    assert (out == 1).all()
"""


def run_script(body: str, timeout_s: float = 30.0) -> str:
    """Run `body` after PRELUDE in its own process; a hang or a crash fails the test."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PRELUDE + body],
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    return done.stdout


def test_child_of_fork_computes_instead_of_hanging() -> None:
    out = run_script("""
compute()
pid = os.fork()
if pid == 0:
    compute()
    assert _native.testing.num_pool_threads() == 1
    os._exit(7)
_, status = os.waitpid(pid, 0)
compute()
print(os.waitstatus_to_exitcode(status))
""")
    assert out == "7\n"


def test_fork_while_another_thread_computes() -> None:
    out = run_script("""
is_done = False
def work():
    while not is_done:
        compute()
thread = threading.Thread(target=work)
thread.start()
codes = []
for _ in range(10):
    pid = os.fork()
    if pid == 0:
        compute()
        os._exit(7)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
is_done = True
thread.join()
print(set(codes))
""")
    assert out == "{7}\n"


def test_exit_with_idle_and_busy_threads() -> None:
    out = run_script("""
compute(4)
def work():
    while True:
        compute(4)
threading.Thread(target=work, daemon=True).start()
time.sleep(0.05)
print("end")
""")
    assert out == "end\n"


def test_more_threads_than_cores_finish() -> None:
    out = run_script("""
for _ in range(20):
    compute(16)
print(_native.testing.num_pool_threads())
""")
    assert out == "15\n"


def test_pool_grows_to_the_largest_request_only() -> None:
    out = run_script("""
counts = []
for num_threads in (1, 3, 2, 1):
    compute(num_threads)
    counts.append(_native.testing.num_pool_threads())
print(counts)
""")
    assert out == "[0, 2, 2, 2]\n"


def test_workers_block_signals() -> None:
    out = run_script("""
import signal
compute(3)
caught = []
signal.signal(signal.SIGUSR1, lambda *_: caught.append(threading.current_thread().name))
for _ in range(20):
    os.kill(os.getpid(), signal.SIGUSR1)
    compute(3)
masks = []
for task in os.listdir("/proc/self/task"):
    with open(f"/proc/self/task/{task}/status") as status:
        blocked = next(line for line in status if line.startswith("SigBlk"))
    masks.append(bool(int(blocked.split()[1], 16) >> (signal.SIGTERM - 1) & 1))
print(len(caught) > 0, masks.count(True) >= 2)
""")
    assert out == "True True\n"


def test_python_threads_take_turns_and_get_their_own_results() -> None:
    rng = np.random.default_rng(0)
    weight = np.ones(64, np.float32)
    inputs = [rng.standard_normal((17, 64)).astype(np.float32) for _ in range(8)]
    expected = [_native.testing.rms_norm("ref", x, weight, 1e-5, 1) for x in inputs]

    def work(index: int) -> bool:
        same = True
        for repeat in range(50):
            num_threads = 1 + (index + repeat) % 3
            out = _native.testing.rms_norm("ref", inputs[index], weight, 1e-5, num_threads)
            same &= np.array_equal(out, expected[index])
        return same

    with ThreadPoolExecutor(8) as executor:
        assert all(executor.map(work, range(8)))


@pytest.mark.parametrize("num_threads", [0, -1, 257])
def test_bad_number_of_threads_is_refused(num_threads: int) -> None:
    with pytest.raises(ValueError, match="num_threads"):
        _native.Runtime("", num_threads)


def test_refused_call_leaves_the_pool_usable() -> None:
    x, weight = np.ones((4, 32), np.float32), np.ones(32, np.float32)
    with pytest.raises(ValueError, match="weight"):
        _native.testing.rms_norm("ref", x, weight[:16], 0.0, 2)
    assert (_native.testing.rms_norm("ref", x, weight, 0.0, 2) == 1).all()


def test_denormals_are_flushed_inside_and_kept_outside() -> None:
    tiny = np.float32(1e-40)
    x = np.full((8, 32), tiny, np.float32)
    for num_threads in (1, 2):
        out = _native.testing.silu_mul("ref", x, num_threads)
        assert (out == 0).all(), "every thread must flush, or results depend on who did the row"
        assert tiny + tiny > 0, "the caller's floating-point mode must come back"
