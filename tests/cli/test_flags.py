"""Flags: values arrive in the right field, limits are named, and help tells the truth."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

from caudal.cli import chat, serve
from caudal.cli.flags import (
    Flag,
    Values,
    create_command,
    field_default,
    field_docstrings,
    parse_flags,
    parse_plain,
)
from caudal.cli.units import choice, count, number, parse_bytes
from caudal.config import (
    ActivationDType,
    Batching,
    CacheConfig,
    KVCacheDType,
    ParallelConfig,
    SchedulerConfig,
    ServerConfig,
    WeightsConfig,
)
from caudal.errors import ConfigError

HASHED = "sha256:" + "0" * 64
SECRET = "sha256:2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b"
ORIGINS = (ServerConfig, "allowed_origins", ("https://a.example",))

GIVEN: dict[str, tuple[Any, type, str, Any]] = {
    "--host": ("0.0.0.0", ServerConfig, "host", "0.0.0.0"),
    "--port": ("9000", ServerConfig, "port", 9000),
    "--served-model-name": ("m", ServerConfig, "served_model_name", "m"),
    "--api-key": (["secret", HASHED], ServerConfig, "api_keys", (SECRET, HASHED)),
    "--api-key-file": (__file__, ServerConfig, "api_key_file", Path(__file__)),
    "--prefix-cache-per-key": (False, ServerConfig, "prefix_cache_per_key", False),
    "--ssl-certfile": (__file__, ServerConfig, "ssl_certfile", Path(__file__)),
    "--ssl-keyfile": (__file__, ServerConfig, "ssl_keyfile", Path(__file__)),
    "--ssl-ca-certs": (__file__, ServerConfig, "ssl_ca_certs", Path(__file__)),
    "--ssl-cert-reqs": ("2", ServerConfig, "ssl_cert_reqs", 2),
    "--allowed-origins": ('["https://a.example"]', *ORIGINS),
    "--allowed-methods": ('["GET"]', ServerConfig, "allowed_methods", ("GET",)),
    "--allowed-headers": ('["x-a"]', ServerConfig, "allowed_headers", ("x-a",)),
    "--allow-credentials": (True, ServerConfig, "allow_credentials", True),
    "--max-body-size": ("1MiB", ServerConfig, "max_body_bytes", 1 << 20),
    "--normalize-client-headers": (False, ServerConfig, "normalize_client_headers", False),
    "--tool-call-parser": ("mistral", ServerConfig, "tool_call_parser", "mistral"),
    "--enable-auto-tool-choice": (False, ServerConfig, "enable_auto_tool_choice", False),
    "--reasoning-parser": ("qwen3", ServerConfig, "reasoning_parser", "qwen3"),
    "--metrics-compat": ("vllm", ServerConfig, "metrics_compat", "vllm"),
    "--otlp-traces-endpoint": ("http://x:1", ServerConfig, "otlp_traces_endpoint", "http://x:1"),
    "--history": (False, ServerConfig, "enable_history", False),
    "--history-days": ("7", ServerConfig, "history_days", 7),
    "--prefix-lint": (False, ServerConfig, "prefix_lint", False),
    "--data-dir": ("/srv/data", ServerConfig, "data_dir", Path("/srv/data")),
    "--drain-timeout": ("1.5", ServerConfig, "drain_timeout_s", 1.5),
    "--log-level": ("DEBUG", serve.ServeOptions, "log_level", "debug"),
    "--max-model-len": ("4K", SchedulerConfig, "max_model_len", 4096),
    "--max-num-seqs": ("8", SchedulerConfig, "max_num_seqs", 8),
    "--max-num-batched-tokens": ("384", SchedulerConfig, "max_num_batched_tokens", 384),
    "--kv-cache-dtype": ("int8", CacheConfig, "kv_cache_dtype", KVCacheDType.INT8),
    "--activation-dtype": ("bf16", WeightsConfig, "activation_dtype", ActivationDType.BF16),
    "--kv-cache-memory": ("2GiB", CacheConfig, "kv_cache_memory_bytes", 2 << 30),
    "--block-size": ("16", CacheConfig, "block_size", 16),
    "--enable-prefix-caching": (False, CacheConfig, "enable_prefix_caching", False),
    "--threads": ("1", ParallelConfig, "num_threads", 1),
    "--packed-cache": (False, WeightsConfig, "packed_cache", False),
    "--packed-cache-dir": ("/srv/packed", WeightsConfig, "packed_cache_dir", Path("/srv/packed")),
    "--profile": ("agent", serve.ServeOptions, "profile", "agent"),
    "--ttft-ms": ("250", serve.ServeOptions, "ttft_ms", 250.0),
    "--tpot-ms": ("25", serve.ServeOptions, "tpot_ms", 25.0),
    "--batching": ("static", SchedulerConfig, "batching", Batching.STATIC),
    "--num-speculative-tokens": ("3", SchedulerConfig, "num_speculative_tokens", 3),
    "--max-queue-requests": ("3", SchedulerConfig, "max_queue_requests", 3),
    "--max-queue-tokens": ("4000", SchedulerConfig, "max_queue_tokens", 4000),
    "--max-queue-ttft": ("9", SchedulerConfig, "max_queue_ttft_s", 9.0),
}


def parse(flags: tuple[Flag, ...], **given: Any) -> dict[type, dict[str, Any]]:
    names = {flag.name.removeprefix("--").replace("-", "_") for flag in flags}
    return parse_flags(flags, dict.fromkeys(names) | given)


def test_every_serve_flag_is_covered_here() -> None:
    assert {flag.name for flag in serve.SERVE_FLAGS} == set(GIVEN)


@pytest.mark.parametrize("name", GIVEN)
def test_flag_value_arrives_in_its_field_and_differs_from_the_default(name: str) -> None:
    text, config, field, expected = GIVEN[name]
    values = parse(serve.SERVE_FLAGS, **{name.removeprefix("--").replace("-", "_"): text})
    assert values[config] == {field: expected}
    assert getattr(config(**values[config]), field) == expected
    if name != "--block-size":
        assert field_default(config, field) != expected


def test_flags_that_are_not_given_keep_the_defaults_of_their_config() -> None:
    values = parse(serve.SERVE_FLAGS)
    assert all(fields == {} for fields in values.values())
    assert serve.build_scheduler_config(values) == SchedulerConfig()


@pytest.mark.parametrize("flag", {*serve.SERVE_FLAGS, *chat.CHAT_FLAGS}, ids=lambda f: f.name)
def test_every_flag_has_help_from_its_field(flag: Flag) -> None:
    assert flag.help or field_docstrings(flag.config)[flag.field]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("--port", "99999", "--port: must be between 0 and 65535, got 99999"),
        ("--port", "http", "--port: must be a whole number, got 'http'"),
        ("--block-size", "32", "--block-size: must be between 16 and 16, got 32"),
        ("--max-num-seqs", "0", "--max-num-seqs: must be between 1 and 4096, got 0"),
        ("--threads", "0", "--threads: must be between 1 and 1024, got 0"),
        ("--threads", "1.5", "--threads: must be a whole number, got '1.5'"),
        ("--ttft-ms", "nan", "--ttft-ms: must be between 1 and 3.6e+06, got nan"),
        ("--tpot-ms", "-3", "--tpot-ms: must be between 1 and 3.6e+06, got -3"),
        ("--kv-cache-memory", "2 apples", "--kv-cache-memory: must be a size such as"),
        ("--kv-cache-memory", "0", "--kv-cache-memory: must be above 0 bytes"),
        ("--kv-cache-dtype", "fp8", "--kv-cache-dtype: must be one of auto, f16"),
        ("--profile", "fast", "--profile: must be one of chat, code, document, agent, batch"),
        ("--host", "", "--host: must not be empty"),
        ("--api-key", [" "], "--api-key: must not be empty"),
        ("--api-key", ["sha256:1"], "--api-key: sha256: must be followed by 64 hexadecimal"),
        ("--api-key-file", "/nope", "--api-key-file: there is no file /nope"),
        ("--ssl-cert-reqs", "3", "--ssl-cert-reqs: must be between 0 and 2, got 3"),
        ("--allowed-origins", "*", "--allowed-origins: must be a JSON list of texts"),
    ],
)
def test_bad_value_is_refused_with_flag_and_limit(name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(serve.SERVE_FLAGS, **{name.removeprefix("--").replace("-", "_"): text})
    assert str(caught.value).startswith(message)


def test_step_smaller_than_the_batch_is_refused_before_anything_loads() -> None:
    values = parse(serve.SERVE_FLAGS, max_num_seqs="128", max_num_batched_tokens="64")
    with pytest.raises(ConfigError, match=r"--max-num-batched-tokens: must be at least"):
        serve.build_scheduler_config(values)


def test_explicit_target_overrides_the_profile_and_the_profile_the_default() -> None:
    values = parse(serve.SERVE_FLAGS, profile="document", tpot_ms="20")
    config = serve.build_scheduler_config(values)
    assert (config.ttft_ms, config.tpot_ms) == (2000.0, 20.0)
    batch = serve.build_scheduler_config(parse(serve.SERVE_FLAGS, profile="batch"))
    assert (batch.ttft_ms, batch.tpot_ms) == (None, None)


def test_model_name_in_the_api_defaults_to_what_was_typed() -> None:
    values = parse(serve.SERVE_FLAGS)
    assert serve.build_server_config("smollm2-135m", values).served_model_name == "smollm2-135m"
    named = parse(serve.SERVE_FLAGS, served_model_name="mine")
    assert serve.build_server_config("smollm2-135m", named).served_model_name == "mine"


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("500M", 500_000_000), ("1.5GiB", 3 << 29), ("2g", 2 * 10**9), ("4 KiB", 4096)],
)
def test_sizes_follow_their_decimal_or_binary_unit(text: str, size: int) -> None:
    assert parse_bytes("--x", text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e9", "9999999TiB", "1XiB", "0.2"])
def test_malformed_sizes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--x: must be"):
        parse_bytes("--x", text)


def test_counts_take_units_and_the_word_auto_only_where_it_means_something() -> None:
    assert count(0, 10**6, auto=0)("--x", "auto") == 0
    assert [count(0, 10**6)("--x", t) for t in ("32k", "32K", "7")] == [32_000, 32_768, 7]
    with pytest.raises(ConfigError):
        count(0, 10)("--x", "auto")


def test_numbers_and_choices_refuse_what_is_outside() -> None:
    assert number(0, 2)("--x", "0.5") == 0.5
    assert choice({"a": 1})("--x", "A") == 1
    with pytest.raises(ConfigError):
        number(0, 2)("--x", "inf")
    with pytest.raises(ConfigError, match="one of a, got 'b'"):
        choice({"a": 1})("--x", "b")


@dataclass(frozen=True)
class Documented:
    first: int = 1
    """Said on
    two lines."""
    second: int = 2
    third: int = 3
    """Third."""


def test_docstrings_belong_to_the_field_above_them() -> None:
    assert field_docstrings(Documented) == {"first": "Said on two lines.", "third": "Third."}


def test_config_without_readable_source_has_no_docstrings(tmp_path: Path) -> None:
    namespace: dict[str, Any] = {"__name__": "builtins"}
    exec("class Invisible:\n    x: int = 1", namespace)
    assert field_docstrings(namespace["Invisible"]) == {}


def parse_with_typer(argv: list[str]) -> tuple[str, Values] | None:
    """What `serve` would be called with; None if typer refuses `argv` or shows help."""
    calls: list[tuple[str, Values]] = []
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    command = create_command(
        lambda model, values: calls.append((model, values)),
        serve.MODEL,
        serve.SERVE_FLAGS,
        is_help=False,
    )
    app.command()(command)
    try:
        app(args=argv, standalone_mode=False)
    except (typer.TyperException, ConfigError):
        return None
    return calls[0] if calls else None


WORDS = (
    *("model.gguf", "a", "--", "-", "", "-p", "--help", "--host", "--host=h", "--port", "9000"),
    *("--port=1", "--port=", "--hos", "--enable-prefix-caching", "--no-enable-prefix-caching"),
    *(
        "--enable-prefix-caching=1",
        "--no-port",
        "--threads",
        "-1",
        "--profile",
        "agent",
        "caf\u00e9",
    ),
    *("--log-level=x", "a=b", "--api-key", "--no-api-key", "\udcff", "--no-", "=", "---"),
)


def test_plain_parsing_never_differs_from_typer() -> None:
    """A second parser that reads a command line in its own way would be a trap."""
    choose = random.Random(7)
    num_plain = 0
    for _ in range(400):
        argv = choose.choices(WORDS, k=choose.randint(0, 4))
        try:
            plain = parse_plain(argv, serve.MODEL, serve.SERVE_FLAGS)
        except ConfigError:
            assert parse_with_typer(argv) is None, argv
            continue
        if plain is not None:
            num_plain += 1
            assert plain == parse_with_typer(argv), argv
    assert num_plain > 60


def test_plain_parsing_covers_every_flag() -> None:
    """Else a common command line would silently start slowly."""
    argv = ["model.gguf"]
    for name, (text, *_) in GIVEN.items():
        if isinstance(text, bool):
            argv.append(name if text else f"--no-{name[2:]}")
        else:
            argv += [word for value in _each(text) for word in (name, value)]
    plain = parse_plain(argv, serve.MODEL, serve.SERVE_FLAGS)
    assert plain is not None
    assert plain == parse_with_typer(argv)
    assert parse_plain([], serve.MODEL, serve.SERVE_FLAGS) == (
        serve.DEFAULT_MODEL,
        plain_defaults(),
    )


def _each(text: str | list[str]) -> list[str]:
    return [text] if isinstance(text, str) else text


def plain_defaults() -> Values:
    return {flag.config: {} for flag in serve.SERVE_FLAGS}
