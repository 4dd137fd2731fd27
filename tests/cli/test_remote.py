"""The chat client against a small server that behaves well, badly, or not at all."""

from __future__ import annotations

import json
from typing import Any

import pytest

from caudal.cli.conversation import Reply, Sampling
from caudal.cli.remote import RemoteModel
from caudal.errors import CaudalError, ConfigError
from tests.cli.small_server import SmallHandler, SmallServer, running


class FakeServer(SmallServer):
    def __init__(self, status: int = 200, events: tuple[object, ...] = ()) -> None:
        super().__init__(Handler)
        self.status, self.events = status, events
        self.requests: list[tuple[str, str | None, dict[str, Any]]] = []


class Handler(SmallHandler):
    server: FakeServer

    def do_GET(self) -> None:
        self.answer(200, json.dumps({"data": [{"id": "first"}, {"id": "second"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, self.headers["Authorization"], body))
        if self.server.status != 200:
            error = {"error": {"message": "the queue is full"}}
            self.answer(self.server.status, json.dumps(error).encode())
            return
        events = [e if isinstance(e, str) else json.dumps(e) for e in self.server.events]
        self.answer(200, "".join(f"data: {event}\n\n" for event in events).encode())


def delta(text: str | None = None, finish: str | None = None) -> dict[str, Any]:
    content = {} if text is None else {"content": text}
    return {"choices": [{"index": 0, "delta": content, "finish_reason": finish}]}


USER = [{"role": "user", "content": "hi"}]


def test_pieces_count_and_reason_come_from_the_stream() -> None:
    events = (delta("He"), delta("llo"), delta(finish="stop"))
    usage = {"choices": [], "usage": {"completion_tokens": 5}}
    with running(FakeServer(events=(*events, usage, "[DONE]"))) as server:
        model, reply = RemoteModel(server.url, None, "key"), Reply()
        assert list(model.stream(USER, Sampling(temperature=0.0), reply)) == ["He", "llo"]
    assert (reply.num_tokens, reply.finish_reason) == (5, "stop")
    path, authorization, body = server.requests[0]
    assert (path, authorization) == ("/v1/chat/completions", "Bearer key")
    assert (body["model"], body["temperature"], body["stream"]) == ("first", 0.0, True)
    assert "max_tokens" not in body


def test_named_model_and_a_url_with_v1_are_taken_as_given() -> None:
    with running(FakeServer(events=("[DONE]",))) as server:
        model = RemoteModel(server.url + "/v1/", "mine", None)
        assert list(model.stream(USER, Sampling(), Reply())) == []
    path, authorization, body = server.requests[0]
    assert (path, authorization, body["model"]) == ("/v1/chat/completions", None, "mine")


def test_refusal_carries_the_servers_message() -> None:
    with running(FakeServer(status=429)) as server:
        model = RemoteModel(server.url, "m", None)
        with pytest.raises(CaudalError, match="the queue is full"):
            list(model.stream(USER, Sampling(), Reply()))


def test_error_inside_the_stream_is_raised_after_the_text_before_it() -> None:
    error = {"error": {"message": "the engine died"}}
    with running(FakeServer(events=(delta("par"), error))) as server:
        stream = RemoteModel(server.url, "m", None).stream(USER, Sampling(), Reply())
        assert next(stream) == "par"
        with pytest.raises(CaudalError, match="the engine died"):
            next(stream)


def test_stream_without_its_end_is_not_taken_for_a_whole_answer() -> None:
    with running(FakeServer(events=(delta("par"),))) as server:
        stream = RemoteModel(server.url, "m", None).stream(USER, Sampling(), Reply())
        assert next(stream) == "par"
        with pytest.raises(CaudalError, match="ended the answer early"):
            next(stream)


def test_unreachable_server_is_named() -> None:
    with running(FakeServer()) as server:
        url = server.url
    with pytest.raises(CaudalError, match=f"cannot reach {url}"):
        RemoteModel(url, None, None)


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:notaport", "http://x:99999"])
def test_malformed_url_is_a_configuration_error(url: str) -> None:
    with pytest.raises(ConfigError, match="--url: must look like"):
        RemoteModel(url, "m", None)
