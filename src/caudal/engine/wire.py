"""How an engine process is configured: one JSON document on its standard input."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from caudal.config import EngineConfig

HEARTBEAT_INTERVAL_S = 1.0
"""An engine sends an empty message this often, also inside a long step."""


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """What an engine process needs before it can talk."""

    engine: EngineConfig
    request_endpoint: str
    """ZMQ address from which the engine pulls ToEngine messages."""
    output_endpoint: str
    """ZMQ address to which it pushes FromEngine messages."""
    arrivals_path: Path
    """File of the counter of requests under way (Arrivals)."""
    log_level: int = logging.INFO
    """Least severe messages that the engine prints on its standard error."""


def encode_launch(launch: LaunchConfig) -> bytes:
    """JSON for the engine's standard input."""
    return msgspec.json.encode(launch, enc_hook=_encode_path)


def decode_launch(data: bytes) -> LaunchConfig:
    """The inverse of `encode_launch`."""
    return msgspec.json.decode(data, type=LaunchConfig, dec_hook=_decode_path)


def _encode_path(value: Any) -> str:
    assert isinstance(value, Path), f"no JSON form for {type(value)}"
    return str(value)


def _decode_path(kind: type, value: Any) -> Any:
    assert kind is Path, f"no JSON form for {kind}"
    return Path(value)
