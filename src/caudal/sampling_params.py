"""How the tokens of one request are chosen and when the request ends."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

MAX_LOGPROBS = 20

Pooling = Literal["mean", "last"]
"""Over which tokens of a prompt the final hidden states are averaged: all, or only the last."""


CallSyntax = Literal["json", "xml", "python", "harmony"]
"""How models write the arguments of a call: as JSON, as `<parameter=…>` elements, as Python's
keyword arguments, or as JSON in a channel."""


class StructuralTag(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One form of constrained passage: `begin`, then JSON of `schema`, then `end`."""

    begin: str
    """Starts the passage, for example `<tool_call>{"name": "add", "arguments": `."""
    schema: dict[str, Any] | bool | str
    """JSON schema of what follows, as an object or as its JSON text."""
    end: str = ""
    """Must follow the JSON, for example `}</tool_call>`."""
    syntax: CallSyntax = "json"
    """How a value of `schema`, then an object, is written."""


class StructuralTags(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Free text with constrained passages (tool calls), each of one of several forms."""

    tags: tuple[StructuralTag, ...]
    trigger: str | None = None
    """Once the text contains this, one of `tags` is forced; each `begin` must start with it.
    None: there is no free text, only passages."""
    min_passages: int = 0
    """With 1 and no `trigger`: an enforced call."""
    max_passages: int | None = None
    """Nothing follows the last passage of so many; None: no limit."""
    separator: str = ""
    """Between passages that have no free text in between."""


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the output must look like: exactly one field but `after` is set."""

    json: dict[str, Any] | bool | str | None = None
    """A JSON schema, as an object or as its JSON text."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """The whole output matches it."""
    choice: tuple[str, ...] | None = None
    """The output is one of these texts."""
    grammar: str | None = None
    """A context-free grammar in Lark's notation, with a rule `start`."""
    structural_tags: StructuralTags | None = None
    """Free text in which marked passages are constrained."""
    after: str | None = None
    """With any of the above: free text (reasoning) comes first, up to and including this."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling and stopping rules of one request; validated by the server, trusted below it.

    Stop *strings* are not here: they are matched on text, above the engine.
    """

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0 or negative: no limit."""
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token generated so far."""
    frequency_penalty: float = 0.0
    """Subtracted per occurrence in the generated tokens."""
    repetition_penalty: float = 1.0
    """Divides (or multiplies, if negative) the logit of each token in prompt or output."""
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    """None: the engine draws one per request."""
    max_tokens: int = 16
    """Output tokens; already clamped to the context. 0 computes the prompt only."""
    min_tokens: int = 0
    """End-of-generation and stop ids are impossible before this many output tokens."""
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the request besides the model's end-of-generation ids."""
    num_logprobs: int | None = None
    """None: none. 0: only the sampled token's. k: also the k most likely (<= MAX_LOGPROBS)."""
    num_prompt_logprobs: int | None = None
    """As `num_logprobs`, for prompt tokens 1…"""
    pooling: Pooling | None = None
    """Give a hidden state of the prompt instead of tokens; needs max_tokens 0."""
    structured_outputs: StructuredOutputsParams | None = None
    """None: the output is free."""
