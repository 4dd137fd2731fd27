"""`caudal serve`: a model behind the OpenAI API."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from caudal.cli.flags import Flag, Positional, Values, create_command, parse_plain
from caudal.cli.units import (
    api_key,
    choice,
    count,
    directory,
    existing_file,
    json_strings,
    nonempty,
    number,
    parse_bytes,
)
from caudal.config import (
    BLOCK_SIZE,
    PROFILES,
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    ActivationDType,
    Batching,
    CacheConfig,
    EngineConfig,
    KVCacheDType,
    ParallelConfig,
    SchedulerConfig,
    ServerConfig,
    WeightsConfig,
    environment_api_keys,
    with_profile,
)
from caudal.errors import ConfigError

DEFAULT_MODEL = "smollm2-135m"

_MAX_INT = 2**31 - 1

_KV_CACHE_DTYPES: dict[str, object] = {
    "auto": KVCacheDType.AUTO,
    "f16": KVCacheDType.F16,
    "fp16": KVCacheDType.F16,
    "float16": KVCacheDType.F16,
    "bf16": KVCacheDType.BF16,
    "bfloat16": KVCacheDType.BF16,
    "int8": KVCacheDType.INT8,
}


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Choices of the command itself, resolved into the other configs."""

    profile: str = "chat"
    """Service level that sets the latency targets: chat, code, document, agent or batch."""
    ttft_ms: float | None = None
    """Target time to first token in milliseconds, instead of the profile's."""
    tpot_ms: float | None = None
    """Target time per output token in milliseconds, instead of the profile's."""
    log_level: str = "info"
    """Least severe log messages to print: debug, info, warning or error."""


MODEL_FLAGS = (
    Flag("--max-model-len", SchedulerConfig, "max_model_len", count(0, _MAX_INT, auto=0), "N"),
    Flag("--kv-cache-dtype", CacheConfig, "kv_cache_dtype", choice(_KV_CACHE_DTYPES), "TYPE"),
    Flag("--kv-cache-memory", CacheConfig, "kv_cache_memory_bytes", parse_bytes, "SIZE"),
    Flag("--block-size", CacheConfig, "block_size", count(BLOCK_SIZE, BLOCK_SIZE), "N"),
    Flag("--enable-prefix-caching", CacheConfig, "enable_prefix_caching", None),
    Flag("--threads", ParallelConfig, "num_threads", count(1, 1024), "N"),
    Flag(
        "--activation-dtype",
        WeightsConfig,
        "activation_dtype",
        choice({str(dtype): dtype for dtype in ActivationDType}),
        "TYPE",
    ),
    Flag("--packed-cache", WeightsConfig, "packed_cache", None),
    Flag("--packed-cache-dir", WeightsConfig, "packed_cache_dir", directory, "DIR"),
)

_SCHEDULER_FLAGS = (
    Flag("--max-num-seqs", SchedulerConfig, "max_num_seqs", count(1, 4096), "N"),
    Flag(
        "--max-num-batched-tokens",
        SchedulerConfig,
        "max_num_batched_tokens",
        count(1, 65536),
        "N",
    ),
    Flag("--profile", ServeOptions, "profile", choice({name: name for name in PROFILES}), "NAME"),
    Flag("--ttft-ms", ServeOptions, "ttft_ms", number(1, 3_600_000), "MS"),
    Flag("--tpot-ms", ServeOptions, "tpot_ms", number(1, 3_600_000), "MS"),
    Flag("--batching", SchedulerConfig, "batching", choice({str(b): b for b in Batching}), "MODE"),
    Flag(
        "--num-speculative-tokens",
        SchedulerConfig,
        "num_speculative_tokens",
        count(0, 16),
        "N",
    ),
    Flag("--max-queue-requests", SchedulerConfig, "max_queue_requests", count(0, _MAX_INT), "N"),
    Flag("--max-queue-tokens", SchedulerConfig, "max_queue_tokens", count(0, _MAX_INT), "N"),
    Flag("--max-queue-ttft", SchedulerConfig, "max_queue_ttft_s", number(0.001, 86_400), "S"),
)

_SERVER_FLAGS = (
    Flag("--host", ServerConfig, "host", nonempty, "ADDRESS"),
    Flag("--port", ServerConfig, "port", count(0, 65535), "N"),
    Flag("--served-model-name", ServerConfig, "served_model_name", nonempty, "NAME"),
    Flag("--api-key", ServerConfig, "api_keys", api_key, "KEY", is_repeatable=True),
    Flag("--api-key-file", ServerConfig, "api_key_file", existing_file, "FILE"),
    Flag("--prefix-cache-per-key", ServerConfig, "prefix_cache_per_key", None),
    Flag("--ssl-certfile", ServerConfig, "ssl_certfile", existing_file, "FILE"),
    Flag("--ssl-keyfile", ServerConfig, "ssl_keyfile", existing_file, "FILE"),
    Flag("--ssl-ca-certs", ServerConfig, "ssl_ca_certs", existing_file, "FILE"),
    Flag("--ssl-cert-reqs", ServerConfig, "ssl_cert_reqs", count(0, 2), "N"),
    Flag("--allowed-origins", ServerConfig, "allowed_origins", json_strings, "LIST"),
    Flag("--allowed-methods", ServerConfig, "allowed_methods", json_strings, "LIST"),
    Flag("--allowed-headers", ServerConfig, "allowed_headers", json_strings, "LIST"),
    Flag("--allow-credentials", ServerConfig, "allow_credentials", None),
    Flag("--max-body-size", ServerConfig, "max_body_bytes", parse_bytes, "SIZE"),
    Flag("--normalize-client-headers", ServerConfig, "normalize_client_headers", None),
    Flag(
        "--tool-call-parser",
        ServerConfig,
        "tool_call_parser",
        choice({name: name for name in ("auto", *TOOL_CALL_PARSERS)}),
        "NAME",
    ),
    Flag("--enable-auto-tool-choice", ServerConfig, "enable_auto_tool_choice", None),
    Flag(
        "--reasoning-parser",
        ServerConfig,
        "reasoning_parser",
        choice({name: name for name in ("auto", "none", *REASONING_PARSERS)}),
        "NAME",
    ),
    Flag("--data-dir", ServerConfig, "data_dir", directory, "DIR"),
    Flag(
        "--metrics-compat",
        ServerConfig,
        "metrics_compat",
        choice({name: name for name in ("none", "vllm")}),
        "NAME",
    ),
    Flag("--otlp-traces-endpoint", ServerConfig, "otlp_traces_endpoint", nonempty, "URL"),
    Flag("--history", ServerConfig, "enable_history", None),
    Flag("--history-days", ServerConfig, "history_days", count(1, 3650), "N"),
    Flag("--prefix-lint", ServerConfig, "prefix_lint", None),
    Flag("--drain-timeout", ServerConfig, "drain_timeout_s", number(0, 86_400), "S"),
    Flag(
        "--log-level",
        ServeOptions,
        "log_level",
        choice({name: name for name in ("debug", "info", "warning", "error")}),
        "LEVEL",
    ),
)

SERVE_FLAGS = (*_SERVER_FLAGS, *MODEL_FLAGS, *_SCHEDULER_FLAGS)

MODEL = Positional("model", DEFAULT_MODEL, "A known name, a hub id, or the path of a GGUF file.")


def serve(model: str, values: Values) -> None:
    """Serve MODEL to many users at once over the OpenAI API."""
    # While everything loads the collector would only walk it; the server turns it on when ready.
    gc.disable()
    # Nothing here multiplies matrices with NumPy, whose threads would spin beside the engine's.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    server, scheduler = build_server_config(model, values), build_scheduler_config(values)
    configure_logging(ServeOptions(**values[ServeOptions]).log_level)

    cache, parallel = CacheConfig(**values[CacheConfig]), ParallelConfig(**values[ParallelConfig])
    weights = WeightsConfig(**values[WeightsConfig])

    from caudal.engine.child import EngineChild

    # First of all: the engine imports its code while this process finds the model and its own.
    with EngineChild() as child:
        from caudal.weights.download import resolve_model

        engine = EngineConfig(resolve_model(model), cache, scheduler, parallel, weights)

        from caudal.server.run import run_server

        run_server(engine, server, child)


def configure_logging(level: str) -> None:
    """Messages of `level` and above on standard error; the engine process follows."""
    logging.basicConfig(level=level.upper(), format="%(levelname)s %(name)s: %(message)s")
    # What uvicorn says at info (process started, application ready) the server says itself.
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLogger().level))


def build_scheduler_config(values: Values) -> SchedulerConfig:
    """The scheduler's config with the targets of the profile, or those given explicitly.

    Raises ConfigError for flags that contradict each other.
    """
    config = SchedulerConfig(**values[SchedulerConfig])
    if config.max_num_batched_tokens < config.max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens: must be at least --max-num-seqs ({config.max_num_seqs}), "
            f"got {config.max_num_batched_tokens}"
        )
    options = ServeOptions(**values[ServeOptions])
    return with_profile(config, options.profile, ttft_ms=options.ttft_ms, tpot_ms=options.tpot_ms)


def build_server_config(model: str, values: Values) -> ServerConfig:
    """The server's config; the API name of the model defaults to what was typed.

    Raises ConfigError for a bad key in the environment.
    """
    given = values[ServerConfig]
    if "api_keys" not in given:
        keys = environment_api_keys()
        given = {**given, "api_keys": tuple(api_key("$CAUDAL_API_KEY", key) for key in keys)}
    return ServerConfig(**{"served_model_name": model, **given})


def run_plain(argv: Sequence[str]) -> bool:
    """Serve as the words after `serve` say; False if they need typer to be understood."""
    parsed = parse_plain(argv, MODEL, SERVE_FLAGS)
    if parsed is not None:
        serve(*parsed)
    return parsed is not None


def create(is_help: bool) -> Callable[..., None]:
    """The command for typer."""
    return create_command(serve, MODEL, SERVE_FLAGS, is_help=is_help)
