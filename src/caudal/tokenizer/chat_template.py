"""Chat templates: messages to the text of a prompt, with message text kept apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from caudal.errors import InvalidRequestError
from caudal.tokenizer.gguf_tokenizer import Tokenizer, require_encodable
from caudal.tokenizer.prompt_shield import PromptShield, map_strings
from caudal.tokenizer.rendered_prompt import PromptSegment, RenderedPrompt

if TYPE_CHECKING:
    import jinja2

    from caudal.tokenizer.template_sandbox import TemplateEnvironment

_MAX_SOURCE_CHARS = 1_000_000
_KEY = "tokenizer.chat_template"


class _Compiled(NamedTuple):
    environment: TemplateEnvironment
    template: jinja2.Template
    shield: PromptShield


class ChatTemplate:
    """One model's chat template.

    Jinja2 is imported and the template compiled on first use. Rendering is safe from several
    threads. A source of None, or one with a syntax error, gives a template that cannot be used.
    """

    def __init__(
        self,
        source: str | None,
        bos_token: str | None = None,
        eos_token: str | None = None,
        *,
        control_texts: Iterable[str] = (),
        extra_tokens: Mapping[str, str] | None = None,
    ) -> None:
        """`control_texts` are the special tokens that messages must not contain as such;
        `extra_tokens` are variables like `pad_token`."""
        self.source = source
        self._control_texts = frozenset(control_texts)
        self._variables: dict[str, str] = dict(extra_tokens or {})
        for name, token in (("bos_token", bos_token), ("eos_token", eos_token)):
            self._variables[name] = token or ""

    @classmethod
    def from_gguf_metadata(cls, metadata: Mapping[str, object], tokenizer: Tokenizer) -> Self:
        """The template of a GGUF file, of which one without a usable template gives an unusable
        one."""
        source = metadata.get(_KEY)
        ids = tokenizer.named_special_ids
        names = {"unk_token": "unknown", "pad_token": "padding", "sep_token": "separator"}
        texts = {name: tokenizer.token_text(index) for name, index in ids.items()}
        return cls(
            source if isinstance(source, str) else None,
            texts.get("bos"),
            texts.get("eos"),
            control_texts=tokenizer.control_texts,
            extra_tokens={name: texts[key] for name, key in names.items() if key in texts},
        )

    @property
    def has_template(self) -> bool:
        """Whether chats can be rendered."""
        return self.error is None

    @property
    def error(self) -> str | None:
        """Why there is no usable template, None if there is one."""
        return self._compilation if isinstance(self._compilation, str) else None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> RenderedPrompt:
        """The prompt of a chat.

        Special tokens in any string of the messages, tools or documents are marked as content and
        stay plain text. A template that looks for a special token in a message does not find it.
        Raises InvalidRequestError (param `messages`) if there is no usable template, the template
        reports an error or exceeds its limits, or a string is not valid Unicode.
        """
        compilation = self._compilation
        if isinstance(compilation, str):
            raise InvalidRequestError(
                f"This model has no usable template for chats: {compilation}. "
                "Use /v1/completions, or a model file with a chat template.",
                param="messages",
                code="no_usable_template",
            )
        inputs: dict[str, Any] = {
            "messages": [_without_nulls(message) for message in messages],
            "tools": tools,
            "documents": documents,
        }
        self._add_arguments(inputs, chat_template_kwargs)
        inputs.setdefault("add_generation_prompt", add_generation_prompt)
        num_chars = _check_strings(inputs)
        shield = compilation.shield
        hidden = {name: map_strings(value, shield.hide) for name, value in inputs.items()}
        if all(hidden[name] is value for name, value in inputs.items()):
            text = self._run(compilation, inputs, num_chars)
            return RenderedPrompt((PromptSegment(text, False),))
        shielded = self._run(compilation, hidden, num_chars)
        try:
            plain = self._run(compilation, inputs, num_chars)
        except InvalidRequestError:
            plain = None
        return shield.segments(shielded, plain)

    def _add_arguments(self, inputs: dict[str, Any], arguments: Mapping[str, Any] | None) -> None:
        for name, value in (arguments or {}).items():
            if name in inputs or name in self._variables:
                raise InvalidRequestError(
                    f"chat_template_kwargs: {name!r} cannot be set", param="chat_template_kwargs"
                )
            inputs[name] = value

    def _run(self, compiled: _Compiled, inputs: dict[str, Any], num_chars: int) -> str:
        try:
            with compiled.environment.limits(num_chars):
                return compiled.template.render({**self._variables, **inputs})
        except Exception as error:  # templates raise whatever they please
            raise InvalidRequestError(
                f"The chat template does not accept these messages: {_describe(error)}",
                param="messages",
                code="chat_template_error",
            ) from error

    @cached_property
    def _compilation(self) -> _Compiled | str:
        """The compiled template, or why there is none."""
        if not self.source or not self.source.strip():
            return "the model file has no chat template"
        if len(self.source) > _MAX_SOURCE_CHARS:
            return f"its chat template is longer than {_MAX_SOURCE_CHARS} characters"
        import jinja2

        from caudal.tokenizer.template_sandbox import TemplateEnvironment

        try:
            environment = TemplateEnvironment()
            tree = environment.parse(self.source)
            constants = (node.value for node in tree.find_all(jinja2.nodes.Const))
            texts = [value for value in constants if isinstance(value, str)]
            template = environment.from_string(tree)
        except jinja2.TemplateSyntaxError as error:
            return f"its chat template has a syntax error in line {error.lineno}: {error.message}"
        except Exception as error:  # deep nesting and other abuse of the compiler
            return f"its chat template cannot be compiled: {_describe(error)}"
        return _Compiled(environment, template, PromptShield(self._control_texts, texts))


def _without_nulls(message: Mapping[str, Any]) -> dict[str, Any]:
    """Clients send null for what is absent; templates test for absence or write "None"."""
    return {key: value for key, value in message.items() if value is not None}


def _check_strings(inputs: dict[str, Any]) -> int:
    """Characters in all strings; raises InvalidRequestError for one that is not valid Unicode."""
    num_chars = 0

    def check(text: str) -> str:
        nonlocal num_chars
        num_chars += len(text)
        require_encodable(text, param)
        return text

    for name, value in inputs.items():
        param = name if name in ("messages", "tools", "documents") else "chat_template_kwargs"
        map_strings(value, check)
    return num_chars


def _describe(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it recurses too deeply"
    text = str(error)[:500]
    return text or type(error).__name__
