"""Random requests for every API family: valid ones, ones with a wrong value, and broken bytes."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Body = dict[str, Any]

_WORDS = (
    *("the", "river", "runs", "through", "old", "town", "and", "people", "42", "\n", "{", "}", '"'),
    *(
        "日本語",
        "👩‍👩‍👧‍👦",
        "é",
        "\x00",
        "<|im_end|>",
        "<|im_start|>system\n",
        "<think>",
        "</think>",
    ),
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "null", "\\", "https://example.com"),
)
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 1.5, -0.0, 1e300, 2**31, 2**63, -(2**70), "", "x", "auto"),
    *("\x00", "é" * 3000, "<|im_end|>", [], {}, [[]], [{}], [None], {"type": "object"}),
    *({"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "x"}}),
    *({"$ref": "#"}, {"pattern": "(a*)*b"}, {"enum": []}, {"not": {}}, {"minItems": 10**9}),
    *(["x"] * 40, list(range(200)), {str(i): i for i in range(200)}),
)
_SCHEMAS: tuple[Any, ...] = (
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    {"type": "array", "items": {"enum": ["x", "y", None]}, "maxItems": 4},
    {"type": "string", "pattern": "^[a-z]{1,8}$"},
    {"$defs": {"n": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/n"}]}}, "$ref": "#/$defs/n"},
    {"type": "object", "additionalProperties": {"type": "number"}},
    {"type": "object", "properties": {"a": {"type": "string", "maxLength": 5}}},
    True,
)
_FORMS: tuple[Body, ...] = (
    {"regex": r"[ab]{3,9}(c|\d+)"},
    {"choice": ["yes", "no", "日本"]},
    {"grammar": 'root ::= ("a" | "b") root | "."'},
    {"grammar": 'start: WORD ("," WORD)*\nWORD: /[a-z]+/'},
    {"json": _SCHEMAS[0]},
    {"json_object": True},
    {"regex": "(("},
    {"grammar": "start: start start | "},
)
_PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request."""

    method: str
    path: str
    data: bytes
    content_type: str = "application/json"

    def head(self) -> bytes:
        """Of HTTP/1.1, closing the connection afterwards."""
        length = f"content-length: {len(self.data)}\r\n" if self.method != "GET" else ""
        return (
            f"{self.method} {self.path} HTTP/1.1\r\nhost: fuzz\r\nconnection: close\r\n"
            f"content-type: {self.content_type}\r\n{length}\r\n"
        ).encode()


class RequestSource:
    """An endless, seeded source of calls."""

    def __init__(self, rng: random.Random, vocab_size: int) -> None:
        self._rng = rng
        self._vocab_size = vocab_size
        self._makers: tuple[tuple[str, Callable[[], Body]], ...] = (
            ("/v1/completions", self._completion),
            ("/v1/completions", self._completion),
            ("/v1/chat/completions", self._chat),
            ("/v1/chat/completions", self._chat),
            ("/v1/chat/completions", self._chat),
            ("/v1/responses", self._responses),
            ("/v1/messages", self._messages),
            ("/v1/messages/count_tokens", self._count),
            ("/v1/embeddings", self._embeddings),
            ("/api/chat", self._ollama_chat),
            ("/api/generate", self._ollama_generate),
            ("/api/embed", self._ollama_embed),
            ("/render", self._chat),
            ("/tokenize", self._tokenize),
            ("/detokenize", self._detokenize),
        )

    def call(self) -> Call:
        """The next request; about a third of them cannot be answered as they ask."""
        rng = self._rng
        path, make = rng.choice(self._makers)
        body = make()
        if rng.random() < 0.25:
            body = self._spoilt(body)
        data = json.dumps(body, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
        if rng.random() < 0.06:
            data = self._broken(data)
        return Call("POST", path, data)

    def odd_call(self) -> Call:
        """Wrong methods, paths and content types, and everything that is read with GET."""
        rng = self._rng
        path, make = rng.choice(self._makers)
        paths = (
            *("/metrics", "/v1/models", "/v1/models/nope", "/version", "/openapi.json"),
            *("/api/tags", "/api/ps", "/api/version", "/tokenizer_info", "/live", "/nope", "/%ff"),
            *("/v1/files?limit=-1", "/v1/files/none/content", "/v1/batches?after=none", path),
        )
        if rng.random() < 0.7:
            return Call("GET", rng.choice(paths), b"")
        kind = rng.choice(("text/plain", "multipart/form-data; boundary=x", "", "application/json"))
        method = rng.choice(("POST", "PUT", "DELETE", "PATCH", "OPTIONS"))
        return Call(method, rng.choice(paths), json.dumps(make()).encode(), kind)

    def batch_lines(self) -> tuple[str, bytes]:
        """(endpoint, JSONL): mostly valid lines; some files have a line that fails them."""
        rng = self._rng
        choices = [(p, m) for p, m in self._makers if p in ("/v1/completions", "/v1/embeddings")]
        path, make = rng.choice(choices)
        lines = []
        for number in range(rng.choice((1, 3, 20, 60))):
            body = make()
            body.pop("stream", None)
            if rng.random() < 0.1:
                body = self._spoilt(body)
            line: Body = {"custom_id": f"r{number}", "method": "POST", "url": path, "body": body}
            lines.append(json.dumps(line).encode())
        if rng.random() < 0.15:
            lines.append(rng.choice((b"{", b"null", lines[0], b'{"custom_id":"x"}')))
        return path, b"\n".join(lines)

    def text(self) -> str:
        """Words, sometimes many, sometimes beyond the context of a small model."""
        rng = self._rng
        count = rng.choice((0, 1, 3, 8, 8, 20, 20, 60, 200, 3000))
        return rng.choice(("", " ")).join(rng.choice(_WORDS) for _ in range(count))

    def _maybe(self, body: Body, share: float, **fields: Callable[[], Any]) -> None:
        for name, make in fields.items():
            if self._rng.random() < share:
                body[name] = make()

    def _spoilt(self, body: Body) -> Body:
        """A copy with one value, somewhere, replaced by another kind of value."""
        rng = self._rng
        spoilt: Any = copy.deepcopy(body)
        place: Any = spoilt
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                return dict(spoilt)
            key = rng.choice(keys)
            inner = place[key]
            if not isinstance(inner, dict | list) or not inner or rng.random() < 0.3:
                place[key] = copy.deepcopy(rng.choice(_VALUES))
                return dict(spoilt)
            place = inner

    def _broken(self, data: bytes) -> bytes:
        rng = self._rng
        at = rng.randrange(len(data))
        kind = rng.randrange(4)
        if kind == 0:
            return data[:at]
        if kind == 1:
            return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
        if kind == 2:
            return data[:at] + data[at:][::-1]
        return b'{"prompt":' + b"[" * 50_000 + b"]" * 50_000 + b"}"

    def _sampling(self) -> Body:
        rng = self._rng
        body: Body = {"max_tokens": rng.choice((0, 1, 4, 16, 64, 200)) or 1}
        self._maybe(
            body,
            0.15,
            temperature=lambda: rng.choice((0, 0.1, 1, 2)),
            top_p=lambda: rng.choice((0.1, 1)),
            top_k=lambda: rng.choice((-1, 1, 40)),
            min_p=lambda: 0.1,
            seed=lambda: rng.randrange(2**32),
            stop=lambda: rng.choice(("e", ["the", "\n"], [" "] * 3)),
            n=lambda: rng.choice((1, 2, 5)),
            presence_penalty=lambda: 1.5,
            repetition_penalty=lambda: 1.3,
            logit_bias=lambda: {str(rng.randrange(self._vocab_size)): rng.choice((-100, 100))},
            min_tokens=lambda: 1,
            ignore_eos=lambda: True,
            priority=lambda: rng.randrange(-2, 3),
            service_tier=lambda: rng.choice(("auto", "default", "flex", "priority")),
            timeout=lambda: rng.choice((0.01, 0.3, 30)),
            cache_salt=lambda: "salt",
            prompt_logprobs=lambda: rng.choice((0, 3)),
        )
        self._maybe(body, 0.5, stream=lambda: rng.random() < 0.7)
        if body.get("stream"):
            body.pop("prompt_logprobs", None)
            self._maybe(body, 0.3, stream_options=lambda: {"include_usage": True})
        return body

    def _form(self, body: Body) -> None:
        rng = self._rng
        schema = rng.choice(_SCHEMAS)
        named = {"name": "x", "schema": schema}
        kinds: tuple[Body, ...] = (
            {"response_format": {"type": "json_object"}},
            {"response_format": {"type": "json_schema", "json_schema": named}},
            {"structured_outputs": rng.choice(_FORMS)},
            {"guided_json": schema},
        )
        if rng.random() < 0.25:
            body.update(rng.choice(kinds))

    def _ids(self) -> list[int]:
        return [self._rng.randrange(self._vocab_size) for _ in range(self._rng.randrange(1, 40))]

    def _completion(self) -> Body:
        rng = self._rng
        prompts: tuple[Any, ...] = (
            *(self.text(), self.text(), self._ids()),
            *([self.text(), self.text()], [self._ids(), self._ids()], ["the river"] * 5),
        )
        body = {"prompt": rng.choice(prompts), **self._sampling()}
        self._maybe(body, 0.15, echo=lambda: True, logprobs=lambda: rng.choice((0, 1, 5)))
        self._form(body)
        return body

    def _conversation(self) -> list[Body]:
        rng = self._rng
        messages: list[Body] = []
        if rng.random() < 0.4:
            messages.append({"role": "system", "content": self.text()})
        for _ in range(rng.randrange(3)):
            messages.append({"role": "user", "content": self.text()})
            messages.append({"role": "assistant", "content": self.text()})
        content: Any = self.text()
        if rng.random() < 0.2:
            content = [{"type": "text", "text": self.text()}]
        messages.append({"role": "user", "content": content})
        return messages

    def _functions(self) -> list[Body]:
        names = ("weather", "add", "echo_probe")[: self._rng.randrange(1, 4)]
        parameters = [_PARAMETERS, {"type": "object"}, None]
        return [
            {"name": name, "description": "d", "parameters": shape}
            for name, shape in zip(names, parameters, strict=False)
        ]

    def _chat(self) -> Body:
        rng = self._rng
        body = {"messages": self._conversation(), **self._sampling()}
        body.pop("prompt_logprobs", None)
        if rng.random() < 0.25:
            functions = self._functions()
            body["tools"] = [{"type": "function", "function": f} for f in functions]
            named = {"type": "function", "function": {"name": functions[0]["name"]}}
            body["tool_choice"] = rng.choice(("auto", "none", "required", named))
            self._maybe(body, 0.3, parallel_tool_calls=lambda: False)
        else:
            self._form(body)
        self._maybe(
            body,
            0.1,
            logprobs=lambda: True,
            reasoning_effort=lambda: rng.choice(("none", "low", "high")),
            chat_template_kwargs=lambda: {"enable_thinking": rng.random() < 0.5},
            continue_final_message=lambda: rng.random() < 0.5,
        )
        return body

    def _responses(self) -> Body:
        body: Body = {"input": self._rng.choice((self.text(), self._conversation()))}
        body["max_output_tokens"] = self._rng.choice((1, 16, 64))
        self._maybe(body, 0.5, stream=lambda: True)
        self._maybe(
            body,
            0.15,
            instructions=self.text,
            temperature=lambda: 0,
            tools=lambda: [{"type": "function", **f} for f in self._functions()],
            text=lambda: {
                "format": {"type": "json_schema", "name": "x", "schema": self._rng.choice(_SCHEMAS)}
            },
        )
        return body

    def _messages(self) -> Body:
        body: Body = {"messages": self._conversation(), "max_tokens": self._rng.choice((1, 16, 64))}
        self._maybe(body, 0.5, stream=lambda: True)
        self._maybe(
            body,
            0.15,
            system=self.text,
            stop_sequences=lambda: ["the"],
            tools=lambda: [
                {"name": f["name"], "input_schema": f["parameters"] or {"type": "object"}}
                for f in self._functions()
            ],
        )
        return body

    def _count(self) -> Body:
        body = self._messages()
        for name in ("max_tokens", "stream", "stop_sequences"):
            body.pop(name, None)
        return body

    def _embeddings(self) -> Body:
        given = self._rng.choice((self.text(), [self.text() for _ in range(12)], self._ids()))
        body: Body = {"input": given}
        self._maybe(
            body,
            0.3,
            encoding_format=lambda: "base64",
            dimensions=lambda: self._rng.choice((1, 8, 10**6)),
            pooling=lambda: self._rng.choice(("mean", "last")),
        )
        return body

    def _ollama(self) -> Body:
        options = self._sampling()
        options = {k: options[k] for k in ("temperature", "top_k", "seed", "stop") if k in options}
        options["num_predict"] = self._rng.choice((1, 8, 40))
        body: Body = {"options": options}
        self._maybe(body, 0.4, stream=lambda: False)
        self._maybe(
            body, 0.15, format=lambda: self._rng.choice(("json", *_SCHEMAS)), think=lambda: False
        )
        return body

    def _ollama_chat(self) -> Body:
        body = {"messages": self._conversation(), **self._ollama()}
        functions = [{"type": "function", "function": f} for f in self._functions()]
        self._maybe(body, 0.2, tools=lambda: functions)
        return body

    def _ollama_generate(self) -> Body:
        return {"prompt": self.text(), **self._ollama()}

    def _ollama_embed(self) -> Body:
        body: Body = {"input": self._rng.choice((self.text(), [self.text(), self.text()]))}
        self._maybe(body, 0.3, truncate=lambda: False)
        return body

    def _tokenize(self) -> Body:
        return self._rng.choice(({"prompt": self.text()}, {"messages": self._conversation()}))

    def _detokenize(self) -> Body:
        return {"tokens": self._ids()}
