"""Configuration: every default is written once, here; a field's docstring is its CLI help."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from caudal.errors import ConfigError

BLOCK_SIZE = 16
"""Tokens per KV block; fixed by the kernels' layout."""


TOOL_CALL_PARSERS = (
    *("hermes", "llama3_json", "llama4_json", "mistral", "json"),
    *("qwen3_coder", "qwen3_xml", "pythonic", "llama4_pythonic", "openai"),
)
REASONING_PARSERS = (
    *("qwen3", "deepseek_r1", "deepseek_v3", "glm45", "olmo3", "step3"),
    *("mistral", "seed_oss", "thought", "openai_gptoss"),
)
"""Names of formats on the command line."""


class KVCacheDType(StrEnum):
    """How keys and values are stored; int8 has a scale per token and head."""

    AUTO = "auto"
    F16 = "f16"
    BF16 = "bf16"
    INT8 = "int8"


class ActivationDType(StrEnum):
    """How the inputs of quantised matrices are rounded."""

    AUTO = "auto"
    INT8 = "int8"
    INT12 = "int12"
    BF16 = "bf16"


class Batching(StrEnum):
    """How requests share the machine."""

    CONTINUOUS = "continuous"
    STATIC = "static"
    SERIAL = "serial"


@dataclass(frozen=True, slots=True)
class Profile:
    """A service level: targets in milliseconds, None for none."""

    name: str
    ttft_ms: float | None
    tpot_ms: float | None


PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile("chat", 500.0, 50.0),
        Profile("code", 200.0, 30.0),
        Profile("document", 2000.0, 60.0),
        Profile("agent", 1000.0, 40.0),
        Profile("batch", None, None),
    )
}


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Rotary-embedding scaling; `kind` is none, linear, yarn or llama3."""

    kind: str = "none"
    factor: float = 1.0
    original_context_length: int = 0
    attention_factor: float = 1.0
    """YaRN: multiplies cos and sin."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    ext_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Hyper-parameters of a decoder, read and checked from the model file."""

    architecture: str
    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    rms_norm_eps: float
    rope_theta: float
    rope_dim: int
    rope_interleaved: bool
    """True: rotates pairs (2i, 2i+1) (GGUF llama); False: (i, i + rope_dim/2) (qwen)."""
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    is_tied: bool = False
    """The output matrix is the embedding table."""


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """KV cache."""

    kv_cache_dtype: KVCacheDType = KVCacheDType.AUTO
    """KV cache data type: f16, bf16 (CPUs with AMX only), int8 (half the memory), or auto: bf16
    where the CPU has AMX, else f16."""
    block_size: int = BLOCK_SIZE
    """Tokens per KV block (only 16 is supported by the CPU kernels)."""
    kv_cache_memory_bytes: int | None = None
    """KV cache size; unset: planned from available memory."""
    enable_prefix_caching: bool = True
    """Reuse the KV of shared prompt prefixes."""
    num_blocks: int | None = None
    """Exact number of KV blocks; overrides the size (tests, simulation)."""


@dataclass(frozen=True, slots=True)
class WeightsConfig:
    """How weights are multiplied, and where packed ones are kept between starts."""

    activation_dtype: ActivationDType = ActivationDType.AUTO
    """Rounding of the inputs of quantised matrices: bf16 (CPUs with AMX only; the fastest for more
    than four tokens at a time), int12 (the fastest for one), int8 (12 bits where it matters most),
    or auto: bf16 where the CPU has AMX, else int12 with AVX-512 and int8 without."""
    packed_cache: bool = True
    """Keep the packed weights in a file: later starts map it, several processes share it."""
    packed_cache_dir: Path | None = None
    """Folder for packed weights; unset: in the user's cache."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Scheduling, admission and service level."""

    batching: Batching = Batching.CONTINUOUS
    """continuous, static (form a batch, run it to the end) or serial (one at a time)."""
    max_num_seqs: int = 64
    """Requests that run together."""
    max_num_batched_tokens: int = 256
    """Tokens computed in one step, at most."""
    max_model_len: int = 0
    """Longest prompt + output in tokens; 0: the model's own context length."""
    ttft_ms: float | None = 500.0
    """Target time to first token; unset by the batch profile."""
    tpot_ms: float | None = 50.0
    """Target time per output token: bounds a step's predicted milliseconds."""
    max_queue_requests: int = 1024
    """Waiting requests before new ones get 429."""
    max_queue_tokens: int = 1_000_000
    """Waiting prompt tokens before new requests get 429."""
    max_queue_ttft_s: float = 120.0
    """Predicted TTFT above which a new request gets 429."""
    num_speculative_tokens: int = 8
    """Tokens guessed ahead from a request's own text, at most; answers stay the same. 0: none."""
    min_prefill_tokens_per_s: float = 64.0
    """Ageing: prompt progress that the oldest waiting request is guaranteed."""


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Threads and ranks."""

    num_threads: int | None = None
    """Compute threads; unset: physical cores within the affinity mask and cgroup quota."""
    rank: int = 0
    world_size: int = 1


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """HTTP front."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """Port to listen on; 0 picks a free one."""
    served_model_name: str | None = None
    """Model name in the API; unset: the name given on the command line."""
    api_keys: tuple[str, ...] = ()
    """Keys of which clients must send one as a bearer token or x-api-key; may be repeated."""
    api_key_file: Path | None = None
    """File of keys, one a line, or with names and limits (.toml, .json); read again on SIGHUP."""
    prefix_cache_per_key: bool = True
    """Never let one API key profit from, or find out, what another has cached."""
    data_dir: Path | None = None
    """Folder for files and batches, used by one server at a time; unset: in the user's data."""
    metrics_compat: str = "none"
    """vllm: /metrics has the series under vLLM's names, too."""
    otlp_traces_endpoint: str | None = None
    """Send a trace of each request to this OTLP collector (http:// or grpc://)."""
    enable_history: bool = True
    """Keep a row of metrics a minute in the data directory, for the dashboard and the doctor."""
    history_days: int = 30
    """How many days the history goes back."""
    prefix_lint: bool = True
    """Remember the tokens of the latest prompts, to show where and why prefixes stop matching."""
    drain_timeout_s: float = 30.0
    """After SIGTERM, how long running requests may finish."""
    max_body_bytes: int = 32 * 1024 * 1024
    """Largest request body."""
    ssl_certfile: Path | None = None
    """Certificate (PEM, with its chain); given, the server speaks HTTPS."""
    ssl_keyfile: Path | None = None
    """Key of the certificate (PEM); unset: it is in the certificate's file."""
    ssl_ca_certs: Path | None = None
    """Authorities (PEM) whose certificates clients may show."""
    ssl_cert_reqs: int = 0
    """Client certificates: 0 none, 1 optional, 2 required."""
    allowed_origins: tuple[str, ...] = ()
    """Web origins whose pages may use the API, as a JSON list; ["*"] is all."""
    allowed_methods: tuple[str, ...] = ("*",)
    """Methods that those pages may use, as a JSON list."""
    allowed_headers: tuple[str, ...] = ("*",)
    """Request headers that those pages may send, as a JSON list."""
    allow_credentials: bool = False
    """Let those pages send cookies."""
    normalize_client_headers: bool = True
    """Make the per-call nonce in agents' system-prompt headers constant: prefixes stay cached."""
    tool_call_parser: str = "auto"
    """How the model writes calls: hermes, llama3_json, mistral, qwen3_coder, pythonic, openai,
    json, or auto: by its template."""
    enable_auto_tool_choice: bool = True
    """Recognise calls that the model makes of its own accord (tool_choice auto)."""
    reasoning_parser: str = "auto"
    """How the model marks its reasoning: qwen3, deepseek_r1, …, none, or auto: by its template."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What an engine process is started with."""

    model_path: Path
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)


def with_profile(
    config: SchedulerConfig, name: str, *, ttft_ms: float | None, tpot_ms: float | None
) -> SchedulerConfig:
    """`config` with the targets of profile `name`; explicit targets override the profile's.

    Raises ConfigError for an unknown name or a target that is not positive.
    """
    if name not in PROFILES:
        raise ConfigError(f"--profile: unknown profile {name!r}; known: {', '.join(PROFILES)}")
    for flag, value in (("--ttft-ms", ttft_ms), ("--tpot-ms", tpot_ms)):
        if value is not None and not value > 0:
            raise ConfigError(f"{flag}: must be above 0, got {value}")
    profile = PROFILES[name]
    return replace(
        config,
        ttft_ms=profile.ttft_ms if ttft_ms is None else ttft_ms,
        tpot_ms=profile.tpot_ms if tpot_ms is None else tpot_ms,
    )


def cache_dir() -> Path:
    """Where models and packed weights are: $CAUDAL_CACHE_DIR, else in the user's cache."""
    explicit = os.environ.get("CAUDAL_CACHE_DIR")
    if explicit:
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "caudal"


def default_data_dir() -> Path:
    """Where a server keeps files and batches: the user's data directory."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "caudal"


def environment_api_keys() -> tuple[str, ...]:
    """$CAUDAL_API_KEY, else $VLLM_API_KEY: the key of a server that is given none by flag."""
    key = os.environ.get("CAUDAL_API_KEY") or os.environ.get("VLLM_API_KEY")
    return (key,) if key else ()


def forced_isa() -> str | None:
    """$CAUDAL_ISA: use this kernel set (ref, avx2, avxvnni …) instead of the best one."""
    return os.environ.get("CAUDAL_ISA") or None
