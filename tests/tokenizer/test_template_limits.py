"""Templates come with model files: a hostile one must neither hang the server nor fill memory."""

from __future__ import annotations

import time
import tracemalloc

import pytest

from caudal.errors import InvalidRequestError
from caudal.tokenizer import ChatTemplate

GROW = "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = GROWN %}{% endfor %}"
NEST = GROW.replace("'ab'", "['a']").replace("GROWN", "[ns.x, ns.x]")
BLOCK = "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"
MACRO = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
MAPS = "{% set l = l | map('upper') | list %}" * 400
MANY = "{% set x = 'a' * 1000000 %}{% set l = [x] * 40000 %}"
FILL = "{% for i in range(40000) %}" + "z" * 10000 + "{% endfor %}"

HOSTILE = {
    "nested loops": "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "recursive loop": "{% for x in range(9) recursive %}{{ loop(range(9999)) }}{% endfor %}",
    "branching macro": MACRO + "{{ f(60) }}",
    "filters over long lists": "{% set l = range(49999) %}"
    + "{% set l = l|map('upper')|list %}" * 400,
    "long range": "{{ range(99999999) | list }}",
    "repeated text": "{{ 'a' * 10000000000 }}",
    "repeated text reversed": "{{ 10000000000 * 'a' }}",
    "repeated list": "{{ ([0] * 10000000000) | length }}",
    "power": "{{ 10 ** 100000000 }}",
    "repeated squares": GROW.replace("'ab'", "3").replace("GROWN", "ns.x * ns.x"),
    "doubling +": GROW.replace("GROWN", "ns.x + ns.x"),
    "doubling ~": GROW.replace("GROWN", "ns.x ~ ns.x"),
    "doubling join": GROW.replace("GROWN", "[ns.x, ns.x] | join"),
    "doubling lazy join": GROW.replace("GROWN", "[ns.x, ns.x] | select | join"),
    "doubling str.join": GROW.replace("GROWN", "''.join([ns.x, ns.x])"),
    "doubling format": GROW.replace("GROWN", "'{0}{0}'.format(ns.x)"),
    "doubling format_map": GROW.replace("GROWN", "'{a}{a}'.format_map({'a': ns.x})"),
    "doubling %": GROW.replace("GROWN", "'%s%s' % (ns.x, ns.x)"),
    "doubling format filter": GROW.replace("GROWN", "'%s%s' | format(ns.x, ns.x)"),
    "doubling replace": GROW.replace("GROWN", "ns.x | replace('a', 'aa') | replace('b', 'ba')"),
    "doubling block": GROW.replace(
        "{% set ns.x = GROWN %}", "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"
    ),
    "replace nothing": "{% set x = 'a' * 1000000 %}{{ x.replace('', x) }}",
    "translate": "{{ ('a' * 1000000).translate({97: 'b' * 1000000}) }}",
    "center filter": "{{ 'a' | center(10000000000) }}",
    "center": "{{ 'a'.center(10000000000) }}",
    "ljust unpacked": "{{ 'a'.ljust(*[10000000000]) }}",
    "method by filter": "{{ ('a' | attr('zfill'))(10000000000) }}",
    "indent": "{{ ('a\n' * 100000) | indent(9999) }}",
    "wordwrap": "{{ ('a ' * 100000) | wordwrap(1, wrapstring='b' * 100000) }}",
    "expandtabs": "{{ '\t'.expandtabs(1000000000) }}",
    "wide field": "{{ '%9999999999d' % 1 }}",
    "wide field from a value": "{{ '{:>{}}'.format(1, 9999999999) }}",
    "wide field from a star": "{{ '%*d' % (9999999999, 1) }}",
    "wide date": "{{ strftime_now('%1000000000Y') }}",
    "list as text": MANY + "{{ l }}",
    "list to text": MANY + "{{ l | string | length }}",
    "list as JSON": MANY + "{{ l | tojson | length }}",
    "list joined": MANY + "{{ l | map('string') | join | length }}",
    "items as text": "{% set d = {'a': 'a' * 1000000} %}{{ [d.items()] * 40000 }}",
    "namespace as text": "{% set n = namespace(x='a' * 1000000) %}{{ [n] * 40000 }}",
    "indented JSON": "{{ (range(9999) | list) | tojson(indent=' ' * 1000000) }}",
    "nested list as text": NEST + "{{ ns.x }}",
    "nested list as JSON": NEST + "{{ ns.x | tojson }}",
    "sum of lists": "{{ ([[0] * 40000] * 9999) | sum(start=[]) | length }}",
    "lazy sum of lists": "{{ ([[0] * 40000] * 9999) | map('list') | sum(start=[]) | length }}",
    "slices": "{{ [1] | slice(10000000000) | list }}",
    "batch": "{{ [1] | batch(10000000000, 0) | list }}",
    "long output": FILL,
    "long block": "{% set x %}" + FILL + "{% endset %}{{ x }}",
    "text before any budget": "{{ 'a' | center(1000000000000) }}",
    "lipsum": "{{ lipsum(1000000000) }}",
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_template_ends_soon_in_little_memory(source: str) -> None:
    tracemalloc.start()
    started = time.perf_counter()
    try:
        with pytest.raises(InvalidRequestError, match="The chat template does not accept"):
            ChatTemplate(source).render([{"role": "user", "content": "x"}])
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # The limit is 2 s of its own; tracing and a busy machine make it longer.
    assert time.perf_counter() - started < 20
    assert peak_bytes < 150_000_000


def test_long_ordinary_chats_stay_within_the_limits() -> None:
    """Templates that gather everything in one string and look at every message are common."""
    source = (
        "{% set ns = namespace(out='', all=[]) %}{% for m in messages %}"
        "{% set ns.out = ns.out + m.role ~ ': ' ~ (m.content | trim) ~ '\n' %}"
        "{% set ns.all = ns.all + [m] %}{% endfor %}{{ ns.out }}{{ ns.all | length }}"
    )
    messages = [{"role": "user", "content": f" message {i} " * 8} for i in range(600)]
    text = ChatTemplate(source).render(messages).text
    assert text.endswith("\n600")
    assert text.count("user: ") == 600


def test_a_very_long_message_stays_within_the_limits() -> None:
    content = "word " * 400_000
    source = "{% for m in messages %}{{ m.content | trim | replace('<x>', '') }}{% endfor %}"
    assert (
        len(ChatTemplate(source).render([{"role": "user", "content": content}]).text) == 1_999_999
    )
