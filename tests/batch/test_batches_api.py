"""`/v1/batches` over a scripted engine: every status, every way to end, every count."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from caudal.errors import EngineDeadError
from caudal.server.batch import results
from caudal.server.batch.limits import BatchLimits
from tests.batch.harness import (
    CHAT,
    COMPLETIONS,
    QUICK,
    BatchServer,
    batch_server,
    completion,
    line,
)


def ids(lines: list[dict[str, Any]]) -> list[str]:
    return sorted(item["custom_id"] for item in lines)


async def test_whole_flow_through_the_official_client(server: BatchServer) -> None:
    client = server.openai
    content = b"\n".join(json.dumps(line(f"r{i}")).encode() for i in range(5))
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    created = await client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        metadata={"job": "nightly"},
    )
    assert (created.object, created.status) == ("batch", "validating")
    assert created.expires_at == created.created_at + 24 * 3600
    await server.wait(created.id)
    batch = await client.batches.retrieve(created.id)
    assert batch.status == "completed"
    assert batch.metadata == {"job": "nightly"}
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": 5, "completed": 5, "failed": 0}
    assert batch.error_file_id is None
    assert batch.errors is None
    times = [batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at]
    assert times == sorted(time for time in times if time is not None)
    assert batch.output_file_id is not None
    output = (await client.files.content(batch.output_file_id)).text
    assert (await client.files.retrieve(batch.output_file_id)).purpose == "batch_output"
    answers = [json.loads(text) for text in output.splitlines()]
    assert ids(answers) == [f"r{i}" for i in range(5)]
    assert len({answer["id"] for answer in answers}) == 5
    for answer in answers:
        assert answer["error"] is None
        assert answer["response"]["status_code"] == 200
        assert answer["response"]["body"]["object"] == "chat.completion"
        assert answer["response"]["request_id"] == answer["response"]["body"]["id"]
    assert batch.usage is not None
    assert batch.usage.output_tokens == 5 * 4
    assert batch.usage.total_tokens == batch.usage.input_tokens + 20


async def test_answers_are_those_of_the_endpoint_itself(server: BatchServer) -> None:
    body = {"prompt": "the river", "max_tokens": 6, "n": 2, "logprobs": 2, "echo": True}
    batch = await server.run([line("a", url=COMPLETIONS, body=body)], endpoint=COMPLETIONS)
    (result,), _ = await server.all_results(batch)
    direct = (await server.post(COMPLETIONS, json=body)).json()
    answer = result["response"]["body"]
    for name in ("id", "created"):
        del answer[name], direct[name]
    assert answer == direct


async def test_all_invalid_bodies_complete_with_errors_only(server: BatchServer) -> None:
    """B129."""
    bad: list[dict[str, Any]] = [
        {},
        {"messages": []},
        {"messages": "hi"},
        {"messages": [{"role": "user", "content": "hi"}], "temperature": 9},
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": -1},
        {"messages": [{"role": "user", "content": "hi " * 5000}]},
        {"messages": [{"role": "robot", "content": "hi"}]},
        {"messages": [{"role": "user", "content": "hi"}], "logit_bias": {"x": 1}},
        {"messages": [{"role": "user", "content": "hi"}], "stream_options": {}},
    ]
    batch = await server.run([line(f"r{i}", body=body) for i, body in enumerate(bad)])
    assert batch["status"] == "completed"
    assert batch["output_file_id"] is None
    assert batch["request_counts"] == {"total": 9, "completed": 0, "failed": 9}
    _, errors = await server.all_results(batch)
    assert ids(errors) == [f"r{i}" for i in range(9)]
    for error in errors:
        assert error["error"] is None
        assert error["response"]["status_code"] == 400
        assert error["response"]["body"]["error"]["type"] == "invalid_request_error"


async def test_good_and_bad_requests_end_in_their_own_files(server: BatchServer) -> None:
    lines = [line(f"good{i}") for i in range(4)] + [line("bad", body={"messages": []})]
    batch = await server.run(lines)
    output, errors = await server.all_results(batch)
    assert ids(output) == [f"good{i}" for i in range(4)]
    assert ids(errors) == ["bad"]
    assert batch["request_counts"] == {"total": 5, "completed": 4, "failed": 1}


async def test_invalid_file_fails_the_batch_with_line_numbers(server: BatchServer) -> None:
    """B131."""
    streaming = line("c", body={"messages": [], "stream": True})
    batch = await server.run([line("a"), b"{", line("a"), streaming, completion("d")])
    assert batch["status"] == "failed"
    assert batch["failed_at"] >= batch["created_at"]
    assert batch["in_progress_at"] is None
    assert batch["errors"]["object"] == "list"
    found = [(error["line"], error["code"]) for error in batch["errors"]["data"]]
    assert found == [
        (2, "invalid_json_line"),
        (3, "duplicate_custom_id"),
        (4, "invalid_value"),
        (5, "invalid_url"),
    ]
    assert batch["request_counts"] == {"total": 5, "completed": 0, "failed": 0}
    assert (batch["output_file_id"], batch["error_file_id"]) == (None, None)


async def test_empty_file_fails_the_batch(server: BatchServer) -> None:
    batch = await server.run(b"")
    assert batch["status"] == "failed"
    assert batch["errors"]["data"][0]["code"] == "empty_file"


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"input_file_id": "file-unknown"}, 404, "file_id"),
        ({"input_file_id": "../../etc/passwd"}, 404, "file_id"),
        ({"input_file_id": 7}, 400, "input_file_id"),
        ({"input_file_id": None}, 400, "input_file_id"),
        ({"endpoint": "/v1/models"}, 400, "endpoint"),
        ({"endpoint": "http://evil/"}, 400, "endpoint"),
        ({"completion_window": "0s"}, 400, "completion_window"),
        ({"completion_window": "soon"}, 400, "completion_window"),
        ({"completion_window": "31d"}, 400, "completion_window"),
        ({"completion_window": "9999999d"}, 400, "completion_window"),
        ({"metadata": {"k" * 65: "v"}}, 400, "metadata"),
        ({"metadata": {"k": "v" * 513}}, 400, "metadata"),
        ({"metadata": {f"k{i}": "v" for i in range(17)}}, 400, "metadata"),
        ({"metadata": {"k": 1}}, 400, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, 400, None),
    ],
)
async def test_bad_batch_is_refused_by_field(
    server: BatchServer, change: dict[str, Any], status: int, param: str | None
) -> None:
    body = {"input_file_id": await server.upload([line()]), "endpoint": CHAT}
    response = await server.post("/v1/batches", json=body | change)
    assert response.status_code == status, response.text
    if param is not None:
        assert response.json()["error"]["param"].startswith(param)
    assert (await server.get("/v1/batches"))["data"] == []


async def test_result_file_is_no_input(server: BatchServer) -> None:
    batch = await server.run([line()])
    body = {"input_file_id": batch["output_file_id"], "endpoint": CHAT}
    response = await server.post("/v1/batches", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "input_file_id"


async def test_unknown_batch_is_a_404(server: BatchServer) -> None:
    for path in ("/v1/batches/batch_x", "/v1/batches/batch_x/cancel"):
        method = "POST" if path.endswith("cancel") else "GET"
        response = await server.http.request(method, path)
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "batch_not_found"


async def test_pages_of_batches_are_complete(server: BatchServer) -> None:
    """B133."""
    created = [await server.create([line()]) for _ in range(5)]
    for batch_id in created:
        await server.wait(batch_id)
    listed = [batch.id async for batch in server.openai.batches.list(limit=2)]
    assert listed == created[::-1]
    page = await server.get(f"/v1/batches?limit=2&after={created[2]}")
    assert [batch["id"] for batch in page["data"]] == [created[1], created[0]]
    assert page["has_more"] is False
    for query in ("limit=0", "limit=101", "after=batch_x"):
        assert (await server.http.get(f"/v1/batches?{query}")).status_code == 400


async def test_cancelling_half_way_keeps_what_is_done(tmp_path: Path) -> None:
    """B133."""
    async with batch_server(tmp_path, step_s=0.005) as server:
        batch_id = await server.create([line(f"r{i}") for i in range(60)])
        await server.wait_for_count(batch_id, 30)
        response = await server.post(f"/v1/batches/{batch_id}/cancel")
        assert response.status_code == 200
        assert response.json()["status"] in ("cancelling", "cancelled")
        batch = await server.wait(batch_id)
        assert batch["status"] == "cancelled"
        assert batch["cancelling_at"] <= batch["cancelled_at"]
        counts = batch["request_counts"]
        assert (counts["total"], counts["failed"]) == (60, 0)
        assert 30 <= counts["completed"] < 60
        output, errors = await server.all_results(batch)
        assert len({item["custom_id"] for item in output}) == counts["completed"]
        assert errors == []
        assert server.served.engine.stats.num_running == 0
        again = await server.post(f"/v1/batches/{batch_id}/cancel")
        assert again.status_code == 409
        assert (await server.batch(batch_id)) == batch


async def test_batch_is_cancelled_while_it_is_checked(tmp_path: Path) -> None:
    async with batch_server(tmp_path) as server:
        batch_id = await server.create([line(f"r{i}") for i in range(20_000)])
        assert (await server.batch(batch_id))["status"] == "validating"
        response = await server.post(f"/v1/batches/{batch_id}/cancel")
        assert response.json()["status"] in ("cancelling", "cancelled")
        twice = await server.post(f"/v1/batches/{batch_id}/cancel")
        assert twice.status_code in (200, 409)
        started = time.monotonic()
        batch = await server.wait(batch_id)
        assert batch["status"] == "cancelled"
        assert batch["output_file_id"] is None
        assert time.monotonic() - started < 1


async def test_expired_batch_keeps_finished_lines_and_names_the_others(tmp_path: Path) -> None:
    """B133: a window of one second."""
    async with batch_server(tmp_path, step_s=0.02) as server:
        lines = [line(f"r{i}") for i in range(300)]
        started = time.time()
        batch_id = await server.create(lines, completion_window="1s")
        batch = await server.wait(batch_id)
        assert batch["status"] == "expired"
        assert time.time() - started < 3
        assert batch["expired_at"] >= batch["expires_at"]
        assert batch["cancelled_at"] is None
        output, errors = await server.all_results(batch)
        assert 0 < len(output) < 300
        assert ids(output + errors) == ids(lines)
        assert {error["error"]["code"] for error in errors} == {"batch_expired"}
        assert all(error["response"] is None for error in errors)
        assert batch["request_counts"]["total"] == 300
        assert server.served.engine.stats.num_running == 0


async def test_input_deleted_while_the_batch_runs_does_not_stop_it(tmp_path: Path) -> None:
    """B133: the file is gone for its owner at once, from the disk when the batch has ended."""
    async with batch_server(tmp_path, step_s=0.005) as server:
        batch_id = await server.create([line(f"r{i}") for i in range(80)])
        await server.wait_for_count(batch_id, 5)
        file_id = (await server.batch(batch_id))["input_file_id"]
        assert (await server.http.delete(f"/v1/files/{file_id}")).status_code == 200
        assert (await server.http.get(f"/v1/files/{file_id}")).status_code == 404
        assert (await server.http.get(f"/v1/files/{file_id}/content")).status_code == 404
        assert (tmp_path / "files" / file_id).exists()
        batch = await server.wait(batch_id)
        assert batch["status"] == "completed"
        assert batch["request_counts"]["completed"] == 80
        async with asyncio.timeout(2):
            while (tmp_path / "files" / file_id).exists():
                await asyncio.sleep(0.01)
        assert (await server.http.delete(f"/v1/files/{batch['output_file_id']}")).is_success


async def test_input_lost_from_the_disk_fails_the_batch(server: BatchServer) -> None:
    file_id = await server.upload([line()])
    (server.data_dir / "files" / file_id).unlink()
    response = await server.post("/v1/batches", json={"input_file_id": file_id, "endpoint": CHAT})
    batch = await server.wait(response.json()["id"])
    assert batch["status"] == "failed"
    assert batch["errors"]["data"][0]["code"] == "file_not_found"


async def test_busy_server_delays_requests_but_fails_none(server: BatchServer) -> None:
    engine = server.served.engine
    engine.max_running, engine.max_waiting = 1, 1
    batch = await server.run([line(f"r{i}") for i in range(3)])
    assert batch["request_counts"] == {"total": 3, "completed": 3, "failed": 0}


async def test_request_that_kills_engines_fails_after_a_few(tmp_path: Path) -> None:
    async with batch_server(tmp_path, BatchLimits(commit_interval_s=0.01)) as server:

        async def die(_request: Any) -> Any:
            raise EngineDeadError("gone")

        server.served.engine.submit = die  # type: ignore[method-assign, assignment]
        batch = await server.run([line("poison")])
        _, (error,) = await server.all_results(batch)
        assert error["response"]["status_code"] == 503
        assert error["response"]["body"]["error"]["code"] == "engine_dead"


async def test_request_that_fails_in_the_engine_fails_alone(server: BatchServer) -> None:
    server.served.engine.fail_after = 2
    lines = [
        line("long"),
        line("short", body={"messages": line()["body"]["messages"], "max_tokens": 2}),
    ]
    batch = await server.run(lines)
    output, errors = await server.all_results(batch)
    assert (ids(output), ids(errors)) == (["short"], ["long"])
    assert errors[0]["response"]["status_code"] == 500


async def test_batches_of_two_owners_take_turns(tmp_path: Path) -> None:
    async with batch_server(tmp_path, step_s=0.005) as server:
        first = await server.create([line(f"r{i}") for i in range(200)])
        await server.wait_for_count(first, 8)
        second = await server.create([line(f"r{i}") for i in range(20)])
        await server.wait(second)
        counts = (await server.batch(first))["request_counts"]
        assert counts["completed"] < 120
        await server.post(f"/v1/batches/{first}/cancel")
        await server.wait(first)


async def test_number_of_unfinished_batches_is_bounded(tmp_path: Path) -> None:
    limits = BatchLimits(max_active=2)
    async with batch_server(tmp_path, limits, step_s=0.05) as server:
        for _ in range(2):
            await server.create([line(f"r{i}") for i in range(100)])
        body = {"input_file_id": await server.upload([line()]), "endpoint": CHAT}
        response = await server.post("/v1/batches", json=body)
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1


async def test_full_disk_delays_a_batch_but_loses_and_repeats_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_all, num_writes = results._write_all, 0

    def fail_sometimes(descriptor: int, data: bytes) -> None:
        nonlocal num_writes
        num_writes += 1
        if num_writes in (2, 3, 6):
            write_all(descriptor, data[: len(data) // 2])
            raise OSError(28, "No space left on device")
        write_all(descriptor, data)

    monkeypatch.setattr(results, "_write_all", fail_sometimes)
    async with batch_server(tmp_path, QUICK, step_s=0.005) as server:
        lines = [line(f"r{i}") for i in range(80)]
        batch = await server.run(lines)
        output, _ = await server.all_results(batch)
        assert batch["status"] == "completed"
        assert ids(output) == ids(lines)
        assert num_writes > 6


async def test_stopped_server_goes_on_where_it_was(tmp_path: Path) -> None:
    lines = [line(f"r{i}") for i in range(100)]
    async with batch_server(tmp_path, step_s=0.005) as server:
        batch_id = await server.create(lines)
        await server.wait_for_count(batch_id, 40)
    async with batch_server(tmp_path, step_s=0.0) as server:
        batch = await server.wait(batch_id)
        output, errors = await server.all_results(batch)
        assert (ids(output), errors) == (ids(lines), [])
        assert batch["usage"]["output_tokens"] == 400
        assert len(server.served.engine.accepted) < 65


async def test_stop_of_the_server_survives_in_every_status(tmp_path: Path) -> None:
    """Stopped again and again, at whatever moment; the batch still ends once."""
    lines = [line(f"r{i}") for i in range(60)]
    async with batch_server(tmp_path) as server:
        server.served.engine.step_gate.clear()
        batch_id = await server.create(lines)
    for delay_s in (0.0, 0.001, 0.003, 0.01, 0.02, 0.03, 0.05):
        async with batch_server(tmp_path, step_s=0.003) as server:
            await asyncio.sleep(delay_s)
    async with batch_server(tmp_path) as server:
        batch = await server.wait(batch_id)
        output, _ = await server.all_results(batch)
        assert ids(output) == ids(lines)


async def test_server_stops_at_once_though_a_long_file_is_checked(tmp_path: Path) -> None:
    lines = [line(f"r{i}") for i in range(20_000)]
    async with batch_server(tmp_path) as server:
        batch_id = await server.create(lines)
        await asyncio.sleep(0.05)
        started = time.monotonic()
    assert time.monotonic() - started < 0.5
    async with batch_server(tmp_path) as server:
        assert (await server.batch(batch_id))["status"] == "validating"
        await server.post(f"/v1/batches/{batch_id}/cancel")
        await server.wait(batch_id)


async def test_batch_waits_for_its_own_model(tmp_path: Path) -> None:
    lines = [line(f"r{i}") for i in range(30)]
    async with batch_server(tmp_path, step_s=0.02) as server:
        batch_id = await server.create(lines)
        await server.wait(batch_id, "in_progress")
    async with batch_server(tmp_path) as server:
        assert server.served.state.model is not None
        server.served.state.model.name = "other"
        await asyncio.sleep(0.2)
        batch = await server.batch(batch_id)
        assert (batch["status"], batch["request_counts"]["failed"]) == ("in_progress", 0)
    async with batch_server(tmp_path) as server:
        batch = await server.wait(batch_id)
        assert batch["request_counts"] == {"total": 30, "completed": 30, "failed": 0}


async def test_batch_does_not_count_in_the_latencies_of_people(server: BatchServer) -> None:
    await server.run([line(f"r{i}") for i in range(3)])
    state = server.served.state
    assert state.metrics.time_to_first_token.count == 0
    assert sum(state.metrics.requests_finished.values.values()) == 0
    assert state.batch_metrics.requests_finished.values["length"] == 3
    page = (await server.http.get("/metrics")).text
    assert "caudal_batch_generation_tokens_total 12.0" in page
    assert 'caudal_batch_requests_finished_total{reason="length"} 3.0' in page
    assert "caudal_num_background_running 0.0" in page


@pytest.mark.parametrize(
    ("endpoint", "body", "kind"),
    [
        (COMPLETIONS, {"prompt": "the river", "max_tokens": 3}, "text_completion"),
        ("/v1/embeddings", {"input": ["the river", "the town"]}, "list"),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 3}, "response"),
    ],
)
async def test_every_endpoint_answers_in_a_batch(
    server: BatchServer, endpoint: str, body: dict[str, Any], kind: str
) -> None:
    batch = await server.run([line("a", url=endpoint, body=body)], endpoint=endpoint)
    (result,), _ = await server.all_results(batch)
    assert result["response"]["body"]["object"] == kind
    assert batch["usage"]["input_tokens"] > 0
    assert batch["usage"]["output_tokens"] == (0 if kind == "list" else 3)
