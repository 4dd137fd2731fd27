"""API keys: where they come from, how files that are wrong are refused, and what is kept."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from caudal.cli.serve import build_server_config
from caudal.config import ServerConfig
from caudal.errors import ConfigError
from caudal.server.keys import KeyRing, load_keys
from tests.server.harness import Setup, in_process

TOML = """
[[keys]]
name = "search"
key = "alpha"
requests_per_minute = 60
weight = 2.5

[[keys]]
key_sha256 = "{digest}"
min_priority = -5
"""


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def load(path: Path | None = None, *keys: str) -> KeyRing:
    return load_keys(ServerConfig(api_keys=keys, api_key_file=path))


def write(tmp_path: Path, name: str, content: Any) -> Path:
    path = tmp_path / name
    data = content if isinstance(content, bytes) else str(content).encode()
    path.write_bytes(data)
    path.chmod(0o600)
    return path


def test_keys_by_line_may_be_hashed_and_commented(tmp_path: Path) -> None:
    path = write(tmp_path, "keys", f"# team\nalpha\n\n  beta  \nsha256:{sha256('gamma')}\n")
    keys = load(path, "delta")
    assert len(keys) == 4
    for text in (b"alpha", b"beta", b"gamma", b"delta"):
        assert keys.find([text]) is not None
    for text in (b"# team", b"", b"alph", b"alphaa", f"sha256:{sha256('gamma')}".encode()):
        assert keys.find([text]) is None


@pytest.mark.parametrize("kind", ["toml", "json"])
def test_file_with_names_and_limits(tmp_path: Path, kind: str) -> None:
    text = TOML.format(digest=sha256("beta"))
    if kind == "json":
        first = {"name": "search", "key": "alpha", "requests_per_minute": 60, "weight": 2.5}
        text = json.dumps({"keys": [first, {"key_sha256": sha256("beta"), "min_priority": -5}]})
    keys = load(write(tmp_path, f"keys.{kind}", text))
    alpha, beta = keys.find([b"alpha"]), keys.find([b"beta"])
    assert alpha is not None and beta is not None
    assert (alpha.owner, alpha.limits.requests_per_minute, alpha.limits.weight) == (
        *("name:search", 60),
        2.5,
    )
    assert (beta.owner, beta.limits.min_priority) == (sha256("beta"), -5)
    assert keys.limits_of("name:search") == alpha.limits
    assert keys.limits_of("nobody").min_priority is None


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("keys", "# nothing\n\n", "holds no key"),
        ("keys", b"\xff\xfe", "not UTF-8"),
        ("keys", "a\na\n", "a key is given twice"),
        ("keys", "sha256:12\n", "line 1: sha256: must be followed by 64"),
        ("keys", "x" * 1_100_000, "larger than"),
        ("keys", "\n".join(map(str, range(1100))), "at most 1024 keys, got 1100"),
        ("keys.toml", "keys = [", "keys.toml: "),
        ("keys.toml", "[[keys]]\nname = 'a'", "keys[0]: needs either key or key_sha256"),
        ("keys.toml", "[[keys]]\nkey='a'\nkey_sha256='b'", "keys[0]: needs either"),
        ("keys.toml", "[[keys]]\nkey='a'\nweight=0", "weight"),
        ("keys.toml", "[[keys]]\nkey='a'\nrequests_per_minute=0", "requests_per_minute"),
        ("keys.toml", "[[keys]]\nkey='a'\nrpm=1", "rpm"),
        ("keys.toml", "[[keys]]\nkey=''", "keys[0].key: a key must not be empty"),
        ("keys.toml", "[[keys]]\nkey_sha256='zz'", "keys[0].key_sha256: sha256:"),
        ("keys.toml", "[[keys]]\nkey='a'\nname='n'\n[[keys]]\nkey='b'\nname='n'", "'name:n'"),
        ("keys.json", "[" * 100_000, "keys.json: "),
        ("keys.json", '{"keys": {}}', "keys"),
    ],
)
def test_unusable_file_is_named_with_place_and_limit(
    tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, name, content))
    assert message in str(caught.value)
    assert "--api-key" in str(caught.value)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*nope: No such file"):
        load(tmp_path / "nope")


def test_keys_that_everybody_can_read_are_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path, "keys", "a")
    with caplog.at_level(logging.WARNING):
        load(path)
        assert not caplog.records
        path.chmod(0o644)
        load(path)
    assert "can be read by other users" in caplog.text


def test_replaced_keys_open_at_once_and_old_ones_no_more() -> None:
    keys = load(None, "old")
    keys.replace(load(None, "new", "newer"))
    assert keys.find([b"old"]) is None
    assert keys.find([b"new"]) is not None
    assert len(keys) == 2


def server_config(**given: Any) -> ServerConfig:
    return build_server_config("m", {ServerConfig: given})


def test_environment_gives_the_key_unless_a_flag_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CAUDAL_API_KEY", raising=False)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    assert server_config().api_keys == ()
    monkeypatch.setenv("VLLM_API_KEY", "v")
    assert server_config().api_keys == (f"sha256:{sha256('v')}",)
    monkeypatch.setenv("CAUDAL_API_KEY", "c")
    assert server_config().api_keys == (f"sha256:{sha256('c')}",)
    assert server_config(api_keys=("flag",)).api_keys == ("flag",)


async def test_every_key_opens_the_server_and_none_is_kept_in_clear() -> None:
    keys = ("first-secret", "second-secret")
    async with in_process(Setup(config=ServerConfig(port=0, api_keys=keys))) as served:
        for key in keys:
            for header in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}):
                response = await served.http.get("/v1/models", headers=header)
                assert response.status_code == 200
        assert "secret" not in repr(served.state.keys._keys)
