"""`/v1/files`: uploads of every kind, paging, deletion, and who may see what."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import httpx
import pytest

from caudal.errors import NotFoundError
from caudal.server.batch.limits import BatchLimits
from caudal.server.batch.records import Page
from tests.batch.harness import BatchServer, batch_server, jsonl, line
from tests.server.harness import Setup, on_loopback, open_raw

BOUNDARY = b"limit"


def part(name: str, value: bytes, *, filename: str | None = None) -> bytes:
    extra = f'; filename="{filename}"' if filename is not None else ""
    head = f'--limit\r\nContent-Disposition: form-data; name="{name}"{extra}\r\n\r\n'
    return head.encode() + value + b"\r\n"


END = b"--limit--\r\n"
PURPOSE = part("purpose", b"batch")
FILE = part("file", b"{}\n", filename="in.jsonl")


async def send(server: BatchServer, body: bytes, kind: str = "") -> httpx.Response:
    content_type = kind or "multipart/form-data; boundary=limit"
    return await server.post("/v1/files", content=body, headers={"content-type": content_type})


async def test_upload_comes_back_byte_for_byte_through_the_official_client(
    server: BatchServer,
) -> None:
    content = bytes(range(256)) * 40_000 + b"--limit\r\n--"
    created = await server.openai.files.create(file=("in.jsonl", content), purpose="batch")
    assert (created.object, created.bytes, created.purpose) == ("file", len(content), "batch")
    assert created.filename == "in.jsonl"
    assert created.status == "processed"
    assert (await server.openai.files.retrieve(created.id)) == created
    assert (await server.openai.files.content(created.id)).content == content
    deleted = await server.openai.files.delete(created.id)
    assert (deleted.id, deleted.deleted) == (created.id, True)
    for path in (f"/v1/files/{created.id}", f"/v1/files/{created.id}/content"):
        assert (await server.http.get(path)).status_code == 404
    assert not list((server.data_dir / "files").iterdir())


async def test_pages_are_complete_in_both_orders_while_files_are_deleted(
    server: BatchServer,
) -> None:
    ids = [await server.upload([line(str(i))]) for i in range(7)]
    listed = [file.id async for file in server.openai.files.list(limit=3)]
    assert listed == ids[::-1]
    ascending = [file.id async for file in server.openai.files.list(limit=2, order="asc")]
    assert ascending == ids
    page = await server.get("/v1/files?limit=2")
    assert (page["first_id"], page["last_id"], page["has_more"]) == (ids[6], ids[5], True)
    assert (await server.get("/v1/files?purpose=batch_output"))["data"] == []
    async for file in server.openai.files.list(limit=2):
        await server.openai.files.delete(file.id)
    empty = await server.get("/v1/files")
    assert (empty["data"], empty["has_more"], empty["last_id"]) == ([], False, None)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=10001", "limit"),
        ("limit=x", "limit"),
        ("order=up", "order"),
        ("after=file-unknown", "after"),
        ("after=", "after"),
        ("after=%27%3B%20DROP%20TABLE%20files%3B--", "after"),
    ],
)
async def test_bad_page_is_named(server: BatchServer, query: str, param: str) -> None:
    response = await server.http.get(f"/v1/files?{query}")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


MALFORMED: list[tuple[str, bytes, str | None]] = [
    ("empty", b"", None),
    ("not a form", b'{"purpose": "batch"}', None),
    ("no last boundary", PURPOSE + FILE, None),
    ("cut in the file", (PURPOSE + FILE)[:-10], None),
    ("cut in a header", PURPOSE[:30], None),
    ("no purpose", FILE + END, "purpose"),
    ("other purpose", part("purpose", b"fine-tune") + FILE + END, "purpose"),
    ("no file", PURPOSE + END, "file"),
    ("two files", PURPOSE + FILE + FILE + END, "file"),
    ("part without name", b"--limit\r\nX: y\r\n\r\nvalue\r\n" + END, None),
    ("part without headers", b"--limit\r\n\r\nvalue\r\n" + END, None),
    ("long value", part("purpose", b"x" * 5000) + FILE + END, "purpose"),
    ("many parts", PURPOSE + part("x", b"1") * 40 + FILE + END, None),
    ("long header", b"--limit\r\nX: " + b"y" * 100_000 + b"\r\n\r\n\r\n" + END, None),
    ("many headers", b"--limit\r\n" + b"X: y\r\n" * 500 + b"\r\n\r\n" + END, None),
    (
        "bad lifetime",
        PURPOSE + part("expires_after[seconds]", b"5") + FILE + END,
        "expires_after",
    ),
    ("zero bytes", b"\0" * 1000, None),
]


@pytest.mark.parametrize(
    ("body", "param"), [case[1:] for case in MALFORMED], ids=[case[0] for case in MALFORMED]
)
async def test_malformed_form_is_a_400_and_leaves_nothing(
    server: BatchServer, body: bytes, param: str | None
) -> None:
    response = await send(server, body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    for folder in ("files", "uploads"):
        assert not list((server.data_dir / folder).iterdir())


@pytest.mark.parametrize(
    "kind",
    [
        "application/json",
        "multipart/form-data",
        "multipart/form-data; boundary=",
        f"multipart/form-data; boundary={'x' * 100}",
        "multipart/mixed; boundary=limit",
        "text/plain",
    ],
)
async def test_other_content_types_are_a_415(server: BatchServer, kind: str) -> None:
    response = await send(server, PURPOSE + FILE + END, kind)
    assert response.status_code == 415
    assert response.json()["error"]["code"] == "unsupported_media_type"


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("../../etc/passwd", "passwd"),
        ("C:\\\\data\\\\in.jsonl", "in.jsonl"),
        ("", "upload.jsonl"),
        ("a\tb", "ab"),
        ("x" * 400, "x" * 255),
        ("ünïcode.jsonl", "ünïcode.jsonl"),
    ],
)
async def test_filename_is_only_a_label(server: BatchServer, given: str, shown: str) -> None:
    response = await send(server, PURPOSE + part("file", b"{}", filename=given) + END)
    assert response.status_code == 200, response.text
    assert response.json()["filename"] == shown
    assert [path.name for path in (server.data_dir / "files").iterdir()] == [response.json()["id"]]


async def test_fields_may_follow_the_file_and_strangers_are_ignored(server: BatchServer) -> None:
    body = FILE + part("unknown", b"x") + part("expires_after[anchor]", b"created_at")
    response = await send(server, body + part("expires_after[seconds]", b"3600") + PURPOSE + END)
    assert response.status_code == 200, response.text
    file = response.json()
    assert file["expires_at"] == file["created_at"] + 3600


async def test_file_above_the_limit_is_a_413_and_leaves_nothing(tmp_path: Path) -> None:
    limits = BatchLimits(max_file_bytes=3_000_000)
    async with batch_server(tmp_path, limits) as server:
        response = await server.post(
            "/v1/files", data={"purpose": "batch"}, files={"file": ("x", b"y" * 3_000_001)}
        )
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "file_too_large"
        assert not list((tmp_path / "uploads").iterdir())
        await server.upload(b"y" * 3_000_000)


async def test_one_owner_cannot_fill_the_disk_or_hold_all_uploads(tmp_path: Path) -> None:
    limits = BatchLimits(max_stored_bytes=1000, max_uploads=1)
    async with batch_server(tmp_path, limits) as server:
        service = server.served.state.batches
        file_id = await server.upload(b"x" * 1000)
        response = await send(server, PURPOSE + FILE + END)
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "storage_full"
        await server.http.delete(f"/v1/files/{file_id}")
        await server.upload(b"x")
        service._uploads[""] = 1
        response = await send(server, PURPOSE + FILE + END)
        assert response.status_code == 429
        assert response.headers["retry-after"] == "2"
        del service._uploads[""]
        await server.upload(b"x")


async def test_client_that_leaves_during_an_upload_leaves_nothing(tmp_path: Path) -> None:
    setup = Setup()
    setup.config = type(setup.config)(port=0, data_dir=tmp_path)
    async with on_loopback(setup) as served:
        head = (
            b"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-length: 100000000\r\n"
            b"content-type: multipart/form-data; boundary=limit\r\n\r\n"
        )
        connection = await open_raw(served.port, head + PURPOSE + FILE[:-2] + b"x" * 3_000_000)
        async with asyncio.timeout(5):
            while not list(tmp_path.glob("uploads/*")):
                await asyncio.sleep(0.01)
        await connection.close()
        async with asyncio.timeout(5):
            while list(tmp_path.glob("uploads/*")):
                await asyncio.sleep(0.01)
        assert (await served.http.get("/v1/files")).json()["data"] == []
        await served.state.close_batches()


async def test_full_disk_is_a_503_that_names_the_reason(
    server: BatchServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await server.upload(b"{}")

    def refuse(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        response = await send(server, PURPOSE + FILE + END)
    assert response.status_code == 503
    assert "No space left" in response.json()["error"]["message"]
    assert len((await server.get("/v1/files"))["data"]) == 1


async def test_expired_file_is_gone(server: BatchServer, monkeypatch: pytest.MonkeyPatch) -> None:
    body = PURPOSE + part("expires_after[seconds]", b"3600") + FILE + END
    file_id = (await send(server, body)).json()["id"]
    kept = await server.upload(b"{}")
    service = server.served.state.batches
    await service._delete_unused()
    assert (await server.get(f"/v1/files/{file_id}"))["id"] == file_id
    monkeypatch.setattr("caudal.server.batch.service.time.time", lambda: 2e10)
    assert (await server.http.get(f"/v1/files/{file_id}")).status_code == 404
    await service._delete_unused()
    assert [path.name for path in (server.data_dir / "files").iterdir()] == [kept]


async def test_other_keys_do_not_see_a_file(tmp_path: Path) -> None:
    async with batch_server(tmp_path, api_key="one") as server:
        file_id = await server.upload([line()])
        batch_id = (await server.run([line()]))["id"]
        service, page = server.served.state.batches, Page(limit=10)
        assert await service.list_files("other", page) == ([], False)
        assert await service.list_batches("other", page) == ([], False)
        for call in (
            service.get_file("other", file_id),
            service.open_content("other", file_id),
            service.delete_file("other", file_id),
            service.get_batch("other", batch_id),
            service.cancel_batch("other", batch_id),
        ):
            with pytest.raises(NotFoundError):
                await call
    async with batch_server(tmp_path, api_key="two") as server:
        assert (await server.get("/v1/files"))["data"] == []
        assert (await server.get("/v1/batches"))["data"] == []
        body = {"input_file_id": file_id, "endpoint": "/v1/chat/completions"}
        assert (await server.post("/v1/batches", json=body)).status_code == 404
    async with batch_server(tmp_path, api_key="one") as server:
        assert len((await server.get("/v1/files"))["data"]) == 3
        response = await server.http.get("/v1/files")
        assert response.status_code == 401


async def test_directory_in_use_turns_only_files_and_batches_off(
    server: BatchServer, tmp_path: Path
) -> None:
    await server.upload(b"{}")
    async with batch_server(server.data_dir) as second:
        response = await second.http.get("/v1/files")
        assert response.status_code == 503
        assert "in use or cannot be" in response.json()["error"]["message"]
        assert str(tmp_path) not in response.text
        assert (await second.served.complete(max_tokens=2))["usage"]["completion_tokens"] == 2
    assert len((await server.get("/v1/files"))["data"]) == 1


async def test_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    async with batch_server(tmp_path / "file" / "data") as server:
        response = await server.http.get("/v1/batches")
        assert response.status_code == 503
        assert "in use or cannot be" in response.json()["error"]["message"]
        assert str(tmp_path) not in response.text


async def test_prompts_on_the_disk_are_for_the_server_s_user_only(server: BatchServer) -> None:
    await server.upload([line()])
    for path in (server.data_dir, server.data_dir / "files", server.data_dir / "uploads"):
        assert path.stat().st_mode & 0o077 == 0


async def test_leftovers_of_a_crash_are_deleted_at_the_next_start(tmp_path: Path) -> None:
    async with batch_server(tmp_path) as server:
        kept = await server.upload([line()])
    (tmp_path / "files" / "file-unknown").write_bytes(jsonl([line()]))
    (tmp_path / "uploads" / "file-half").write_bytes(b"x")
    async with batch_server(tmp_path) as server:
        assert (await server.results(kept))[0]["custom_id"] == "a"
        assert [path.name for path in (tmp_path / "files").iterdir()] == [kept]
        assert not list((tmp_path / "uploads").iterdir())
