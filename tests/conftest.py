"""Shared fixtures: the demo model, and tiny models made on the spot."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from caudal.weights.download import resolve_model
from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """SmolLM2-135M-Instruct Q4_1, fetched on first use."""
    return resolve_model("smollm2-135m")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama of two layers."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="session", autouse=True)
def data_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Servers under test must not go on with the batches of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data-home")))
        yield


@pytest.fixture(autouse=True)
def no_stray_threads() -> Iterator[None]:
    """A test that leaves a non-daemon thread behind would hang the run at its end."""
    before = set(threading.enumerate())
    yield
    stray = [t for t in threading.enumerate() if t not in before and not t.daemon and t.is_alive()]
    assert not [t for t in stray if "ThreadPoolExecutor" not in t.name], stray
