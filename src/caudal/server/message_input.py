"""The turns and tools of `/v1/messages` as those of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from caudal.errors import InvalidRequestError
from caudal.server.protocol.chat import ChatCompletionRequest, ChatMessage, ContentPart
from caudal.server.protocol.messages import (
    THINKING_TYPES,
    TOOL_CHOICES,
    TURN_ROLES,
    BlockParam,
    CountTokensRequest,
    MessageParam,
    MessageTool,
    MessageToolChoice,
    TextBlockParam,
)
from caudal.server.protocol.tools import (
    CalledFunction,
    FunctionRef,
    FunctionSpec,
    ToolCallParam,
    ToolChoice,
    ToolChoiceObject,
    ToolSpec,
)

FIELDS = (
    (r"(tools\[\d+\])\.function\.parameters", r"\1.input_schema"),
    (r"(tools\[\d+\])\.function", r"\1"),
    (r"tool_choice\.function", "tool_choice"),
)
"""Fields of chats and what they are called here."""


@dataclass(slots=True)
class _Turn:
    """A message while its blocks are collected."""

    role: str
    parts: list[ContentPart] = field(default_factory=list)
    calls: list[ToolCallParam] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    result: ChatMessage | None = None
    """The whole message, where it is a tool's."""

    def message(self) -> ChatMessage:
        return self.result or ChatMessage(
            role=self.role,
            content=self.parts or None,
            tool_calls=self.calls or None,
            reasoning_content="\n".join(self.thoughts) or None,
        )


def chat_request(body: CountTokensRequest) -> ChatCompletionRequest:
    """The conversation and its tools. Raises InvalidRequestError naming what has no place in it."""
    messages: list[ChatMessage] = []
    system = _texts(body.system or [], "system")
    if system:
        messages.append(ChatMessage(role="system", content=system))
    messages += _turns(body.messages)
    is_continued = messages[-1].role == "assistant"
    if is_continued:
        _check_continued(messages[-1], f"messages[{len(body.messages) - 1}].content")
    choice = body.tool_choice
    is_single = choice is not None and choice.disable_parallel_tool_use
    return ChatCompletionRequest(
        messages=messages,
        continue_final_message=is_continued,
        tools=_tools(body.tools),
        tool_choice=_tool_choice(choice),
        parallel_tool_calls=False if is_single else None,
        chat_template_kwargs=_thinking(body),
    )


def _thinking(body: CountTokensRequest) -> dict[str, bool] | None:
    """What templates that can switch reasoning look for; their default if nothing is said."""
    kind = "adaptive" if body.thinking is None else body.thinking.type
    if kind not in THINKING_TYPES:
        raise _error("thinking.type", f"must be one of {', '.join(THINKING_TYPES)}")
    return None if kind == "adaptive" else {"enable_thinking": kind == "enabled"}


def _tools(tools: Sequence[MessageTool] | None) -> list[ToolSpec] | None:
    if tools is None:
        return None
    return [
        ToolSpec(
            "function" if tool.type in (None, "custom") else tool.type or "",
            FunctionSpec(tool.name or "", tool.description, tool.input_schema, tool.strict),
        )
        for tool in tools
    ]


def _tool_choice(choice: MessageToolChoice | None) -> ToolChoice | None:
    if choice is None:
        return None
    if choice.type not in TOOL_CHOICES:
        raise _error("tool_choice.type", f"must be one of {', '.join(TOOL_CHOICES)}")
    if choice.type == "tool":
        if not choice.name:
            raise _error("tool_choice.name", "required with the type tool")
        return ToolChoiceObject("function", FunctionRef(choice.name))
    return "required" if choice.type == "any" else choice.type


def _turns(params: Sequence[MessageParam]) -> list[ChatMessage]:
    """Neighbours of one role joined; an empty last turn of the assistant begins nothing."""
    turns: list[_Turn] = []
    for index, param in enumerate(params):
        where = f"messages[{index}]"
        if param.role not in TURN_ROLES:
            raise _error(
                f"{where}.role", f"must be one of {', '.join(TURN_ROLES)}, got {param.role[:64]!r}"
            )
        blocks: Sequence[BlockParam] = (
            [BlockParam("text", param.content)] if isinstance(param.content, str) else param.content
        )
        num_before = len(turns)
        is_empty = True
        for number, block in enumerate(blocks):
            is_empty &= not _add_block(turns, param.role, block, f"{where}.content[{number}]")
        is_last = index == len(params) - 1
        if is_empty and not (is_last and num_before and param.role == "assistant"):
            raise _error(f"{where}.content", "must not be empty")
    return [turn.message() for turn in turns]


def _add_block(turns: list[_Turn], role: str, block: BlockParam, where: str) -> bool:
    """Add a block to the last turn or a new one; tells whether there was anything in it."""
    if block.type == "text":
        if block.text is None:
            raise _error(where, "a text block needs the field text")
        if block.text:
            _turn(turns, role).parts.append(ContentPart("text", block.text))
        return bool(block.text)
    if block.type == "tool_result" and role == "user":
        turns.append(_Turn("tool", result=_result(block, where)))
        return True
    if role != "assistant" or block.type not in ("tool_use", "thinking", "redacted_thinking"):
        problem = f"blocks of type {block.type[:64]!r} are not supported"
        raise _error(where, f"{problem} in turns of the {role}", code="unsupported")
    turn = _turn(turns, role)
    if block.type == "tool_use":
        turn.calls.append(_call(block, where))
    elif block.thinking:
        turn.thoughts.append(block.thinking)
    return True


def _turn(turns: list[_Turn], role: str) -> _Turn:
    if not turns or turns[-1].role != role:
        turns.append(_Turn(role))
    return turns[-1]


def _call(block: BlockParam, where: str) -> ToolCallParam:
    for name in ("id", "name"):
        if not getattr(block, name):
            raise _error(f"{where}.{name}", "required in a tool_use block")
    return ToolCallParam(CalledFunction(block.name or "", block.input or {}), block.id)


def _result(block: BlockParam, where: str) -> ChatMessage:
    if not block.tool_use_id:
        raise _error(f"{where}.tool_use_id", "required in a tool_result block")
    parts = _texts(block.content or [], f"{where}.content")
    return ChatMessage(role="tool", tool_call_id=block.tool_use_id, content=parts or "")


def _texts(content: str | Sequence[TextBlockParam], where: str) -> list[ContentPart]:
    """The texts that are not empty."""
    if isinstance(content, str):
        return [ContentPart("text", content)] if content else []
    parts = []
    for index, block in enumerate(content):
        place = f"{where}[{index}]"
        if block.type != "text":
            problem = f"blocks of type {block.type[:64]!r} are not supported; this model takes text"
            raise _error(place, problem, code="unsupported")
        if block.text is None:
            raise _error(place, "a text block needs the field text")
        if block.text:
            parts.append(ContentPart("text", block.text))
    return parts


def _check_continued(message: ChatMessage, where: str) -> None:
    if message.tool_calls:
        raise _error(where, "the last tool_use block needs a tool_result in the next turn")
    if not isinstance(message.content, list):
        raise _error(where, "the assistant's last turn must have text")
    text = message.content[-1].text or ""
    if text != text.rstrip():
        raise _error(where, "the assistant's last turn must not end in white space")


def _error(param: str, problem: str, *, code: str = "invalid_value") -> InvalidRequestError:
    return InvalidRequestError(f"{param}: {problem}.", param=param, code=code)
