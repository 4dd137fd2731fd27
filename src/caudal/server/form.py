"""What form an answer must have, from whichever field says it; checked before anything runs."""

from __future__ import annotations

import json
import sys
from typing import Any

from msgspec.structs import replace

from caudal.errors import InvalidRequestError
from caudal.sampling_params import StructuredOutputsParams
from caudal.server.parsers.output_parser import OutputRules
from caudal.server.parsers.reasoning import ReasoningState
from caudal.server.prompts import run_prompt_work
from caudal.server.protocol.structured import (
    FORMAT_TYPES,
    FormFields,
    ResponseFormat,
    StructuredOutputs,
)
from caudal.server.state import AppState

Form = tuple[str, StructuredOutputsParams]
"""The field that asks for it, and what it asks for."""


async def required_form(state: AppState, body: FormFields) -> StructuredOutputsParams | None:
    """The form that `body` asks for; None if its answer is free.

    Raises InvalidRequestError naming the field, for a schema also the JSON pointer and keyword.
    """
    forms = _forms(body)
    if not forms:
        return None
    if len(forms) > 1:
        names = " and ".join(name for name, _ in forms[:2])
        raise _error(forms[1][0], f"{names} cannot be combined")
    field, params = forms[0]
    await check_form(state, params, field)
    return params


async def check_form(state: AppState, params: StructuredOutputsParams, field: str) -> None:
    """Raise InvalidRequestError naming `field` if the form cannot be enforced."""
    from caudal.structured_output.grammar import check_grammar

    # The first use imports the compiler, which takes as long as a long schema.
    num_chars = len(repr(params)) if "llguidance" in sys.modules else sys.maxsize
    try:
        await run_prompt_work(state, num_chars, lambda: check_grammar(params, field))
    except InvalidRequestError as error:
        error.param = field
        raise


def form_of_chat(
    form: StructuredOutputsParams, output: OutputRules | None
) -> tuple[StructuredOutputsParams, OutputRules | None]:
    """The form of a chat's answer, and what its parser still looks for.

    Reasoning that the prompt has begun comes first. Calls cannot come any more, so text that only
    looks like one is none.
    """
    reasoning = None if output is None else output.reasoning
    if reasoning is None:
        return form, None
    if reasoning.state is ReasoningState.REASONING:
        form = replace(form, after=reasoning.format.end)
    return form, OutputRules(reasoning)


def _forms(body: FormFields) -> list[Form]:
    forms: list[Form] = []
    if body.response_format is not None:
        params = _of_response_format(body.response_format)
        if params is not None:
            forms.append(("response_format", params))
    if body.structured_outputs is not None:
        forms += _of_structured_outputs(body.structured_outputs, "structured_outputs.")
    former = StructuredOutputs(
        json=body.guided_json,
        regex=body.guided_regex,
        choice=body.guided_choice,
        grammar=body.guided_grammar,
    )
    return forms + _of_structured_outputs(former, "guided_")


def _of_response_format(value: ResponseFormat) -> StructuredOutputsParams | None:
    if value.type not in FORMAT_TYPES:
        raise _error(
            "response_format.type",
            f"must be one of {', '.join(FORMAT_TYPES)}, got {value.type[:64]!r}",
        )
    if value.type == "text":
        return None
    if value.type == "json_object":
        return StructuredOutputsParams(json_object=True)
    if value.json_schema is None or value.json_schema.schema is None:
        raise _error("response_format.json_schema.schema", "this field is required")
    return StructuredOutputsParams(json=_json_text(value.json_schema.schema, "response_format"))


def _of_structured_outputs(value: StructuredOutputs, prefix: str) -> list[Form]:
    forms: list[Form] = []
    if value.json is not None:
        text = _json_text(value.json, f"{prefix}json")
        forms.append((f"{prefix}json", StructuredOutputsParams(json=text)))
    if value.json_object:
        forms.append((f"{prefix}json_object", StructuredOutputsParams(json_object=True)))
    if value.regex is not None:
        forms.append((f"{prefix}regex", StructuredOutputsParams(regex=value.regex)))
    if value.choice:
        params = StructuredOutputsParams(choice=tuple(value.choice))
        forms.append((f"{prefix}choice", params))
    if value.grammar is not None:
        forms.append((f"{prefix}grammar", StructuredOutputsParams(grammar=value.grammar)))
    return forms


def _json_text(value: Any, field: str) -> str:
    """Schemas travel as text: the engine keeps the order of keys, and numbers of any size."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value)
    except (ValueError, RecursionError):
        raise _error(field, "nested too deeply") from None


def _error(field: str, problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field}: {problem}.", param=field, code="invalid_value")
