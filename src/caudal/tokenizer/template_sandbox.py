"""The Jinja2 environment of chat templates: Hugging Face's extensions in a sandbox with limits."""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, _PassArg
from jinja2.visitor import NodeTransformer

from caudal.tokenizer.rendered_prompt import is_placeholder
from caudal.tokenizer.template_limits import (
    GuardedItems,
    RenderBudget,
    RenderLimitError,
    charge_filter,
    charge_format,
    charge_method,
    charge_operator,
    charge_result,
    check_range,
)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles chat templates; each rendering runs within `limits`."""

    # Operators in this set go through `call_binop`, also where they could be folded in advance.
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=[GenerationBlock, loopcontrols],
            finalize=_charge_output,
        )
        self._local = threading.local()
        self.filters["tojson"] = _to_json
        for name in ("urlize", "xmlattr"):
            del self.filters[name]
        for name, function in self.filters.items():
            self.filters[name] = self._guard_filter(name, function)
        del self.globals["lipsum"]
        self.globals["range"] = check_range
        self.globals["dict"] = _make_dict
        self.globals["namespace"] = _GuardedNamespace
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.concat = self._guarded_concat  # type: ignore[method-assign]

    @contextmanager
    def limits(self, num_input_chars: int) -> Iterator[None]:
        """Run one rendering of messages of that length, in this thread."""
        self._local.budget = RenderBudget(num_input_chars)
        try:
            yield
        finally:
            self._local.budget = None

    @property
    def budget(self) -> RenderBudget:
        """What is left to the rendering in this thread; a small one of its own outside any."""
        budget: RenderBudget | None = getattr(self._local, "budget", None)
        return budget or RenderBudget(0)

    def guard_loop(self, items: Iterable[object]) -> GuardedItems:
        """Charge a loop's items as they come; the compiler wraps every loop in this."""
        return GuardedItems(items, self.budget)

    def guard_concat(self, *parts: object) -> str:
        """The `~` operator, charged."""
        self.budget.spend_on(parts)
        return "".join(map(str, parts))

    def _guarded_concat(self, parts: Iterable[str]) -> str:
        """Join the output of a template, macro or block; charged part by part."""
        budget = self.budget
        kept = []
        for part in parts:
            budget.spend(len(part))
            kept.append(part)
        return "".join(kept)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        charge_operator(self.budget, operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        budget = __self.budget
        budget.step()
        if isinstance(__obj, LoopContext) and args:
            # A recursive loop's inner items do not pass through the loop statement.
            args = (__self.guard_loop(args[0]), *args[1:])
        elif getattr(__obj, "__name__", "") == "join" and args:
            args = (_counted(args[0]), *args[1:])
        charge_method(budget, __obj, (*args, *kwargs.values()))
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        formatter = super().wrap_str_format(value)
        if formatter is None:
            return None

        @functools.wraps(formatter)
        def guarded(*args: Any, **kwargs: Any) -> str:
            charge_format(self.budget, value.__self__, [*args, *kwargs.values()])
            return formatter(*args, **kwargs)

        return guarded

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = Parser(self, source, name, filename).parse()
        guarded: nodes.Template = _GuardInserter().visit(tree)
        guarded.set_environment(self)
        return guarded

    def _guard_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        num_leading = 0 if _PassArg.from_obj(function) is None else 1

        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            leading, (value, *rest) = args[:num_leading], args[num_leading:]
            if name in ("join", "sum"):
                value = _counted(value)
            charge_filter(self.budget, name, value, (*rest, *kwargs.values()))
            result = function(*leading, value, *rest, **kwargs)
            charge_result(self.budget, result)
            return result

        return guarded


class GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks what the model wrote, and changes nothing."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class _GuardedNamespace(Namespace):
    """`namespace()` without the names by which Python keeps an object's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _require_public(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_public(name)
        super().__setitem__(name, value)


class _GuardInserter(NodeTransformer):
    """Routes loops and `~` through the environment, where they are charged."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        self.generic_visit(node)
        node.iter = self._call("guard_loop", [node.iter], node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:  # noqa: N802
        self.generic_visit(node)
        return self._call("guard_concat", node.nodes, node.lineno)

    def _call(self, method: str, args: list[Any], lineno: int) -> nodes.Call:
        target = nodes.EnvironmentAttribute(method, lineno=lineno)
        return nodes.Call(target, args, [], None, None, lineno=lineno)


def _counted(items: Any) -> Any:
    """A generator as a list, so that what it holds can be weighed before it is joined."""
    is_lazy = isinstance(items, Iterable) and not isinstance(items, Sized)
    return list(items) if is_lazy else items


@pass_context
def _charge_output(context: Context, value: Any) -> Any:
    # Text is charged where it is joined; only what becomes text here is charged here. Taking the
    # context also keeps the compiler from evaluating constants before there is a budget.
    if not isinstance(value, str):
        environment = context.environment
        assert isinstance(environment, TemplateEnvironment)
        environment.budget.spend_on(value)
    return value


def _require_public(name: object) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise SecurityError(f"{name!r} cannot be the name of a namespace's attribute")


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """The `dict` of templates: makes dictionaries, but is not the class."""
    return dict(*args, **kwargs)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(str(message))


def _strftime_now(format_string: str) -> str:
    if len(format_string) > 256 or re.search(r"%\d|\d{4}", format_string):
        raise RenderLimitError("the chat template asks for too long a date")
    return datetime.now().strftime(format_string)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as Hugging Face's templates expect it: no HTML escapes, Unicode as it is."""
    text = json.dumps(
        value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return _escape_non_ascii(text) if ensure_ascii else text


def _escape_non_ascii(text: str) -> str:
    """JSON escapes for all but ASCII, and but for the placeholders of special tokens."""
    kept = (c if c.isascii() or is_placeholder(c) else json.dumps(c)[1:-1] for c in text)
    return "".join(kept)
