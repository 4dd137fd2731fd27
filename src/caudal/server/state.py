"""What every endpoint works with; one per server process, passed explicitly."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from caudal.config import ServerConfig
from caudal.diagnosis.load_log import LoadLog
from caudal.engine.client import EngineClient
from caudal.engine.messages import EngineStats
from caudal.errors import NotFoundError, UnavailableError
from caudal.metrics.request_log import RequestLog
from caudal.metrics.server_metrics import ServerMetrics
from caudal.scheduler.service_class import ServiceClass
from caudal.server.body import UnknownFieldLog
from caudal.server.exchange import BodyBudget, Exchange
from caudal.server.keys import KeyRing, load_keys
from caudal.server.load import finisher
from caudal.server.model import ServedModel
from caudal.server.quota import Quotas
from caudal.server.sse import StreamRegistry
from caudal.server.turns import Turns

if TYPE_CHECKING:
    from caudal.metrics.exposition import Exposition
    from caudal.server.batch.service import BatchService
    from caudal.server.diagnosis import Practice
    from caudal.server.generation.serve import Generation
    from caudal.server.recorder import Recorder


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Bounds that protect the server from its clients."""

    ping_interval_s: float = 15.0
    """Silence after which a stream gets a comment line."""
    slow_reader_s: float = 30.0
    """How long a stream may wait for a reader whose buffer is full."""
    max_buffered_bytes: int = 256 * 1024 * 1024
    """Bodies of all requests that are not prepared yet."""
    body_timeout_s: float = 60.0
    """Time for a whole request body to arrive."""
    max_choices: int = 1024
    """Prompts × n of one request."""
    inline_chars: int = 4096
    """Prompts up to this many characters are tokenized on the event loop."""
    tokenizer_threads: int = 1
    """Threads for longer prompts: one, because the engine needs the cores."""
    turns_per_pass: int = 2
    """Requests prepared between two looks at the network."""


@dataclass(slots=True)
class AppState:
    """Engine, model, limits and live bookkeeping; owned by the event loop."""

    config: ServerConfig
    engine: EngineClient
    model: ServedModel | None = None
    """None until it is loaded."""
    limits: ServerLimits = field(default_factory=ServerLimits)
    metrics: ServerMetrics = field(default_factory=ServerMetrics)
    batch_metrics: ServerMetrics = field(default_factory=ServerMetrics)
    """Of the requests of offline batches, apart: nobody waits for these."""
    unknown_fields: UnknownFieldLog = field(default_factory=UnknownFieldLog)
    is_draining: bool = False
    num_active: int = 0
    """Generation requests between their first byte and the end of their answer."""
    request_log: RequestLog = field(default_factory=RequestLog)
    generations: dict[Generation, None] = field(default_factory=dict)
    """Those that the engine has accepted and that have not ended, oldest first."""
    keys: KeyRing = field(default_factory=KeyRing)
    """Without any here: those of the configuration."""
    quotas: Quotas = field(default_factory=lambda: Quotas(time.monotonic))
    load_log: LoadLog = field(init=False)
    """The latest requests as a load, for the doctor."""
    streams: StreamRegistry = field(init=False)
    turns: Turns = field(init=False)
    bodies: BodyBudget = field(init=False)
    pool: ThreadPoolExecutor = field(init=False)
    _random: Random = field(default_factory=lambda: Random(os.urandom(32)))
    _exposition: Exposition | None = None
    _batches: BatchService | None = None
    _recorder: Recorder | None = None
    _practice: Practice | None = None

    def __post_init__(self) -> None:
        if not len(self.keys):
            self.keys = load_keys(self.config)
        self.load_log = LoadLog(remember_prompts=self.config.prefix_lint)
        self.request_log.listeners.append(finisher(self.load_log))
        limits = self.limits
        self.streams = StreamRegistry(
            ping_interval_s=limits.ping_interval_s, slow_reader_s=limits.slow_reader_s
        )
        self.turns = Turns(limits.turns_per_pass)
        self.bodies = BodyBudget(max(limits.max_buffered_bytes, self.config.max_body_bytes))
        self.pool = ThreadPoolExecutor(limits.tokenizer_threads, "caudal-tokenizer")

    async def read_json(self, exchange: Exchange) -> bytes:
        """The request's body, within this server's limits."""
        return await exchange.read_json(
            self.config.max_body_bytes, self.limits.body_timeout_s, self.bodies
        )

    def metrics_of(self, service: ServiceClass) -> ServerMetrics:
        """The instruments that observe requests of that class."""
        return self.metrics if service is ServiceClass.INTERACTIVE else self.batch_metrics

    @property
    def batches(self) -> BatchService:
        """Files and batches; made on first use, because most servers never need them."""
        if self._batches is None:
            from caudal.server.batch.service import BatchService

            self._batches = BatchService(self)
        return self._batches

    async def close_recorder(self) -> None:
        """Write what the history does not have yet."""
        if self._recorder is not None:
            await self._recorder.close()

    async def close_batches(self) -> None:
        """Stop running batches where they are; a later server goes on with them."""
        if self._batches is not None:
            await self._batches.close()

    @property
    def recorder(self) -> Recorder:
        """Recent readings and the history; made on first use."""
        if self._recorder is None:
            from caudal.server.recorder import Recorder

            self._recorder = Recorder(self)
        return self._recorder

    @property
    def practice(self) -> Practice:
        """The doctor; made on first use."""
        if self._practice is None:
            from caudal.server.diagnosis import Practice

            self._practice = Practice(self)
        return self._practice

    @property
    def num_preparing(self) -> int:
        """Generation requests that have not reached the engine yet."""
        return max(0, self.num_active - len(self.generations))

    @property
    def is_ready(self) -> bool:
        """Whether a generation request would be accepted now."""
        return self.model is not None and not self.is_draining and self.engine.is_ready

    def create_request_id(self, prefix: str) -> str:
        """A name that no other request of any server has (96 random bits)."""
        return f"{prefix}-{self._random.getrandbits(96):024x}"

    def require_model(self, name: str | None = None) -> ServedModel:
        """The model called `name` (None or empty: the served one).

        Raises UnavailableError while it loads, NotFoundError for another name.
        """
        if self.model is None:
            raise UnavailableError("The model is still loading.", code="model_loading")
        if name and name != self.model.name:
            raise NotFoundError(
                f"The model {name[:256]!r} does not exist; this server has {self.model.name!r}.",
                param="model",
                code="model_not_found",
            )
        return self.model

    def require_serving(self) -> None:
        """Raise UnavailableError while the server drains or its engine is not up."""
        if self.is_draining:
            raise UnavailableError("The server is shutting down.", code="shutting_down")
        if not self.engine.is_ready:
            raise UnavailableError("The engine is not ready.", code="engine_not_ready")

    def exposition(self) -> Exposition:
        """The metrics page; made on first use, because its imports cost 60 ms of start-up."""
        if self._exposition is None:
            from caudal.metrics.exposition import Exposition

            self._exposition = Exposition(self, self.config.metrics_compat)
        return self._exposition

    @property
    def engine_gauges(self) -> EngineStats:
        """The engine's latest numbers."""
        return self.engine.stats

    @property
    def is_engine_ready(self) -> bool:
        """True while the engine answers."""
        return self.engine.is_ready

    @property
    def targets_ms(self) -> Mapping[str, float]:
        """The scheduler's latency targets; those that it does not have are absent."""
        if not self.engine.is_ready:
            return {}
        settings = self.engine.info.settings
        pairs = ((name, settings.get(f"{name}_ms")) for name in ("ttft", "tpot"))
        return {name: float(value) for name, value in pairs if value is not None}

    @property
    def cache_labels(self) -> Mapping[str, str]:
        """What is fixed about the KV cache, as vLLM labels it."""
        if not self.engine.is_ready:
            return {}
        info = self.engine.info
        settings = info.settings
        return {
            "block_size": str(info.block_size),
            "num_gpu_blocks": str(info.num_blocks),
            "cache_dtype": str(settings.get("kv_cache_dtype", "auto")),
            "enable_prefix_caching": str(settings.get("enable_prefix_caching", True)),
        }

    @property
    def model_labels(self) -> Mapping[str, str]:
        """Labels of the model's info metric."""
        if self.model is None:
            return {"model_name": "", "architecture": "", "quantization": ""}
        return {
            "model_name": self.model.name,
            "architecture": self.model.architecture,
            "quantization": self.model.quantization,
        }
