"""How models write tool calls, and how a chat template tells which way is theirs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from caudal.sampling_params import CallSyntax
from caudal.server.parsers import harmony, python_calls


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A way to write calls: an opener, names and arguments, perhaps a closer."""

    name: str
    begin: str
    """How a call is written up to its arguments; NAME stands for the function."""
    end: str
    """How it goes on after its arguments."""
    openers: tuple[str, ...] = ()
    """Any of these begins calls, anywhere in the answer."""
    closer: str = ""
    separator: str = "\n"
    """Between calls."""
    is_bare: bool = False
    """An answer that begins with `{` or `[` may be calls without an opener."""
    has_name_before: bool = False
    """After an opener the name may stand before the braces of the arguments."""
    is_one_list: bool = False
    """Several calls share one opener and one list, so `begin` and `end` can write only one; or
    the answer ends after a call."""
    syntax: CallSyntax = "json"
    """How the arguments are written."""
    id_length: int | None = None
    """Ids are so many letters and digits, because the template insists on it."""

    @property
    def has_trigger(self) -> bool:
        """Whether `begin` has text before the name that can be nothing but a call."""
        return len(self.begin.partition("NAME")[0]) > 1


HERMES = ToolFormat(
    "hermes",
    '<tool_call>\n{"name": "NAME", "arguments": ',
    "}\n</tool_call>",
    openers=("<tool_call>",),
    closer="</tool_call>",
)
LLAMA3_JSON = ToolFormat(
    "llama3_json",
    '{"name": "NAME", "parameters": ',
    "}",
    openers=("<|python_tag|>",),
    separator="; ",
    is_bare=True,
)
MISTRAL = ToolFormat(
    "mistral",
    '[TOOL_CALLS][{"name": "NAME", "arguments": ',
    "}]",
    openers=("[TOOL_CALLS]",),
    has_name_before=True,
    is_one_list=True,
    id_length=9,
)
MISTRAL_NAMED = replace(MISTRAL, begin="[TOOL_CALLS]NAME", end="", separator="", is_one_list=False)
MISTRAL_ARGS = replace(MISTRAL_NAMED, begin="[TOOL_CALLS]NAME[ARGS]")
QWEN3_CODER = ToolFormat(
    "qwen3_coder",
    "<tool_call>\n<function=NAME>\n",
    "</function>\n</tool_call>",
    openers=("<tool_call>",),
    closer="</tool_call>",
    syntax="xml",
)
PYTHONIC = ToolFormat(
    "pythonic",
    "[NAME(",
    ")]",
    openers=(python_calls.OPENER,),
    closer=python_calls.CLOSER,
    is_one_list=True,
    syntax="python",
)
OPENAI = ToolFormat(
    "openai",
    "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>",
    "<|call|>",
    openers=harmony.MARKS,
    is_one_list=True,
    syntax="harmony",
)
JSON = ToolFormat("json", '{"name": "NAME", "arguments": ', "}", is_bare=True)

TOOL_FORMATS: Mapping[str, ToolFormat] = MappingProxyType(
    {
        "hermes": HERMES,
        "llama3_json": LLAMA3_JSON,
        "llama4_json": LLAMA3_JSON,
        "mistral": MISTRAL,
        "qwen3_coder": QWEN3_CODER,
        "qwen3_xml": QWEN3_CODER,
        "pythonic": PYTHONIC,
        "llama4_pythonic": PYTHONIC,
        "openai": OPENAI,
        "json": JSON,
    }
)
"""By the names of the command line."""


_PYTHON_EXAMPLE = re.compile(r"\[func(?:tion)?_?name\d?\(")
_MISTRAL_LIST = re.compile(r"\[TOOL_CALLS\]['\"]?\s*\+?\s*['\"]?\s*\[")


def detect_tool_format(template: str | None) -> ToolFormat:
    """The format that a chat template's source asks the model for; JSON if it asks for none."""
    source = template or ""
    if "[TOOL_CALLS]" in source:
        if _MISTRAL_LIST.search(source):
            return MISTRAL
        return MISTRAL_ARGS if "[ARGS]" in source else MISTRAL_NAMED
    if harmony.CHANNEL in source and harmony.MESSAGE in source:
        return OPENAI
    if "<function=" in source and "<parameter=" in source:
        return QWEN3_CODER
    if _PYTHON_EXAMPLE.search(source):
        return PYTHONIC
    if "<tool_call>" in source:
        return HERMES
    if "<|python_tag|>" in source or ('"parameters":' in source and "<|eot_id|>" in source):
        return LLAMA3_JSON
    return JSON
