"""The items of a response, and the events that tell of them as they grow."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from caudal.server.parsers.parts import CallArguments, CallStart, Content, Part, Reasoning
from caudal.server.protocol.chat import ChatTokenLogprob
from caudal.server.protocol.responses import (
    OutputFunctionCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningText,
)

_encode = msgspec.json.encode
_DELTA = "response.output_text.delta"


class ResponseItems:
    """Reasoning, messages and calls of one response; at most one is open."""

    def __init__(
        self, number: str, event: Callable[..., bytes], next_number: Callable[[], int]
    ) -> None:
        """`event` writes one event, `next_number` counts those that are written here."""
        self._number = number
        self._event = event
        self._next_number = next_number
        self._open: type[Part] | None = None
        self._item_id = ""
        self._call = CallStart(0, "", "")
        self._texts: list[str] = []
        self._logprobs: list[ChatTokenLogprob] = []
        self._delta_head = b""
        self.items: list[OutputItem] = []
        """Those that are finished."""

    def write(self, part: Part, logprobs: list[ChatTokenLogprob] | None = None) -> bytes:
        """The events of one part; `logprobs` belong to content only."""
        if isinstance(part, CallStart):
            return self.close() + self._open_call(part)
        events = b""
        if type(part) is not self._open:
            events = self.close()
            events += self._open_reasoning() if isinstance(part, Reasoning) else self.open_message()
        self._texts.append(part.text)
        if isinstance(part, Content):
            self._logprobs += logprobs or []
            middle = _encode(part.text) + b',"logprobs":' + _encode(logprobs or [])
            tail = b',"sequence_number":%d}\n\n' % self._next_number()
            return events + self._delta_head + middle + tail
        if isinstance(part, Reasoning):
            kind, where = "response.reasoning_text.delta", {**self._where(), "content_index": 0}
        else:
            kind, where = "response.function_call_arguments.delta", self._where()
        return events + self._event(kind, **where, delta=part.text)

    def open_message(self) -> bytes:
        """A message without text."""
        self._begin(Content, "msg")
        head = {"type": _DELTA, **self._where(), "content_index": 0}
        self._delta_head = f"event: {_DELTA}\ndata: ".encode() + _encode(head)[:-1] + b',"delta":'
        item = OutputMessage(self._item_id, "in_progress", "assistant", [])
        part = OutputText("output_text", "", [], [])
        return self._added(item) + self._event(
            "response.content_part.added", **self._where(), content_index=0, part=part
        )

    def _open_reasoning(self) -> bytes:
        self._begin(Reasoning, "rs")
        part = ReasoningText("reasoning_text", "")
        return self._added(OutputReasoning(self._item_id, "in_progress", [], [])) + self._event(
            "response.content_part.added", **self._where(), content_index=0, part=part
        )

    def _open_call(self, call: CallStart) -> bytes:
        self._begin(CallArguments, "fc")
        self._call = call
        item = OutputFunctionCall(self._item_id, "in_progress", call.call_id, call.name, "")
        return self._added(item)

    def _begin(self, kind: type[Part], prefix: str) -> None:
        self._open = kind
        index = len(self.items)
        self._item_id = f"{prefix}_{self._number}" + (f"_{index}" if index else "")
        self._texts = []

    def close(self, status: str = "completed") -> bytes:
        """The events that end the open item, if there is one."""
        kind, self._open = self._open, None
        if kind is None:
            return b""
        text = "".join(self._texts)
        item, events = self._finished(kind, text, status)
        events += self._event("response.output_item.done", output_index=len(self.items), item=item)
        self.items.append(item)
        return events

    def _finished(self, kind: type[Part], text: str, status: str) -> tuple[OutputItem, bytes]:
        where = self._where()
        if kind is CallArguments:
            call = self._call
            item = OutputFunctionCall(self._item_id, status, call.call_id, call.name, text)
            done = self._event(
                "response.function_call_arguments.done", **where, name=call.name, arguments=text
            )
            return item, done
        where["content_index"] = 0
        if kind is Reasoning:
            thought = ReasoningText("reasoning_text", text)
            return OutputReasoning(self._item_id, status, [], [thought]), self._event(
                "response.reasoning_text.done", **where, text=text
            ) + self._event("response.content_part.done", **where, part=thought)
        part = OutputText("output_text", text, [], self._logprobs)
        self._logprobs = []
        return OutputMessage(self._item_id, status, "assistant", [part]), self._event(
            "response.output_text.done", **where, text=text, logprobs=part.logprobs
        ) + self._event("response.content_part.done", **where, part=part)

    def _added(self, item: OutputItem) -> bytes:
        return self._event("response.output_item.added", output_index=len(self.items), item=item)

    def _where(self) -> dict[str, str | int]:
        return {"item_id": self._item_id, "output_index": len(self.items)}
