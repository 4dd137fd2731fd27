"""The input and tools of `/v1/responses` as those of a chat."""

from __future__ import annotations

from collections.abc import Sequence

from caudal.errors import InvalidRequestError
from caudal.server.protocol.chat import ROLES, ChatMessage, ContentPart
from caudal.server.protocol.responses import (
    ITEM_TYPES,
    TEXT_PARTS,
    InputItem,
    InputPart,
    ResponsesRequest,
    ResponsesTool,
    ResponsesToolChoice,
)
from caudal.server.protocol.tools import (
    AllowedTools,
    CalledFunction,
    FunctionRef,
    FunctionSpec,
    ToolCallParam,
    ToolChoice,
    ToolChoiceObject,
    ToolRef,
    ToolSpec,
)


def chat_messages(body: ResponsesRequest) -> list[ChatMessage]:
    """The conversation. Raises InvalidRequestError naming the item that has no place in it."""
    messages: list[ChatMessage] = []
    if body.instructions:
        messages.append(ChatMessage(role="system", content=body.instructions))
    if isinstance(body.input, str):
        messages.append(ChatMessage(role="user", content=body.input))
        return messages
    for index, item in enumerate(body.input):
        _add(messages, item, f"input[{index}]")
    if not messages:
        raise _invalid("input", "a message is required")
    return messages


def _add(messages: list[ChatMessage], item: InputItem, where: str) -> None:
    """Reasoning, calls and text of one turn of the assistant become one message."""
    if item.type not in ITEM_TYPES:
        problem = f"items of type {item.type[:64]!r} are not supported"
        raise _unsupported(where, f"{problem}; known: {', '.join(ITEM_TYPES)}")
    if item.type == "function_call":
        turn = _turn(messages)
        if turn.tool_calls is None:
            turn.tool_calls = []
        turn.tool_calls.append(_call(item, where))
    elif item.type == "function_call_output":
        messages.append(_result(item, where))
    elif item.type == "reasoning":
        texts = [part.text for part in item.summary or ()]
        if isinstance(item.content, list):
            texts = [part.text or "" for part in item.content] or texts
        if any(texts):
            turn = _turn(messages, is_new=True)
            turn.reasoning_content = "\n".join(texts)
    else:
        _add_message(messages, item, where)


def _turn(messages: list[ChatMessage], *, is_new: bool = False) -> ChatMessage:
    """The assistant's message that goes on, or a new one."""
    if is_new or not messages or messages[-1].role != "assistant":
        messages.append(ChatMessage(role="assistant"))
    return messages[-1]


def _add_message(messages: list[ChatMessage], item: InputItem, where: str) -> None:
    if item.role not in ROLES:
        raise _invalid(f"{where}.role", f"must be one of {', '.join(ROLES)}")
    content: str | list[ContentPart]
    if isinstance(item.content, str):
        content = item.content
    elif item.content:
        content = _parts(item.content, f"{where}.content")
    else:
        raise _invalid(f"{where}.content", "a text or a list of text parts is required")
    last = messages[-1] if messages else None
    is_same_turn = last is not None and last.content is None and not last.tool_calls
    if item.role == "assistant" and last is not None and last.role == "assistant" and is_same_turn:
        last.content = content
        return
    messages.append(ChatMessage(role=item.role, content=content))


def _call(item: InputItem, where: str) -> ToolCallParam:
    if not item.name or not item.call_id:
        missing = "name" if not item.name else "call_id"
        raise _invalid(f"{where}.{missing}", "required in a function_call")
    return ToolCallParam(CalledFunction(item.name, item.arguments), item.call_id)


def _result(item: InputItem, where: str) -> ChatMessage:
    if not item.call_id:
        raise _invalid(f"{where}.call_id", "required in a function_call_output")
    output = item.output
    if output is None:
        raise _invalid(f"{where}.output", "a text or a list of text parts is required")
    content = output if isinstance(output, str) else _parts(output, f"{where}.output") or ""
    return ChatMessage(role="tool", tool_call_id=item.call_id, content=content)


def _parts(parts: Sequence[InputPart], where: str) -> list[ContentPart]:
    return [_part(part, f"{where}[{index}]") for index, part in enumerate(parts)]


def _part(part: InputPart, where: str) -> ContentPart:
    if part.type not in TEXT_PARTS:
        problem = f"parts of type {part.type[:64]!r} are not supported; this model takes text"
        raise _unsupported(where, problem)
    name = "refusal" if part.type == "refusal" else "text"
    text: str | None = getattr(part, name)
    if text is None:
        raise _invalid(where, f"a part of type {part.type} needs the field {name}")
    return ContentPart("text", text)


def chat_tools(tools: Sequence[ResponsesTool] | None) -> list[ToolSpec] | None:
    """The tools; their types and names are checked where those of chats are."""
    if tools is None:
        return None
    return [
        ToolSpec(
            tool.type,
            FunctionSpec(tool.name or "", tool.description, tool.parameters, tool.strict),
        )
        for tool in tools
    ]


def chat_tool_choice(choice: str | ResponsesToolChoice | None) -> ToolChoice | None:
    """The choice of tools."""
    if not isinstance(choice, ResponsesToolChoice):
        return choice
    if choice.type == "function":
        return ToolChoiceObject("function", _ref(choice.name))
    if choice.type == "allowed_tools" and choice.tools:
        refs = [ToolRef(ref.type, _ref(ref.name)) for ref in choice.tools]
        allowed = AllowedTools(choice.mode or "auto", refs)
        return ToolChoiceObject("allowed_tools", allowed_tools=allowed)
    return ToolChoiceObject(choice.type)


def _ref(name: str | None) -> FunctionRef | None:
    return None if name is None else FunctionRef(name)


def _invalid(param: str, problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param}: {problem}.", param=param, code="invalid_value")


def _unsupported(param: str, problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param}: {problem}.", param=param, code="unsupported")
