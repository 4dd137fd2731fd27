"""The terminal conversation: turns, commands, interruptions and failures."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from caudal.cli.conversation import Conversation, Message, Reply, Sampling
from caudal.errors import CaudalError


class ScriptedModel:
    """Answers with prepared pieces; an exception among them is raised there."""

    name = "scripted"

    def __init__(self, *answers: list[str | BaseException]) -> None:
        self._answers = list(answers)
        self.asked: list[list[Message]] = []
        self.num_closed = 0

    def stream(self, messages: list[Message], sampling: Sampling, reply: Reply) -> Iterator[str]:
        self.asked.append([dict(m) for m in messages])
        try:
            for piece in self._answers.pop(0):
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
            reply.num_tokens, reply.finish_reason = 7, "stop"
        finally:
            self.num_closed += 1

    def close(self) -> None:
        pass


def lines(*texts: str | BaseException) -> Callable[[], str]:
    pending = [*texts, EOFError()]

    def read() -> str:
        item = pending.pop(0)
        if isinstance(item, BaseException):
            raise item
        return item

    return read


def test_second_turn_sees_the_first_and_the_system_message() -> None:
    model = ScriptedModel(["Hel", "lo"], ["Bye"])
    Conversation(model, Sampling(), "Be brief.").run(lines("hi", "", "and now?"))
    assert model.asked[1] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "and now?"},
    ]


def test_answer_is_printed_as_it_comes_with_its_speed(capsys: pytest.CaptureFixture[str]) -> None:
    Conversation(ScriptedModel(["Hel", "lo"]), Sampling(), None).run(lines("hi"))
    said = capsys.readouterr().out
    assert said.startswith("Hello\n[7 tokens, ")
    assert "tok/s" in said


def test_clear_forgets_the_turns_but_not_the_system_message() -> None:
    model = ScriptedModel(["a"], ["b"])
    Conversation(model, Sampling(), "S").run(lines("one", "/clear", "two"))
    assert [m["content"] for m in model.asked[1]] == ["S", "two"]


def test_exit_ends_before_the_next_line() -> None:
    model = ScriptedModel(["a"])
    Conversation(model, Sampling(), None).run(lines("/exit", "never asked"))
    assert model.asked == []


def test_unknown_command_shows_help_and_asks_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    model = ScriptedModel()
    Conversation(model, Sampling(), None).run(lines("/halp"))
    assert model.asked == []
    assert "/clear" in capsys.readouterr().out


def test_interrupt_stops_the_answer_not_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    model = ScriptedModel(["par", "tial", KeyboardInterrupt()], ["next"])
    Conversation(model, Sampling(), None).run(lines("first", KeyboardInterrupt(), "second"))
    assert model.asked[1][1] == {"role": "assistant", "content": "partial"}
    assert model.num_closed == 2
    assert "stopped" in capsys.readouterr().out


def test_failed_turn_is_reported_and_forgotten(capsys: pytest.CaptureFixture[str]) -> None:
    model = ScriptedModel([CaudalError("too long")], ["fine"])
    Conversation(model, Sampling(), None).run(lines("long", "short"))
    assert [m["content"] for m in model.asked[1]] == ["short"]
    assert "caudal: too long" in capsys.readouterr().err


def test_only_chosen_sampling_fields_are_sent() -> None:
    assert Sampling().as_fields() == {}
    assert Sampling(temperature=0.0, seed=3).as_fields() == {"temperature": 0.0, "seed": 3}
