"""Chat templates render as with Hugging Face, and fail as a request error with their message."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

import pytest

from caudal.errors import InvalidRequestError
from caudal.tokenizer import ChatTemplate, Tokenizer
from tests.tiny_vocabulary import CHATML_TEMPLATE, bpe_metadata, spm_metadata

HELLO = [{"role": "user", "content": "hello"}]


def render(source: str, messages: list[dict[str, Any]] | None = None, **options: Any) -> str:
    template = ChatTemplate(source, "<s>", "</s>")
    return template.render(HELLO if messages is None else messages, **options).text


def test_special_tokens_tools_documents_and_extra_arguments_reach_the_template() -> None:
    source = (
        "{{ bos_token }}{{ tools[0].name }}|{{ documents[0].title }}|{{ enable_thinking }}|"
        "{{ add_generation_prompt }}|{{ messages[0]['content'] }}{{ eos_token }}"
    )
    text = render(
        source,
        tools=[{"name": "echo"}],
        documents=[{"title": "Rivers"}],
        add_generation_prompt=False,
        chat_template_kwargs={"enable_thinking": False},
    )
    assert text == "<s>echo|Rivers|False|False|hello</s>"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "hello!"),
        ("{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}", "1"),
        ("{% for m in [1, 2] %}{% if m == 1 %}{% continue %}{% endif %}{{ m }}{% endfor %}", "2"),
        (
            "{% set ns = namespace(n=0) %}{% for m in [1, 2] %}{% set ns.n = ns.n + m %}"
            "{% endfor %}{{ ns.n }}",
            "3",
        ),
        ("{{ [{'a': 1}, {'a': 0}] | selectattr('a') | list | length }}", "1"),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ {'b': [1], 'a': 2} | tojson(indent=2) }}", '{\n  "b": [\n    1\n  ],\n  "a": 2\n}'),
        (
            "{{ {'b': 1, 'a': 'é'} | tojson(ensure_ascii=true, sort_keys=true) }}",
            '{"a": "\\u00e9", "b": 1}',
        ),
        ("{{ [1, 2] | tojson(separators=(',', ':')) }}", "[1,2]"),
        ("{{ 'a' ~ 1 ~ none }}{{ 'x' * 3 }}{{ 7 % 4 }}{{ '%s-%d' % ('a', 2) }}", "a1Nonexxx3a-2"),
        (
            "{{ '{}:{x}'.format(1, x=2) }}{{ ', '.join(['a', 'b']) }}{{ ['a', 'b'] | join('-') }}",
            "1:2a, ba-b",
        ),
        (
            "{% for x in 'ab' %}{{ loop.index }}{{ loop.last }}{{ loop.length }}{% endfor %}",
            "1False22True2",
        ),
        (
            "{% for x in [1, [2]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}",
            "12",
        ),
        ("{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f('a') + f('b') }}", "[a][b]"),
        ("{% set x %}a{{ 1 }}{% endset %}{{ x | upper | center(6) }}|", "  A1  |"),
        ("{{ dict(a=1) | tojson }}{{ messages[0].get('name', 'nobody') }}", '{"a": 1}nobody'),
        ("{% for k, v in {'a': 1}.items() if v %}{{ k }}{{ v }}{% else %}no{% endfor %}", "a1"),
        ("  {% if true %}\n  x\n  {% endif %}\n", "  x\n"),
        ("{{ messages[0].content is string }}{{ messages[0].tool_calls is defined }}", "TrueFalse"),
        ("{{ missing }}|{{ missing.x if missing is defined }}", "|"),
        ("{{ range(3) | list }}{{ [3, 1] | sort | first }}{{ 'a b' | title }}", "[0, 1, 2]1A B"),
    ],
)
def test_renders_as_hugging_face_does(source: str, expected: str) -> None:
    """B85."""
    assert render(source) == expected


def test_current_date_is_available() -> None:
    year = datetime.now().year
    assert render("{{ strftime_now('%Y') }}") in (str(year), str(year + 1))


def test_null_fields_of_a_message_are_absent() -> None:
    messages = [{"role": "assistant", "content": None, "tool_calls": [{"id": None}]}]
    assert render("{{ messages[0].content is defined }}{{ messages[0] | length }}", messages) == (
        "False2"
    )


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + none }}", "can only concatenate str"),
        ("{{ messages[5].content.x }}", "has no element 5"),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "is unsafe|not safely callable"),
        ("{% set ns = namespace(_x=1) %}", "cannot be the name"),
        ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "cannot be the name"),
        ("{% include 'x' %}", "no loader"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recurses too deeply"),
        ("{{ messages | tojson | int / 0 }}", "division by zero"),
    ],
)
def test_errors_of_the_template_are_request_errors_with_its_message(
    source: str, message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        render(source)
    assert (caught.value.status, caught.value.param) == (400, "messages")
    assert caught.value.code == "chat_template_error"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (None, "the model file has no chat template"),
        ("  \n", "the model file has no chat template"),
        ("{% if %}", "syntax error in line 1"),
        ("{{ 1 }}\n{% for x in y %}", "syntax error in line 2"),
        ("{{ x | nosuchfilter }}", "syntax error in line 1: No filter named 'nosuchfilter'"),
        ("{% nosuchtag %}", "unknown tag"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "recurses too deeply"),
        ("x" * 1_000_001, "longer than 1000000 characters"),
    ],
)
def test_unusable_template_loads_but_chats_are_refused(source: str | None, reason: str) -> None:
    template = ChatTemplate(source, "<s>", "</s>")
    assert not template.has_template
    assert reason in str(template.error)
    with pytest.raises(InvalidRequestError, match="no usable template") as caught:
        template.render(HELLO)
    assert caught.value.code == "no_usable_template"


@pytest.mark.parametrize("name", ["messages", "tools", "documents", "bos_token"])
def test_extra_arguments_cannot_replace_what_the_server_sets(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"'{name}' cannot be set") as caught:
        render("x", chat_template_kwargs={name: "y"})
    assert caught.value.param == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"messages": [{"role": "user", "content": "a\ud83d"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"text": "\udc00"}]}]}, "messages"),
        ({"messages": [{"role": "user", "\ud800": "x"}]}, "messages"),
        ({"tools": [{"name": "f", "parameters": {"\udfff": 1}}]}, "tools"),
        ({"documents": [{"text": "\ud800"}]}, "documents"),
        ({"chat_template_kwargs": {"a": "\ud800"}}, "chat_template_kwargs"),
    ],
)
def test_lone_surrogates_anywhere_are_refused_naming_the_field(
    options: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequestError, match="lone surrogate") as caught:
        render("{{ messages | tojson }}", **options)
    assert caught.value.param == param


def test_template_of_a_file_gets_its_own_special_tokens() -> None:
    source = "{{ bos_token }}{{ unk_token }}{{ messages[0].content }}{{ eos_token }}"
    metadata = spm_metadata() | {"tokenizer.chat_template": source}
    tokenizer = Tokenizer.from_gguf_metadata(metadata)
    template = ChatTemplate.from_gguf_metadata(metadata, tokenizer)
    rendered = template.render(HELLO)
    assert rendered.text == "<s><unk>hello</s>"
    # The template's own BOS is the only one.
    assert tokenizer.encode_prompt(rendered)[:2] == [1, 0]
    assert tokenizer.encode_prompt(rendered)[-1] == 2


def test_prompt_without_bos_gets_the_one_the_model_wants() -> None:
    metadata = spm_metadata() | {"tokenizer.chat_template": "{{ messages[0].content }}"}
    tokenizer = Tokenizer.from_gguf_metadata(metadata)
    rendered = ChatTemplate.from_gguf_metadata(metadata, tokenizer).render(HELLO)
    assert tokenizer.encode_prompt(rendered) == tokenizer.encode("hello")
    assert tokenizer.encode_prompt(rendered)[0] == 1
    assert tokenizer.encode_prompt(rendered, add_bos=False)[0] != 1


def test_file_without_a_template_is_usable_for_everything_else() -> None:
    metadata = bpe_metadata("smollm")
    del metadata["tokenizer.chat_template"]
    tokenizer = Tokenizer.from_gguf_metadata(metadata)
    assert not ChatTemplate.from_gguf_metadata(metadata, tokenizer).has_template
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"


def test_threads_render_independently() -> None:
    template = ChatTemplate(CHATML_TEMPLATE)
    gate = threading.Barrier(4)

    def one(index: int) -> bool:
        gate.wait(10)
        content = f"message {index} " * 50
        expected = f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
        messages = [{"role": "user", "content": content}]
        return all(template.render(messages).text == expected for _ in range(50))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(one, range(4)))


def test_messages_are_not_changed_by_rendering() -> None:
    messages = [{"role": "user", "content": "a<|im_end|>b", "name": None}]
    before = json.dumps(messages)
    ChatTemplate(CHATML_TEMPLATE, control_texts=["<|im_end|>"]).render(messages)
    assert json.dumps(messages) == before
