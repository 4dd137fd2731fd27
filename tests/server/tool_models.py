"""Models for tests of tools and reasoning: templates of four families over the tiny vocabulary."""

from __future__ import annotations

from typing import Any

from tests.server.harness import Setup
from tests.tiny_vocabulary import CHATML_TEMPLATE, CONTROL, bpe_metadata

_HEAD = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}"
)
_TAIL = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

HERMES_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n<tools>{% for tool in tools %}{{ tool | tojson }}"
    "{% endfor %}</tools> call in <tool_call></tool_call><|im_end|>\n{% endif %}"
    + _HEAD
    + "{% for call in message.tool_calls %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}" + _TAIL
)
LLAMA_TEMPLATE = "{{ tools }} <|python_tag|> <|eot_id|>" + _HEAD + _TAIL
MISTRAL_TEMPLATE = (
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}" + _HEAD + "{% for call in "
    "message.tool_calls %}{% if call.id | length != 9 %}{{ raise_exception('9 letters') }}"
    "{% endif %}[TOOL_CALLS][{{ call.function | tojson }}]{% endfor %}" + _TAIL
)
THINKING_TEMPLATE = HERMES_TEMPLATE.replace(
    "<|im_start|>assistant\n{% endif %}",
    "<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}{{ reasoning_effort }}{% endif %}",
)
UNDECIDED_TEMPLATE = HERMES_TEMPLATE.replace("{% if tools %}", "{# <think> #}{% if tools %}", 1)

CODER_TEMPLATE = HERMES_TEMPLATE.replace(
    "<tool_call></tool_call>", "<tool_call><function=f><parameter=p></parameter></function>"
)
PYTHONIC_TEMPLATE = "{{ tools }} as [func_name1(params_name1=params_value1)]" + _HEAD + _TAIL
CHANNEL_TEMPLATE = (
    "{{ tools }}{% for message in messages %}<|start|>{{ message.role }}<|message|>"
    "{{ message.content }}<|end|>{% endfor %}<|start|>assistant{# <|channel|> #}"
)

TEMPLATES = {
    "qwen3_coder": CODER_TEMPLATE,
    "pythonic": PYTHONIC_TEMPLATE,
    "openai": CHANNEL_TEMPLATE,
    "hermes": HERMES_TEMPLATE,
    "llama3_json": LLAMA_TEMPLATE,
    "mistral": MISTRAL_TEMPLATE,
    "json": CHATML_TEMPLATE,
    "thinking": THINKING_TEMPLATE,
    "undecided": UNDECIDED_TEMPLATE,
}

_SPECIALS = ("[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "<|python_tag|>")


def tool_metadata(family: str) -> dict[str, Any]:
    """The tiny vocabulary with a template of that family and its marks as special tokens, which
    take the place of the last merges."""
    metadata = bpe_metadata("smollm", num_merges=100 - len(_SPECIALS))
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], *_SPECIALS]
    types = [*metadata["tokenizer.ggml.token_type"], *[CONTROL] * len(_SPECIALS)]
    metadata["tokenizer.ggml.token_type"] = types
    metadata["tokenizer.chat_template"] = TEMPLATES[family]
    return metadata


def tool_setup(family: str, answer: str, **fields: Any) -> Setup:
    """A server whose model of that family always says `answer`; marks in it are special tokens."""
    return Setup(
        answer=answer,
        metadata=tool_metadata(family),
        max_model_len=4096,
        has_special_answer=True,
        **fields,
    )


def function(name: str, **properties: str) -> dict[str, Any]:
    """A tool with properties of the given types, all required."""
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": f"does {name}",
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind} for key, kind in properties.items()},
                "required": list(properties),
            },
        },
    }


TOOLS = [function("add", a="integer", b="integer"), function("greet", who="string")]
ADD = '{"a": 1, "b": 2}'
GREET = '{"who": "Bob \\"}{\\n\\u00e9"}'


def written(family: str, *calls: tuple[str, str]) -> str:
    """The calls as a model of that family writes them."""
    key = "parameters" if family == "llama3_json" else "arguments"
    objects = [f'{{"name": "{name}", "{key}": {arguments}}}' for name, arguments in calls]
    if family == "mistral":
        return f"[TOOL_CALLS][{', '.join(objects)}]"
    if family in ("json", "llama3_json"):
        return ("; " if family == "llama3_json" else "\n").join(objects)
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in objects)
