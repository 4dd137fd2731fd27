"""The parser of answers: every format, malformed output, and pieces of any size."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable

import pytest

from caudal.server.parsers.json_scanner import JsonScanner
from caudal.server.parsers.output_parser import (
    OutputParser,
    OutputRules,
    ReasoningRules,
    ToolRules,
    id_factory,
)
from caudal.server.parsers.parts import Answer, CallStart, Content, Part, Reasoning, joined
from caudal.server.parsers.reasoning import (
    THINK,
    ReasoningState,
    detect_reasoning_format,
    state_after,
)
from caudal.server.parsers.tool_formats import (
    HERMES,
    JSON,
    LLAMA3_JSON,
    MISTRAL,
    MISTRAL_ARGS,
    MISTRAL_NAMED,
    ToolFormat,
    detect_tool_format,
)

NAMES = frozenset({"add", "greet"})
UNDECIDED, REASONING, CONTENT = ReasoningState


def make_parser(
    format: ToolFormat | None, state: ReasoningState | None = None, max_calls: int | None = None
) -> OutputParser:
    tools = ToolRules(format, NAMES, max_calls) if format else None
    reasoning = ReasoningRules(THINK, state) if state else None
    return OutputParser(OutputRules(reasoning, tools))


def parse(parser: OutputParser, pieces: Iterable[str]) -> list[Part]:
    parts = [part for piece in pieces for part in parser.push_token(piece)]
    return parts + parser.finish()


def read(
    text: str, format: ToolFormat | None = HERMES, state: ReasoningState | None = None
) -> tuple[str, str, list[tuple[str, str]]]:
    """(reasoning, content, calls) of a whole text, checked for every way of cutting it up."""
    whole = plain(joined(parse(make_parser(format, state), [text])))
    assert plain(joined(parse(make_parser(format, state), text))) == whole
    for seed in range(25):
        assert plain(joined(parse(make_parser(format, state), cut(text, seed)))) == whole
    return whole


def plain(answer: Answer) -> tuple[str, str, list[tuple[str, str]]]:
    calls = [(call.name, call.arguments) for call in answer.calls]
    return answer.reasoning, answer.content, calls


def cut(text: str, seed: int) -> list[str]:
    chance = random.Random(seed)
    places = sorted(chance.sample(range(len(text) + 1), chance.randint(0, min(9, len(text)))))
    return [text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])]


ARGUMENTS = '{"a": "x}\\"\\n]", "b": [1, {"c": null}], "d": -1.5e3, "e": "\\u00e9<tool_call>"}'
CALL = '{"name": "add", "arguments": ' + ARGUMENTS + "}"


@pytest.mark.parametrize(
    ("format", "text"),
    [
        (HERMES, f"<tool_call>\n{CALL}\n</tool_call>"),
        (HERMES, f"<tool_call>{CALL}</tool_call>\n"),
        (HERMES, f"\n\n<tool_call>{CALL}"),
        (HERMES, f"<tool_call>{CALL}</tool_c"),
        (HERMES, f"<tool_call>[{CALL}]</tool_call>"),
        (LLAMA3_JSON, CALL.replace("arguments", "parameters")),
        (LLAMA3_JSON, "\n" + CALL),
        (LLAMA3_JSON, '<|python_tag|>{"type": "function", ' + CALL[1:]),
        (LLAMA3_JSON, CALL.replace('"name"', '"function"')),
        (MISTRAL, f"[TOOL_CALLS] [{CALL}]"),
        (MISTRAL, f"[TOOL_CALLS][{CALL[:-1]}, " + '"id": "abcdefghi"}]'),
        (MISTRAL, f"[TOOL_CALLS]add{ARGUMENTS}"),
        (MISTRAL, f"[TOOL_CALLS]add[ARGS]{ARGUMENTS}"),
        (MISTRAL, f"[TOOL_CALLS] add [CALL_ID]abcdefghi[ARGS] {ARGUMENTS}"),
        (JSON, CALL),
        (JSON, f" [{CALL}]"),
    ],
)
def test_call_is_found_in_its_format(format: ToolFormat, text: str) -> None:
    assert read(text, format) == ("", "", [("add", ARGUMENTS)])


@pytest.mark.parametrize(
    ("format", "text"),
    [
        (HERMES, "<tool_call>{}</tool_call>\n<tool_call>{}</tool_call>"),
        (HERMES, "<tool_call>\n{}\n{}\n</tool_call>"),
        (HERMES, "<tool_call>[{}, {}]</tool_call>"),
        (HERMES, "<tool_call>{}\n<tool_call>{}"),
        (LLAMA3_JSON, "{}; {}"),
        (LLAMA3_JSON, "<|python_tag|>{}<|python_tag|>{}"),
        (MISTRAL, "[TOOL_CALLS][{}, {}]"),
        (MISTRAL, "[TOOL_CALLS][{},{}"),
        (JSON, "{}\n{}"),
        (JSON, "[{}, {}]"),
        (JSON, "{}, {}"),
    ],
)
def test_several_calls_are_kept_apart(format: ToolFormat, text: str) -> None:
    text = text.replace("{}", '{"name": "add", "arguments": {"n": 1}}', 1)
    text = text.replace("{}", '{"name": "greet", "arguments": {}}')
    assert read(text, format) == ("", "", [("add", '{"n": 1}'), ("greet", "{}")])


def test_tool_without_arguments_is_called_with_an_empty_object() -> None:
    """B73"""
    for call in ('{"name": "add"}', '{"name": "add", "arguments": null}'):
        assert read(f"<tool_call>{call}</tool_call>") == ("", "", [("add", "{}")])
    assert read('{"name": "add", "parameters": {}}', JSON) == ("", "", [("add", "{}")])


def test_arguments_before_the_name_or_in_a_string_are_read() -> None:
    early = '<tool_call>{"arguments": {"n": 1}, "name": "add"}</tool_call>'
    quoted = '<tool_call>{"name": "add", "arguments": "{\\"n\\": 1}"}</tool_call>'
    assert read(early) == read(quoted) == ("", "", [("add", '{"n":1}')])


def test_line_break_inside_a_string_becomes_an_escape() -> None:
    _, _, calls = read('<tool_call>{"name": "add", "arguments": {"t": "a\nb\tc"}}</tool_call>')
    assert json.loads(calls[0][1]) == {"t": "a\nb\tc"}


@pytest.mark.parametrize(
    ("format", "text"),
    [
        (HERMES, "<tool_call>not json</tool_call> and more"),
        (HERMES, '<tool_call>{"name": "add", "arguments": {oops}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
        (HERMES, '<tool_call>{"name": "add", "arguments": "no"}</tool_call>'),
        (HERMES, '<tool_call>{"name": "drop_tables", "arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "add", "argu'),
        (HERMES, "<tool_call>"),
        (HERMES, "<tool_call>[[]]</tool_call>"),
        (HERMES, "<tool_call>" + "[" * 300),
        (HERMES, '<tool_call>{"x": ' + "[" * 300),
        (HERMES, "a < b, c <tool and <tool_cal"),
        (HERMES, "text \n\n "),
        (HERMES, CALL),
        (LLAMA3_JSON, '{"answer": {"name": "add"}}'),
        (LLAMA3_JSON, '{"name": "Bob", "arguments": {}}'),
        (LLAMA3_JSON, "Call " + CALL),
        (LLAMA3_JSON, "<|python_tag|>print(1)"),
        (MISTRAL, '[TOOL_CALLS]I think not {"a": 1}'),
        (MISTRAL, "[TOOL_CALLS]" + "x" * 600),
        (MISTRAL, "[TOOL_CALLS]drop_tables{}"),
        (MISTRAL, "[TOOL_CALLS]add"),
        (JSON, "[1, 2, 3]"),
        (JSON, '["add"]'),
        (JSON, "{"),
        (JSON, ""),
    ],
)
def test_what_is_no_call_stays_text(format: ToolFormat, text: str) -> None:
    """To the character."""
    assert read(text, format) == ("", text, [])


def test_malformed_arguments_stay_with_their_call_and_end_at_its_closer() -> None:
    text = '<tool_call>{"name": "add", "arguments": {"n": oops}}</tool_call> bye'
    assert read(text) == ("", " bye", [("add", '{"n": oops}}')])
    parser = make_parser(HERMES)
    parse(parser, text)
    assert not parser.has_calls


def test_text_around_calls_is_content() -> None:
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    assert read(f"Let me see.\n\n{call}\nDone.") == ("", "Let me see.\nDone.", [("add", "{}")])
    junk = '<tool_call>{"name": "add", "arguments": {}, oops}'
    assert read(junk) == ("", ", oops}", [("add", "{}")])


def test_cut_arguments_are_passed_on_as_they_are() -> None:
    text = '<tool_call>{"name": "add", "arguments": {"n": 1'
    assert read(text) == ("", "", [("add", '{"n": 1')])
    parser = make_parser(HERMES)
    parse(parser, text)
    assert not parser.has_calls


def test_call_without_closer_is_recovered() -> None:
    """B77: a call or text, never both."""
    text = 'Sure.<tool_call>{"name": "add", "arguments": {"n": 1}'
    assert read(text) == ("", "Sure.", [("add", '{"n": 1}')])


def test_arguments_stream_before_they_are_whole() -> None:
    parser = make_parser(HERMES)
    parts = parser.push_token('<tool_call>{"name": "add", "arguments": {"text": "long')
    assert plain(joined(parts))[2] == [("add", '{"text": "long')]
    assert plain(joined([*parts, *parser.push_token("er")]))[2] == [("add", '{"text": "longer')]


@pytest.mark.parametrize("format", [HERMES, MISTRAL, LLAMA3_JSON, JSON])
def test_plain_text_is_not_held_back(format: ToolFormat) -> None:
    """B37: only a real beginning of a mark, and the white space before it, waits."""
    parser = make_parser(format)
    assert parser.push_token("The") == [Content("The")]
    assert parser.push_token(" river {x") == [Content(" river {x")]
    assert parser.push_token(" <b> [T") == [Content(" <b> [T" if format is not MISTRAL else " <b>")]
    assert parser.push_token("x") == [Content("x" if format is not MISTRAL else " [Tx")]


def test_one_call_at_most_ends_the_answer() -> None:
    """B71"""
    parser = make_parser(HERMES, max_calls=1)
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    parts: list[Part] = []
    for char in call * 3 + "more":
        if parser.is_done:
            break
        parts += parser.push_token(char)
    assert plain(joined(parts + parser.finish())) == ("", "", [("add", "{}")])


def test_ids_are_unique_and_fit_the_format() -> None:
    for format, length in ((HERMES, 29), (MISTRAL, 9)):
        create = id_factory(format)
        ids = {create() for _ in range(1000)}
        assert len(ids) == 1000
        assert {len(i) for i in ids} == {length}
    assert create().isalnum()


@pytest.mark.parametrize(
    ("text", "state", "expected"),
    [
        ("<think>\nhm, so\n</think>\n\nYes.", UNDECIDED, ("hm, so", "Yes.")),
        ("\n <think>hm</think>Yes.", UNDECIDED, ("hm", "Yes.")),
        ("hm </thi </think>\n\nYes.", REASONING, ("hm </thi", "Yes.")),
        ("<think>\nhm</think>Yes.", REASONING, ("hm", "Yes.")),
        ("</think>Yes.", REASONING, ("", "Yes.")),
        ("never ends \n", REASONING, ("never ends \n", "")),
        ("Yes.</think>", UNDECIDED, ("", "Yes.</think>")),
        ("<think>no</think>", CONTENT, ("", "<think>no</think>")),
        ("\n\n<thin", UNDECIDED, ("", "\n\n<thin")),
        (" Yes.", UNDECIDED, ("", " Yes.")),
        ("hm</think>\n\n\n", REASONING, ("hm", "")),
    ],
)
def test_reasoning_comes_off_the_front(
    text: str, state: ReasoningState, expected: tuple[str, str]
) -> None:
    """B81: reasoning that never ends is all reasoning, streamed or not."""
    assert read(text, None, state)[:2] == expected
    assert read(text, HERMES, state)[:2] == expected


def test_marks_in_the_answer_itself_are_text() -> None:
    """B83"""
    answer = "Use `<think>draft</think>` as the tag"
    assert read(f"hm</think>{answer}", HERMES, REASONING) == ("hm", answer, [])
    assert read(answer, HERMES, UNDECIDED) == ("", answer, [])


def test_calls_inside_reasoning_are_thoughts() -> None:
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    assert read(f"{call}</think>{call}", HERMES, REASONING) == (call, "", [("add", "{}")])


def test_reasoning_tokens_are_counted_to_the_one_that_ends_it() -> None:
    for pieces, state, count in (
        (["<think>", "\n", "hm", "</think>", "\n\n", "Yes"], UNDECIDED, 4),
        (["hm", " so", "</th", "ink>", "Yes"], REASONING, 4),
        (["hm", " so"], REASONING, 2),
        (["<think>hm</think>Yes", "."], UNDECIDED, 1),
        (["Yes", "."], UNDECIDED, 0),
    ):
        parser = make_parser(None, state)
        parse(parser, pieces)
        assert parser.num_reasoning_tokens == count, pieces


def test_hidden_reasoning_is_not_part_of_the_answer() -> None:
    rules = OutputRules(ReasoningRules(THINK, REASONING, is_shown=False))
    assert parse(OutputParser(rules), ["hm</think>", "Yes"]) == [Content("Yes")]


def test_reasoning_streams_as_it_comes() -> None:
    parser = make_parser(None, REASONING)
    assert parser.push_token("hm") == [Reasoning("hm")]
    assert parser.push_token(" <") == []
    assert parser.push_token("b") == [Reasoning(" <b")]


@pytest.mark.parametrize(
    ("prompt", "is_continued", "state"),
    [
        ("<|im_start|>assistant\n<think>\n", False, REASONING),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False, CONTENT),
        ("<|im_start|>assistant\n", False, UNDECIDED),
        ("say <think> twice\n<|im_start|>assistant\n", False, UNDECIDED),
        ("Well, ", True, CONTENT),
        ("<think>hm", True, REASONING),
        ("<think>hm</think>Yes", True, CONTENT),
        ("", True, UNDECIDED),
    ],
)
def test_splitter_starts_where_the_prompt_ends(
    prompt: str, is_continued: bool, state: ReasoningState
) -> None:
    """B81"""
    assert state_after(prompt, THINK, is_continued=is_continued) is state


@pytest.mark.parametrize(
    ("template", "tools", "reasons"),
    [
        ("{{ tools }} within <tool_call></tool_call>", HERMES, False),
        ("<tool_call> {% if '</think>' in content %}", HERMES, True),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS] [", MISTRAL, False),
        ("[TOOL_CALLS]{{ name }}", MISTRAL_NAMED, False),
        ("[TOOL_CALLS]{{ name }}[ARGS]", MISTRAL_ARGS, False),
        ("<|python_tag|> <|eot_id|>", LLAMA3_JSON, False),
        ('<|eot_id|> {"name": x, "parameters": y}', LLAMA3_JSON, False),
        ("<|im_start|>", JSON, False),
        (None, JSON, False),
    ],
)
def test_formats_follow_from_the_template(
    template: str | None, tools: ToolFormat, reasons: bool
) -> None:
    assert detect_tool_format(template) is tools
    assert (detect_reasoning_format(template) is not None) == reasons


def random_answer(chance: random.Random) -> str:
    """Marks, calls, pieces of calls and text in any order."""
    pieces = [
        *("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "add"),
        *(CALL, CALL[:40], CALL[40:], '{"name": "greet", "arguments": {"who": "A\nB"}}', "{", "}"),
        *("[", "]", ",", ";", '"', "\\", "\n", " ", "  \n", "text", "<", "</", "é😀", "x" * 20),
        *("<|python_tag|>", '{"name": "add"}', '{"parameters": {}, "name": "add"}', "12", ":"),
    ]
    return "".join(chance.choice(pieces) for _ in range(chance.randint(0, 14)))


@pytest.mark.parametrize("format", [HERMES, LLAMA3_JSON, MISTRAL, JSON])
def test_pieces_do_not_matter_and_nothing_is_lost(format: ToolFormat) -> None:
    """Random answers in random pieces: one result, and every letter of it from the text."""
    for seed in range(400):
        chance = random.Random(seed)
        text = random_answer(chance)
        state = chance.choice([None, *ReasoningState])
        reasoning, content, calls = read_cuts(text, format, state, chance)
        for call in calls:
            assert call[0] in NAMES
        for letter in ("é😀", "x" * 20, "text"):
            found = sum(part.count(letter) for part in (reasoning, content, *dict(calls).values()))
            assert found <= text.count(letter)
        if not calls:
            assert squeezed(reasoning + content) == squeezed(text)


def squeezed(text: str) -> str:
    """Without white space and marks of reasoning."""
    return "".join(text.replace("<think>", "").replace("</think>", "").split())


def read_cuts(
    text: str, format: ToolFormat, state: ReasoningState | None, chance: random.Random
) -> tuple[str, str, list[tuple[str, str]]]:
    whole = plain(joined(parse(make_parser(format, state), [text])))
    for pieces in (
        list(text),
        cut(text, chance.randint(0, 10**9)),
        cut(text, chance.randint(0, 99)),
    ):
        parts = parse(make_parser(format, state), pieces)
        assert plain(joined(parts)) == whole, pieces
        starts = [part.index for part in parts if isinstance(part, CallStart)]
        assert starts == list(range(len(starts)))
    return whole


def test_json_scanner_agrees_with_the_decoder() -> None:
    """Valid objects and arrays end where they end; broken ones never count as complete."""
    chance = random.Random(5)
    alphabet = '{}[]:,"\\ \n0123-+.eEtrufalsn/xu'
    values = ['{"a": [1, -2.5e+3, true, {"b": "\\u12aB\\n"}], "": null}', "[]", "{}", "[[], {}]"]
    for _ in range(4000):
        text = chance.choice(values)
        for _ in range(chance.randint(0, 2)):
            at = chance.randrange(len(text))
            text = text[:at] + chance.choice(alphabet) + text[at + chance.randint(0, 1) :]
        try:
            value = json.loads(text, strict=False, parse_constant=lambda name: 1 / 0)
            is_valid = isinstance(value, dict | list)
        except (ValueError, ZeroDivisionError):
            is_valid = False
        assert scan(text) == is_valid, text


def scan(text: str) -> bool:
    scanner = JsonScanner()
    stripped = text.rstrip(" \n")
    for char in stripped:
        if scanner.is_complete or not scanner.step(char):
            return False
    return scanner.is_complete
