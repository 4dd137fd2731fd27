"""Tools in requests and calls in messages, as chat completions write them."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from caudal.server.protocol.common import JsonObject

MAX_TOOLS = 128
MAX_CALLS_IN_MESSAGE = 256
MAX_NAME_LENGTH = 128
NAME_PATTERN = "^[A-Za-z0-9_.-]{1,128}$"

_TYPE_SCHEMA = {"enum": ["function"]}
_CHOICE_SCHEMA: dict[str, Any] = {"examples": ["none", "auto", "required"]}

ToolType = Annotated[str, Meta(extra_json_schema=_TYPE_SCHEMA)]
FunctionName = Annotated[str, Meta(extra_json_schema={"pattern": NAME_PATTERN})]


class FunctionSpec(msgspec.Struct, frozen=True):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: JsonObject | None = None
    """JSON schema of an object; unset: the function takes nothing."""
    strict: bool | None = None
    """Calls are held to the schema, also those that the model makes of its own accord."""


class ToolSpec(msgspec.Struct, frozen=True):
    """A tool; only functions are offered."""

    type: ToolType
    function: FunctionSpec | None = None


class FunctionRef(msgspec.Struct, frozen=True):
    """A function by name."""

    name: str


class ToolRef(msgspec.Struct, frozen=True):
    """A tool by name."""

    type: ToolType = "function"
    function: FunctionRef | None = None


class AllowedTools(msgspec.Struct, frozen=True):
    """Which of the tools may be called, without changing the prompt."""

    mode: Annotated[str, Meta(extra_json_schema={"enum": ["auto", "required"]})]
    tools: Annotated[list[ToolRef], Meta(min_length=1, max_length=MAX_TOOLS)]


class ToolChoiceObject(msgspec.Struct, frozen=True):
    """A function that must be called, or the tools that may be."""

    type: Annotated[str, Meta(extra_json_schema={"enum": ["function", "allowed_tools"]})]
    function: FunctionRef | None = None
    allowed_tools: AllowedTools | None = None


ToolChoice = Annotated[str, Meta(extra_json_schema=_CHOICE_SCHEMA)] | ToolChoiceObject
Tools = Annotated[list[ToolSpec], Meta(max_length=MAX_TOOLS)]


class CalledFunction(msgspec.Struct, frozen=True):
    """Function and arguments of a call in an earlier message."""

    name: str
    arguments: str | JsonObject | None = None
    """JSON of an object; a text that is none is shown to the model as it is."""


class ToolCallParam(msgspec.Struct, frozen=True):
    """A call in an earlier message of the assistant."""

    function: CalledFunction
    id: Annotated[str, Meta(max_length=256)] | None = None
    type: ToolType = "function"


class FunctionCall(msgspec.Struct, frozen=True):
    """Function and arguments of a call; `arguments` is JSON text."""

    name: str
    arguments: str


class AnswerToolCall(msgspec.Struct, frozen=True):
    """A call in an answer."""

    id: str
    function: FunctionCall
    type: str = "function"
