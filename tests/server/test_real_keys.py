"""Keys of a whole server process: turns, cache, deadlines, reload, and HTTPS."""

from __future__ import annotations

import asyncio
import signal
import ssl
import subprocess
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from caudal.config import ServerConfig
from caudal.errors import ConfigError
from caudal.server.tls import create_ssl_context
from tests.server.test_real_engine import RealServer, serving
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = "the river runs through the old town and the people of the town " * 4


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def key_file(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Path]:
    # Name lookups run in the loop's executor, whose threads here outlive a single test.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("a\nb\n")
    path.chmod(0o600)
    yield path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tiny_model: Path, key_file: Path) -> AsyncIterator[RealServer]:
    flags = ("--api-key-file", str(key_file), "--api-key", "c", "--max-num-seqs", "4")
    async with serving(tiny_model, *flags) as server:
        server.http.headers["x-api-key"] = "c"
        yield server
        await server.check_idle()


async def post(server: RealServer, key: str, **fields: Any) -> httpx.Response:
    body = {"prompt": "the river", "ignore_eos": True, **fields}
    return await server.http.post("/v1/completions", json=body, headers={"x-api-key": key})


async def test_one_request_is_not_stuck_behind_two_hundred_of_another_key(
    server: RealServer,
) -> None:
    async def timed(key: str, number: int, max_tokens: int) -> float:
        response = await post(server, key, prompt=f"{number} the", max_tokens=max_tokens)
        assert response.status_code == 200
        return time.monotonic()

    crowd = [asyncio.create_task(timed("a", number, 100)) for number in range(200)]
    async with asyncio.timeout(30):
        while await server.metric("caudal_num_requests_waiting") < 100:
            await asyncio.sleep(0.01)
    single = await timed("b", 1000, 8)
    ends = sorted(await asyncio.gather(*crowd))
    num_before = sum(end < single for end in ends)
    assert num_before < 150
    await server.check_idle()


async def test_cached_prompts_of_a_key_are_invisible_to_others(server: RealServer) -> None:
    """Neither cached_tokens nor an earlier first token tells what another key has asked."""

    async def cached(key: str, salt: str | None = None) -> int:
        response = await post(server, key, prompt=PROMPT, max_tokens=1, cache_salt=salt)
        return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert await cached("a") == 0
    own = await cached("a")
    assert own > 16
    assert await cached("b") == 0
    assert await cached("b") == own
    assert await cached("a", "s") == 0
    # Together, too: nobody waits for what another key is computing.
    prompts = [f"{i} {PROMPT}" for i in range(2)]
    answers = await asyncio.gather(
        *(post(server, key, prompt=p, max_tokens=1) for p in prompts for key in "ab")
    )
    details = [answer.json()["usage"]["prompt_tokens_details"] for answer in answers]
    assert [entry["cached_tokens"] for entry in details] == [0, 0, 0, 0]


async def test_deadline_ends_running_and_queued_requests(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "long.gguf", context_length=16_384)
    async with serving(model, "--max-num-seqs", "2") as server:
        started = time.monotonic()
        long = {"max_tokens": 15_000, "timeout": 2.0}
        running = [asyncio.create_task(post(server, "", **long)) for _ in range(2)]
        await asyncio.sleep(0.1)
        queued = await post(server, "", timeout=0.3, max_tokens=1)
        assert time.monotonic() - started < 1.5
        answers = [queued, *(await asyncio.gather(*running))]
        assert 1.9 < time.monotonic() - started < 6.0
        for response in answers:
            assert response.status_code == 504
            assert response.json()["error"]["code"] == "deadline_exceeded"
        assert "before its first token" in queued.json()["error"]["message"]
        await server.check_idle()


async def test_hangup_reads_the_keys_again_and_a_bad_file_changes_nothing(
    server: RealServer, key_file: Path
) -> None:
    async def status(key: str) -> int:
        response = await server.http.get("/v1/models", headers={"x-api-key": key})
        return response.status_code

    key_file.write_text("a\nnew\n")
    server.process.send_signal(signal.SIGHUP)
    async with asyncio.timeout(5):
        while await status("new") != 200:
            await asyncio.sleep(0.02)
    assert [await status(key) for key in ("a", "b", "c")] == [200, 401, 200]
    key_file.write_text("sha256:oops\n")
    server.process.send_signal(signal.SIGHUP)
    await asyncio.sleep(0.2)
    assert [await status(key) for key in ("a", "new", "c")] == [200, 200, 200]


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1, and its key."""
    certificate, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key)),
            *("-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key


async def test_https_serves_streams_and_refuses_plain_http(
    tiny_model: Path, tmp_path: Path
) -> None:
    certificate, key = make_certificate(tmp_path)
    trust = ssl.create_default_context(cafile=str(certificate))
    flags = ("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key))
    async with serving(tiny_model, *flags, trust=trust) as server:
        assert (await server.complete(max_tokens=3))["usage"]["completion_tokens"] == 3
        chunks = await server.openai.completions.create(
            model="tiny", prompt="the", max_tokens=5, stream=True
        )
        assert len([chunk async for chunk in chunks]) >= 1
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
        async with asyncio.timeout(5):
            assert b"200 OK" not in await reader.read()
        writer.close()
        await server.check_idle()
        server.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(10):
            assert await server.process.wait() == 0


async def test_required_client_certificate_keeps_others_out(
    tiny_model: Path, tmp_path: Path
) -> None:
    certificate, key = make_certificate(tmp_path)
    trust = ssl.create_default_context(cafile=str(certificate))
    trust.load_cert_chain(certificate, key)
    flags = ("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key))
    flags += ("--ssl-ca-certs", str(certificate), "--ssl-cert-reqs", "2")
    async with serving(tiny_model, *flags, trust=trust) as server:
        assert (await server.http.get("/live")).status_code == 200
        stranger = ssl.create_default_context(cafile=str(certificate))
        url = f"https://127.0.0.1:{server.port}"
        async with httpx.AsyncClient(base_url=url, verify=stranger) as http:
            with pytest.raises(httpx.TransportError):
                await http.get("/live")


async def test_unusable_certificates_are_named_by_flag(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    broken = tmp_path / "broken.pem"
    broken.write_text("nothing")
    for fields, message in (
        ({"ssl_keyfile": key}, "--ssl-keyfile: needs --ssl-certfile"),
        ({"ssl_cert_reqs": 1}, "--ssl-cert-reqs: needs --ssl-certfile"),
        ({"ssl_certfile": broken}, "--ssl-certfile"),
        ({"ssl_certfile": certificate, "ssl_keyfile": broken}, "--ssl-keyfile"),
        ({"ssl_certfile": tmp_path / "none"}, "cannot read the file"),
        (
            {"ssl_certfile": certificate, "ssl_keyfile": key, "ssl_cert_reqs": 2},
            "--ssl-cert-reqs: needs --ssl-ca-certs",
        ),
        (
            {"ssl_certfile": certificate, "ssl_keyfile": key, "ssl_ca_certs": broken},
            "--ssl-ca-certs: not a usable certificate",
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            create_ssl_context(ServerConfig(**fields))
        assert message in str(caught.value)
