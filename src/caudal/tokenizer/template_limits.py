"""What one rendering of a chat template may cost, and what each operation is charged.

Templates come with model files, so a hostile one must neither hang the server nor fill its memory.
Whatever can make text longer than its inputs is charged *before* it runs.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MappingView, Sequence, Set, Sized

from jinja2.exceptions import TemplateRuntimeError
from jinja2.utils import Namespace

_MAX_SECONDS = 2.0
_MAX_STEPS = 1_000_000
_MAX_CHARS = 64_000_000
"""In all; bounds memory. Templates that gather a long chat in one string stay below."""
_MAX_CHARS_EACH = 4_000_000
"""In one text; bounds the time of operations that cannot be interrupted."""
_MAX_ITEMS = 50_000
_MAX_VALUES = 100_000
_MAX_INT_BITS = 4096
_MAX_WIDTH = 1000
_WIDE_FIELD = re.compile(r"\d{4}|\*|\{[^{}]*\{")
"""A width of four digits, or one taken from a value."""


class RenderLimitError(TemplateRuntimeError):
    """A template wants more time or text than it may have."""


class RenderBudget:
    """Time, steps and text left to one rendering of `num_input_chars` of messages."""

    def __init__(self, num_input_chars: int) -> None:
        self._deadline = time.monotonic() + _MAX_SECONDS
        self._steps_left = _MAX_STEPS
        self._max_chars_each = _MAX_CHARS_EACH + 8 * num_input_chars
        # Room for filters and loops that look at the same message many times.
        self._chars_left = _MAX_CHARS + 64 * num_input_chars

    def step(self) -> None:
        """Charge one loop iteration, call or filter."""
        self._steps_left -= 1
        if self._steps_left < 0 or time.monotonic() > self._deadline:
            raise RenderLimitError(
                f"the chat template takes too many steps or more than {_MAX_SECONDS:g} s"
            )

    def spend(self, num_chars: int) -> None:
        """Charge a text of that length that is about to be made."""
        self._chars_left -= max(0, num_chars)
        if self._chars_left < 0 or num_chars > self._max_chars_each:
            raise RenderLimitError("the chat template makes too much text")

    def spend_on(self, value: object) -> None:
        """Charge the text form of `value`, nested values included."""
        self.spend(self.weigh(value))

    def spend_items(self, num_items: int) -> None:
        """Charge a list of that length that is about to be made."""
        if num_items > _MAX_ITEMS:
            raise RenderLimitError(f"the chat template makes a list of {num_items} items")
        self.spend(8 * num_items)

    def weigh(self, value: object) -> int:
        """At least the characters that `value` takes as text, or more than may be spent."""
        total = num_visited = 0
        stack = [value]
        while stack:
            item = stack.pop()
            num_visited += 1
            if isinstance(item, str | bytes):
                total += len(item)
            elif isinstance(item, Mapping):
                stack += [*item.keys(), *item.values()]
            elif isinstance(item, list | tuple | Set | MappingView):
                stack += item if isinstance(item, Iterable) else ()
            elif isinstance(item, Namespace):
                stack.append(item._Namespace__attrs)
            else:
                total += 24
            # Lists that hold each other many times have few objects, but endless text.
            if total > self._max_chars_each or num_visited + len(stack) > _MAX_VALUES:
                return self._max_chars_each + 1
        return total + 4 * num_visited


class GuardedItems:
    """What a loop runs over; charges a step for each item."""

    def __init__(self, items: Iterable[object], budget: RenderBudget) -> None:
        self._items = items
        self._budget = budget

    def __iter__(self) -> Iterator[object]:
        step = self._budget.step
        for item in self._items:
            step()
            yield item

    def __len__(self) -> int:
        # A TypeError for generators is what tells Jinja to count them itself.
        return len(self._items)  # type: ignore[arg-type]


def charge_operator(budget: RenderBudget, operator: str, left: object, right: object) -> None:
    """Charge `+`, `*`, `**` and `%` for the text, list or number that they make."""
    if isinstance(left, int) and isinstance(right, int):
        _check_int_size(operator, left, right)
    elif operator == "%" and isinstance(left, str | bytes):
        charge_format(budget, left, (right,))
    elif operator in "+*":
        length = _length(left) + _length(right)
        count = (left if isinstance(left, int) else right) if operator == "*" else 1
        length *= count if isinstance(count, int) else 1
        is_text = isinstance(left, str | bytes) or isinstance(right, str | bytes)
        budget.spend(length) if is_text else budget.spend_items(length)


def _check_int_size(operator: str, left: int, right: int) -> None:
    bits = left.bit_length() + right.bit_length()
    if operator == "**":
        bits = left.bit_length() * max(0, right)
    if bits > _MAX_INT_BITS:
        raise RenderLimitError("the chat template makes too large a number")


def charge_format(budget: RenderBudget, template: str | bytes, values: object) -> None:
    """Charge `%` and `str.format`: every field might repeat every value."""
    text = template if isinstance(template, str) else template.decode("latin-1")
    if _WIDE_FIELD.search(text):
        raise RenderLimitError("the chat template pads text too widely")
    num_fields = text.count("{") + text.count("%") + 1
    budget.spend(len(text) + num_fields * (budget.weigh(values) + _MAX_WIDTH))


def charge_method(budget: RenderBudget, method: object, args: Sequence[object]) -> None:
    """Charge a method of a string that can make a longer one."""
    text = getattr(method, "__self__", None)
    name = getattr(method, "__name__", "")
    if isinstance(text, str | bytes):
        charge = _METHOD_CHARGES.get(name)
        budget.spend(len(text))
        if charge is not None:
            charge(budget, text, args)


def charge_filter(budget: RenderBudget, name: str, value: object, args: Sequence[object]) -> None:
    """Charge a filter for what it makes of `value`; `args` include keyword values."""
    budget.step()
    if name in _FILTERS_WITHOUT_TEXT:
        if name in ("batch", "slice", "round"):
            _check_widths(args)
        return
    budget.spend_on(value)
    charge = _FILTER_CHARGES.get(name)
    if charge is not None:
        charge(budget, value, args)


def charge_result(budget: RenderBudget, result: object) -> None:
    """Charge what a filter made, for those whose result only shows afterwards."""
    if isinstance(result, list | tuple):
        budget.spend_items(len(result))
    elif isinstance(result, str):
        budget.spend(len(result))


def check_range(*bounds: int) -> range:
    """The `range` of templates: as Jinja's sandbox limits it, but to fewer items."""
    numbers = range(*bounds)
    if len(numbers) > _MAX_ITEMS:
        raise RenderLimitError(f"the chat template asks for a range of {len(numbers)} numbers")
    return numbers


def _charge_width(budget: RenderBudget, text: object, args: Sequence[object]) -> None:
    budget.spend(_largest_int(args))


def _charge_lines(budget: RenderBudget, text: object, args: Sequence[object]) -> None:
    """Every line grows by the indentation, every wrapped word by the line break."""
    num_lines = 1 + sum(text.count(c) for c in "\n\r\t ") if isinstance(text, str) else 1
    budget.spend(num_lines * (_largest_int(args) + budget.weigh(args)))


def _charge_replace(budget: RenderBudget, text: object, args: Sequence[object]) -> None:
    old, new = (*args, "", "")[:2]
    length = budget.weigh(text)
    num_found = length + 1
    if isinstance(text, str) and isinstance(old, str) and old:
        num_found = text.count(old)
    budget.spend(num_found * _length(new))


def _charge_join(budget: RenderBudget, text: object, args: Sequence[object]) -> None:
    items, separator = (args, text) if isinstance(text, str | bytes) else ((text,), args)
    count = sum(len(i) if isinstance(i, Sized) else _MAX_WIDTH * 10 for i in items)
    budget.spend(count * budget.weigh(separator) + budget.weigh(items))


def _charge_translate(budget: RenderBudget, text: object, args: Sequence[object]) -> None:
    budget.spend(_length(text) * budget.weigh(args))


def _charge_indented(budget: RenderBudget, value: object, args: Sequence[object]) -> None:
    """JSON with an indentation: each value stands on its own line, at its depth."""
    _check_widths(args)
    width = min(_largest_int(args), _MAX_WIDTH) + sum(_length(a) for a in args)
    budget.spend(budget.weigh(value) * (1 + width))


def _charge_formatted(budget: RenderBudget, value: object, args: Sequence[object]) -> None:
    charge_format(budget, value if isinstance(value, str) else str(value), args)


def _check_widths(args: Sequence[object]) -> None:
    if _largest_int(args) > _MAX_WIDTH:
        raise RenderLimitError("the chat template asks for too large a width")


def _largest_int(value: object) -> int:
    """The largest integer in `value` or one level below."""
    if isinstance(value, int):
        return value
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        nested = (i for v in value for i in (v if isinstance(v, list | tuple) else (v,)))
        return max((item for item in nested if isinstance(item, int)), default=0)
    return 0


def _charge_sum(budget: RenderBudget, value: object, args: Sequence[object]) -> None:
    """Numbers cost nothing; a sum of lists copies the growing list at every step."""
    if any(isinstance(arg, Sized) for arg in args):
        budget.spend(_length(value) * budget.weigh(value))


def _length(value: object) -> int:
    return len(value) if isinstance(value, Sized) else 0


_Charge = Callable[[RenderBudget, object, Sequence[object]], None]

_METHOD_CHARGES: dict[str, _Charge] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _charge_width),
    "expandtabs": _charge_lines,
    "replace": _charge_replace,
    "join": _charge_join,
    "translate": _charge_translate,
}
_FILTER_CHARGES: dict[str, _Charge] = {
    "center": _charge_width,
    **dict.fromkeys(("indent", "wordwrap"), _charge_lines),
    "replace": _charge_replace,
    "join": _charge_join,
    "format": _charge_formatted,
    "tojson": _charge_indented,
    "sum": _charge_sum,
}
# fmt: off
_FILTERS_WITHOUT_TEXT = frozenset(
    {
        "abs", "attr", "batch", "count", "d", "default", "dictsort", "first", "float",
        "groupby", "int", "items", "last", "length", "list", "map", "max", "min",
        "random", "reject", "rejectattr", "reverse", "round", "safe", "select",
        "selectattr", "slice", "sort", "unique"
    }
)
# fmt: on
"""These pick or count and make no text from what they are given."""
