"""Requests that wait for their grammars to be compiled."""

from __future__ import annotations

from concurrent.futures import Future

from caudal.engine.messages import EngineRequest
from caudal.engine.preparation import Preparations
from caudal.errors import InvalidRequestError
from caudal.sampling_params import SamplingParams, StructuredOutputsParams
from caudal.structured_output.limits import COMPILE_TIMEOUT_S

SAMPLING = SamplingParams(structured_outputs=StructuredOutputsParams(regex="[a-z]+"))


def request_of(request_id: str) -> EngineRequest:
    return EngineRequest(request_id=request_id, prompt_token_ids=[1], sampling=SAMPLING)


def test_request_that_waits_for_its_grammar_does_not_hold_up_others() -> None:
    now = 0.0
    preparations = Preparations(lambda: now)
    slow: Future[None] = Future()
    fast: Future[None] = Future()
    preparations.add([request_of("slow"), request_of("twin")], [slow])
    preparations.add([request_of("fast")], [fast])
    fast.set_result(None)
    ready, refusals = preparations.take()
    assert [[each.request_id for each in group] for group in ready] == [["fast"]]
    assert not refusals
    assert [each.request_id for each in preparations.discard(["twin", "unknown"])] == ["twin"]
    slow.set_result(None)
    ready, _ = preparations.take()
    assert [each.request_id for each in ready[0]] == ["slow"]
    assert not preparations


def test_grammar_that_fails_or_takes_too_long_is_refused() -> None:
    now = 0.0
    preparations = Preparations(lambda: now)
    failed: Future[None] = Future()
    failed.set_exception(InvalidRequestError("where: why", code="invalid_json_schema"))
    broken: Future[None] = Future()
    broken.set_exception(RuntimeError("internal text"))
    preparations.add([request_of("failed")], [failed])
    preparations.add([request_of("broken")], [broken])
    preparations.add([request_of("endless")], [Future()])
    _, refusals = preparations.take()
    assert [(each.request_id, each.code) for each in refusals] == [
        ("failed", "invalid_json_schema"),
        ("broken", "invalid_value"),
    ]
    assert "internal" not in refusals[1].message
    now = COMPILE_TIMEOUT_S + 0.1
    _, refusals = preparations.take()
    assert [each.request_id for each in refusals] == ["endless"]
    assert refusals[0].retry_after_s is None
    assert refusals[0].param == "structured_outputs"
