"""How models write tool calls, and how a chat template tells which way is theirs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A way to write calls: an opener, one or more JSON objects, perhaps a closer."""

    name: str
    openers: tuple[str, ...] = ()
    """Any of these begins calls, anywhere in the answer."""
    closer: str = ""
    is_bare: bool = False
    """An answer that begins with `{` or `[` may be calls without an opener."""
    has_name_before: bool = False
    """After an opener the name may stand before the braces of the arguments."""
    arguments_key: str = "arguments"
    separator: str = "\n"
    """Between calls."""
    id_length: int | None = None
    """Ids are so many letters and digits, because the template insists on it."""


HERMES = ToolFormat("hermes", ("<tool_call>",), "</tool_call>")
LLAMA3_JSON = ToolFormat(
    "llama3_json",
    ("<|python_tag|>",),
    is_bare=True,
    arguments_key="parameters",
    separator="; ",
)
MISTRAL = ToolFormat("mistral", ("[TOOL_CALLS]",), has_name_before=True, separator="", id_length=9)
JSON = ToolFormat("json", is_bare=True)

TOOL_FORMATS: Mapping[str, ToolFormat] = MappingProxyType(
    {
        "hermes": HERMES,
        "llama3_json": LLAMA3_JSON,
        "llama4_json": LLAMA3_JSON,
        "mistral": MISTRAL,
        "json": JSON,
    }
)
"""By the names of the command line."""


def detect_tool_format(template: str | None) -> ToolFormat:
    """The format that a chat template's source asks the model for; JSON if it asks for none."""
    source = template or ""
    if "[TOOL_CALLS]" in source:
        return MISTRAL
    if "<tool_call>" in source:
        return HERMES
    if "<|python_tag|>" in source or ('"parameters":' in source and "<|eot_id|>" in source):
        return LLAMA3_JSON
    return JSON
