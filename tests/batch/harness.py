"""A server over the fake engine with a data directory, and clients of its files and batches."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI

from caudal.config import ServerConfig
from caudal.server.batch.limits import BatchLimits
from caudal.server.batch.service import BatchService
from tests.server.harness import Served, Setup, in_process

TERMINAL = ("completed", "failed", "expired", "cancelled")
QUICK = BatchLimits(commit_interval_s=0.01, retry_failed_job_s=0.05)
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def line(custom_id: Any = "a", **fields: Any) -> dict[str, Any]:
    """A line of an input file; `fields` replace or add, a value of ... leaves one out."""
    body = {"messages": [{"role": "user", "content": f"hi {custom_id}"}], "max_tokens": 4}
    default = {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}
    return {key: value for key, value in (default | fields).items() if value is not ...}


def completion(custom_id: str, **fields: Any) -> dict[str, Any]:
    """A line for /v1/completions."""
    body = {"prompt": f"the river {custom_id}", "max_tokens": 4, "ignore_eos": True, **fields}
    return line(custom_id, url=COMPLETIONS, body=body)


def jsonl(lines: list[Any]) -> bytes:
    """Objects (or raw bytes) as lines."""
    return b"".join(
        (item if isinstance(item, bytes) else json.dumps(item).encode()) + b"\n" for item in lines
    )


@dataclass
class BatchClient:
    """What a user does with files and batches."""

    http: httpx.AsyncClient
    openai: AsyncOpenAI
    headers: dict[str, str] = field(default_factory=dict)

    async def post(self, path: str, **kwargs: Any) -> httpx.Response:
        headers = self.headers | kwargs.pop("headers", {})
        return await self.http.post(path, headers=headers, **kwargs)

    async def get(self, path: str) -> dict[str, Any]:
        response = await self.http.get(path, headers=self.headers)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def upload(self, content: bytes | list[Any]) -> str:
        """Store an input; returns the file's id."""
        data = content if isinstance(content, bytes) else jsonl(content)
        response = await self.post(
            "/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", data)}
        )
        assert response.status_code == 200, response.text
        return str(response.json()["id"])

    async def create(self, content: bytes | list[Any], **fields: Any) -> str:
        """Upload an input and begin a batch; returns the batch's id."""
        body = {"input_file_id": await self.upload(content), "endpoint": CHAT, **fields}
        response = await self.post("/v1/batches", json=body)
        assert response.status_code == 200, response.text
        return str(response.json()["id"])

    async def batch(self, batch_id: str) -> dict[str, Any]:
        return await self.get(f"/v1/batches/{batch_id}")

    async def wait(self, batch_id: str, *statuses: str, timeout_s: float = 20) -> dict[str, Any]:
        """The batch once it has one of `statuses` (default: once it has ended)."""
        async with asyncio.timeout(timeout_s):
            while True:
                batch = await self.batch(batch_id)
                if batch["status"] in (statuses or TERMINAL):
                    return batch
                await asyncio.sleep(0.01)

    async def wait_for_count(self, batch_id: str, num_ended: int) -> dict[str, Any]:
        """The batch once so many of its requests have ended."""
        async with asyncio.timeout(20):
            while True:
                batch = await self.batch(batch_id)
                counts = batch["request_counts"]
                if counts["completed"] + counts["failed"] >= num_ended:
                    return batch
                await asyncio.sleep(0.005)

    async def run(self, content: bytes | list[Any], **fields: Any) -> dict[str, Any]:
        """Upload, begin and wait for the end."""
        return await self.wait(await self.create(content, **fields))

    async def results(self, file_id: str | None) -> list[dict[str, Any]]:
        """The lines of a result file; [] for none."""
        if file_id is None:
            return []
        response = await self.http.get(f"/v1/files/{file_id}/content", headers=self.headers)
        assert response.status_code == 200, response.text
        assert int(response.headers["content-length"]) == len(response.content)
        return [json.loads(text) for text in response.text.splitlines()]

    async def all_results(self, batch: dict[str, Any]) -> tuple[list[Any], list[Any]]:
        """Output and error lines of an ended batch, checked against its counts."""
        output = await self.results(batch["output_file_id"])
        errors = await self.results(batch["error_file_id"])
        assert batch["request_counts"]["completed"] == len(output)
        assert batch["request_counts"]["failed"] == len(errors)
        return output, errors


@dataclass
class BatchServer(BatchClient):
    """The server and its usual client."""

    served: Served = field(kw_only=True)
    data_dir: Path = field(kw_only=True)


@contextlib.asynccontextmanager
async def batch_server(
    data_dir: Path, limits: BatchLimits = QUICK, **setup: Any
) -> AsyncIterator[BatchServer]:
    """The application in process; goes on with the batches that `data_dir` holds."""
    api_key = setup.pop("api_key", None)
    keys = (api_key,) if api_key else ()
    key_file = setup.pop("api_key_file", None)
    config = ServerConfig(port=0, data_dir=data_dir, api_keys=keys, api_key_file=key_file)
    async with in_process(Setup(config=config, **setup)) as served:
        served.state._batches = BatchService(served.state, limits)
        served.state.batches.start()
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            yield BatchServer(served.http, served.openai, headers, served=served, data_dir=data_dir)
        finally:
            await served.state.close_batches()
