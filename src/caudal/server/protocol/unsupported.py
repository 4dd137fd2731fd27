"""Fields of other servers that Caudal knows but does not offer, with their neutral values.

A neutral value asks for nothing, so it is accepted; any other is refused by name. Fields that only
label a request, or could only make it faster, are accepted and have no effect. All other fields
are ignored and logged.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

Neutral = tuple[Any, ...]

_COMMON: dict[str, Neutral] = {
    "guided_decoding_backend": (None,),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1, 1.0),
    "early_stopping": (None, False),
    "allowed_token_ids": (None, []),
    "bad_words": (None, []),
    "logits_processors": (None, []),
    "truncate_prompt_tokens": (None,),
    "spaces_between_special_tokens": (None, True),
    "return_token_ids": (None, False),
    "return_tokens_as_token_ids": (None, False),
    "kv_transfer_params": (None, {}),
    "vllm_xargs": (None, {}),
    "logits_processor_args": (None, {}),
}

COMPLETION_UNSUPPORTED: Mapping[str, Neutral] = MappingProxyType(
    {**_COMMON, "suffix": (None, ""), "prompt_embeds": (None,)}
)

CHAT_UNSUPPORTED: Mapping[str, Neutral] = MappingProxyType(
    {
        **_COMMON,
        "functions": (None, []),
        "function_call": (None, "none", "auto"),
        "best_of": (None, 1),
        "echo": (None, False),
        "modalities": (None, ["text"]),
        "audio": (None,),
        "reasoning": (None,),
        "web_search_options": (None,),
        "verbosity": (None, "medium"),
        "chat_template": (None,),
        "documents": (None, []),
        "mm_processor_kwargs": (None, {}),
    }
)

WITHOUT_EFFECT = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "store",
    }
)


def is_neutral(value: Any, neutral: Neutral) -> bool:
    """Whether a decoded `value` asks for nothing; 1 and True, 0 and False are kept apart."""
    return any(type(value) is type(other) and value == other for other in neutral)
