"""The dashboard in a real browser over a real server on loopback, with a scripted engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from caudal.config import ServerConfig
from caudal.diagnosis.report import (
    Diagnosis,
    Evidence,
    Finding,
    PastSummary,
    Prediction,
    Remedy,
    WorstHour,
)
from caudal.errors import NotFoundError
from caudal.server.diagnosis import Practice
from caudal.server.routes import dashboard
from tests.dashboard.browser import Page, chromium, find_chromium
from tests.server.harness import MODEL, Served, Setup, on_loopback

CHROMIUM = find_chromium()
KEY = "a key of some length"

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
needs_bundle = pytest.mark.skipif(
    not (dashboard.BUNDLE / "index.html").exists(), reason="no bundle (make dashboard)"
)
pytestmark = [needs_browser]


@contextlib.asynccontextmanager
async def opened(
    data_dir: Path, setup: Setup | None = None, **config: Any
) -> AsyncIterator[tuple[Served, Page]]:
    """A server and its dashboard, which may neither complain nor ask anybody else."""
    assert CHROMIUM is not None
    setup = setup or Setup(answer=[5] * 1000, step_s=0.02, max_model_len=2048)
    setup.config = ServerConfig(port=0, data_dir=data_dir, **config)
    async with on_loopback(setup) as served, chromium(CHROMIUM) as page:
        url = f"http://127.0.0.1:{served.port}"
        try:
            await page.resize(1280, 900)
            await page.open(f"{url}/dashboard")
            yield served, page
            assert page.complaints == []
            assert [u for u in page.urls if not u.startswith((url, "data:"))] == []
        finally:
            await served.state.close_recorder()


@contextlib.asynccontextmanager
async def long_request(served: Served) -> AsyncIterator[None]:
    """One that runs until the context ends, then is given up."""
    task = asyncio.create_task(served.complete(max_tokens=900, ignore_eos=True))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def look_again(page: Page) -> None:
    """Ask for another diagnosis, when the one under way is there."""
    await page.wait_for("document.querySelector('#doctor-again:not([aria-disabled])') != null")
    await page.evaluate("document.getElementById('doctor-again').click()")


def text_of(element_id: str) -> str:
    return f"document.getElementById('{element_id}').textContent"


def tile(title: str) -> str:
    """Script: the value of a tile."""
    return (
        "[...document.querySelectorAll('.tile')].find("
        f"t => t.querySelector('h2').textContent === '{title}').querySelector('.value').textContent"
    )


@needs_bundle
async def test_numbers_come_and_follow_what_runs(tmp_path: Path) -> None:
    async with opened(tmp_path) as (served, page):
        await page.wait_for(f"{text_of('uptime')}.startsWith('ready')")
        assert await page.evaluate(text_of("model-name")) == MODEL
        assert await page.evaluate(tile("Running")) == "0"
        assert "llama" in await page.evaluate(text_of("facts"))
        assert await page.evaluate("document.querySelectorAll('.chart canvas').length") == 9

        async with long_request(served):
            await page.wait_for(f"{tile('Running')} === '1'")
            rows = "document.querySelectorAll('#requests-body .state.decode').length"
            await page.wait_for(f"{rows} === 1")
            output = "document.querySelector('#requests-body td:nth-child(6)').textContent"
            before = await page.evaluate(output)
            await page.wait_for(f"{output} !== {json.dumps(before)}")
            await page.wait_for(f"parseFloat({tile('Output')}) > 0")
        await page.wait_for(f"{tile('Running')} === '0'")
        await page.wait_for(f"{tile('First token (p95)')}.endsWith('s')")


@needs_bundle
async def test_history_is_drawn_with_its_targets(tmp_path: Path) -> None:
    async with opened(tmp_path) as (served, page):
        served.engine.info.settings = {"ttft_ms": 500.0, "tpot_ms": None}
        for _ in range(3):
            await served.complete(max_tokens=3)
        for window in ("1h", "24h", "7d", "30d"):
            await page.evaluate(f"document.getElementById('window-{window}').click()")
            label = "document.querySelector('.plot').getAttribute('aria-label')"
            await page.wait_for(f"/p50 [\\d.]+ m?s, .* m?s, .* m?s/.test({label})")
        assert "target 500 ms" in await page.evaluate(label)
        shown = "[...document.querySelectorAll('.dashes')].filter(e => e.checkVisibility()).length"
        assert await page.evaluate(shown) == 1, "there is no other target"
        await page.evaluate("document.querySelector('.plot').focus()")
        await page.press("ArrowLeft", 37)
        time = "[...document.querySelectorAll('.chart-time')].every(e => /:/.test(e.textContent))"
        assert await page.evaluate(time), "all charts show the same moment"


@needs_bundle
async def test_findings_are_shown_with_their_evidence_and_predicted_gains(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    remedy = Remedy(
        action="quantise_kv",
        flag="--kv-cache-dtype int8",
        cost="quality",
        predicted=Prediction("ttft_p95_ms", 8200.0, 3100.0, 62.2),
        text="Quantise the <KV> cache.",
    )
    evidence = Evidence("ttft_climb", 0.9, 0.5, "It climbed for 11 minutes.")
    finding = Finding("capacity", "Too much load", "critical", [evidence], [remedy])
    given = [Diagnosis([finding], 812, 1800.0), Diagnosis([], 900, 1900.0)]

    async def diagnose(*_: object) -> Diagnosis:
        return given.pop(0)

    monkeypatch.setattr(Practice, "diagnose", diagnose)
    async with opened(tmp_path) as (_, page):
        await page.wait_for("document.querySelector('.finding') != null")
        told = await page.evaluate("document.getElementById('doctor').innerText")
        for part in (
            *("from 812 requests in 30 min", "Too much load", "It climbed for 11 minutes."),
            *("Quantise the <KV> cache.", "--kv-cache-dtype int8", "costs quality"),
            "predicted TTFT p95: 8.2 s → 3.1 s, better by 62.2 %",
        ):
            assert part in told, part
        await look_again(page)
        await page.wait_for(f"{text_of('findings')}.includes('Nothing limits')")


@needs_bundle
async def test_the_history_is_diagnosed_when_somebody_asks_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hour = WorstHour(
        start=1_700_000_400,
        num_requests=400,
        num_refused=34,
        ttft_p95_ms=12_400.0,
        queue_depth=17.0,
        kv_used=0.4,
        load=1.3,
    )
    asked: list[int | None] = []

    async def diagnose(_: Practice, seconds: float | None, last_s: int | None) -> Diagnosis:
        assert seconds is None
        asked.append(last_s)
        if last_s is None:
            return Diagnosis([], 9, 60.0)
        if last_s > 86_400:
            raise NotFoundError("This server keeps no history.", code="history_off")
        past = PastSummary(
            seconds=last_s,
            observed_s=7200.0,
            num_busy_minutes=99,
            worst_hour=hour,
            note="It cannot tell.",
        )
        return Diagnosis([], 812, 86_400.0, past=past)

    choose = (
        "(value => {{ const e = document.getElementById('doctor-window');"
        " e.value = value; e.dispatchEvent(new Event('change')); }})('{}')"
    )
    monkeypatch.setattr(Practice, "diagnose", diagnose)
    async with opened(tmp_path) as (_, page):
        await page.wait_for(f"{text_of('findings')}.includes('Nothing limits')")
        assert not await page.evaluate("document.getElementById('doctor-past').checkVisibility()")
        await page.evaluate(choose.format("24h"))
        await page.wait_for(f"{text_of('doctor-past')}.includes('Worst hour')")
        told = await page.evaluate("document.getElementById('doctor').innerText")
        for part in ("812 requests in 2 h", "400 requests, 34 refused, TTFT p95 12 s, load 130 %"):
            assert part in told, told
        assert "It cannot tell." in told
        await page.evaluate(choose.format("7d"))
        await page.wait_for(f"{text_of('doctor-note')}.includes('keeps no history')")
        assert not await page.evaluate("document.getElementById('doctor-past').checkVisibility()")
        page.complaints.clear()
    assert asked[:3] == [None, 86_400, 7 * 86_400]


@needs_bundle
async def test_both_themes_have_colours_on_page_and_charts(tmp_path: Path) -> None:
    async with opened(tmp_path) as (_, page):
        await page.wait_for("document.querySelector('.swatch') != null")
        seen = set()
        for theme in ("light", "dark"):
            await page.evaluate(f"document.documentElement.dataset.theme = '{theme}'")
            style = "getComputedStyle(document.body)"
            seen.add(await page.evaluate(f"{style}.backgroundColor + {style}.color"))
            swatch = "getComputedStyle(document.querySelector('.swatch')).backgroundColor"
            assert await page.evaluate(swatch) not in ("", "rgba(0, 0, 0, 0)")
        assert len(seen) == 2


@needs_bundle
async def test_prompts_that_changed_early_are_shown_with_what_changed(tmp_path: Path) -> None:
    text = "and the rest of the prompt is always the same long text about a river. " * 8
    async with opened(tmp_path) as (served, page):
        for number in range(4):
            await served.complete(prompt=f"Request {number}: {text}", max_tokens=2)
        report = (await served.http.get("/caudal/prefixes")).json()
        assert report["patterns"], report
        await look_again(page)
        changed = report["patterns"][0]["changed"].strip()
        await page.wait_for(f"{text_of('prefixes')}.includes({changed!r})")
        assert await page.evaluate("document.querySelector('#prefixes code') != null")
        told = await page.evaluate("document.getElementById('prefixes').innerText")
        assert "computed again" in told


@needs_bundle
async def test_playground_streams_stops_and_sends_its_settings(tmp_path: Path) -> None:
    async with opened(tmp_path) as (served, page):
        await page.evaluate("document.getElementById('to-playground').click()")
        await page.evaluate(
            "document.getElementById('chat-system').value = 'Speak as a river.';"
            "document.getElementById('chat-temperature').value = 1.3;"
            "document.getElementById('chat-max-tokens').value = 7;"
            "document.getElementById('chat-input').focus()"
        )
        await page.write("How deep are you?")
        await page.press("Enter", 13)
        note = "document.querySelector('.message.assistant:last-child .note')?.textContent ?? ''"
        await page.wait_for(f"({note}).includes('7 tokens')")
        told = await page.evaluate(note)
        assert "first token" in told
        assert "tok/s" in told
        assert "cut off" in told
        request = served.engine.accepted[-1]
        prompt = served.tokenizer.decode(request.prompt_token_ids)
        assert "Speak as a river." in prompt
        assert "How deep are you?" in prompt
        assert request.sampling.temperature == pytest.approx(1.3)

        await page.evaluate("document.getElementById('chat-max-tokens').value = 300")
        await page.write("And how long?")
        await page.press("Enter", 13)
        said = "document.querySelector('.message.assistant:last-child .said').textContent.length"
        await page.wait_for(f"{said} > 3")
        await page.evaluate("document.getElementById('chat-stop').click()")
        await page.wait_for(f"({note}).includes('stopped')")
        async with asyncio.timeout(5):
            while served.engine.stats.num_running:
                await asyncio.sleep(0.01)
        prompt = served.tokenizer.decode(served.engine.accepted[-1].prompt_token_ids)
        assert "How deep are you?" in prompt, "earlier turns are sent again"
        assert await page.evaluate("document.activeElement.id") == "chat-input"


@needs_bundle
async def test_text_of_models_and_users_is_never_markup(tmp_path: Path) -> None:
    evil = "<img src=x onerror=alert(1)><b>x</b>"
    async with opened(tmp_path, Setup(answer=evil)) as (_, page):
        await page.evaluate("location.hash = 'playground'")
        await page.wait_for("!document.getElementById('playground').hidden")
        await page.evaluate("document.getElementById('chat-input').focus()")
        await page.write(evil)
        await page.press("Enter", 13)
        await page.wait_for("document.querySelector('.note')?.textContent.includes('token')")
        assert (
            await page.evaluate("document.querySelectorAll('#chat-log img, #chat-log b').length")
            == 0
        )
        said = await page.evaluate(
            "[...document.querySelectorAll('.said')].map(e => e.textContent)"
        )
        assert said == [evil, evil]


@needs_bundle
async def test_a_refused_message_is_explained_and_may_be_sent_again(tmp_path: Path) -> None:
    async with opened(tmp_path) as (_, page):
        await page.evaluate("location.hash = 'playground'")
        await page.evaluate("document.getElementById('chat-input').focus()")
        await page.write("x" * 30_000)
        await page.press("Enter", 13)
        note = "document.querySelector('.failed .note')?.textContent ?? ''"
        await page.wait_for(f"({note}).includes('failed: ')")
        assert "tokens" in await page.evaluate(note)
        await page.write("short")
        await page.press("Enter", 13)
        await page.wait_for(
            "document.querySelector('.message.assistant:last-child .said').textContent"
        )
        page.complaints = [c for c in page.complaints if "status of 400" not in c]


@needs_bundle
@pytest.mark.parametrize("width", [390, 320])
async def test_phones_need_no_sideways_scrolling(tmp_path: Path, width: int) -> None:
    async with opened(tmp_path) as (served, page):
        await page.resize(width, 844, is_mobile=True)
        async with long_request(served):
            await page.wait_for("document.querySelector('#requests-body .state') != null")
            for view in ("overview", "playground"):
                await page.evaluate(f"location.hash = '{view}'")
                await page.wait_for(f"!document.getElementById('{view}').hidden")
                widths = "[document.documentElement.scrollWidth, document.body.scrollWidth]"
                assert max(await page.evaluate(widths)) <= width, view


@needs_bundle
@pytest.mark.parametrize("view", ["overview", "playground"])
async def test_tab_reaches_every_control(tmp_path: Path, view: str) -> None:
    async with opened(tmp_path) as (_, page):
        await page.evaluate(f"location.hash = '{view}'")
        await page.wait_for(f"!document.getElementById('{view}').hidden")
        await page.wait_for(f"{text_of('uptime')}.startsWith('ready')")
        if view == "overview":  # a button that appears on the way is never passed
            button = "document.getElementById('doctor-again')"
            await page.wait_for(f"{button}.checkVisibility() && !{button}.ariaDisabled")
        await page.evaluate(
            "window.seen = new Set(); document.body.focus();"
            "document.addEventListener('focusin', e => window.seen.add(e.target))"
        )
        for _ in range(40):
            await page.press("Tab", 9)
        # Of a group of radio buttons one has the focus; the arrow keys go to the others.
        missed = await page.evaluate(
            "[...document.querySelectorAll('a, button, input, textarea, [tabindex=\"0\"]')]"
            ".filter(e => e.checkVisibility() && !e.disabled && !window.seen.has(e)"
            " && !(e.type === 'radio' && !e.checked)).map(e => e.outerHTML.slice(0, 80))"
        )
        assert missed == []
        nameless = await page.evaluate(
            "[...window.seen].filter(e => !(e.ariaLabel || e.textContent.trim() || e.title"
            " || e.labels?.length || e.getAttribute('aria-labelledby')))"
            ".map(e => e.outerHTML.slice(0, 80))"
        )
        assert nameless == []


@needs_bundle
async def test_colours_follow_the_system_until_they_are_chosen(tmp_path: Path) -> None:
    async with opened(tmp_path) as (_, page):
        background = "getComputedStyle(document.body).backgroundColor"
        await page.prefer("dark")
        dark = await page.evaluate(background)
        await page.prefer("light")
        assert await page.evaluate(background) != dark
        for _ in range(2):
            await page.evaluate("document.getElementById('theme').click()")
        assert await page.evaluate(background) == dark
        await page.call("Page.reload")
        await page.wait_for("document.documentElement.dataset.theme === 'dark'")
        assert await page.evaluate(background) == dark


@needs_bundle
async def test_key_is_asked_for_checked_and_kept_in_the_tab_only(tmp_path: Path) -> None:
    async with opened(tmp_path, api_keys=(KEY,)) as (_, page):
        await page.wait_for("document.getElementById('key-dialog').open")
        assert await page.evaluate("document.activeElement.id") == "key-input"
        await page.write("wrong")
        await page.press("Enter", 13)
        await page.wait_for("document.getElementById('key-message').textContent.includes('Wrong')")
        await page.evaluate("document.getElementById('key-input').value = ''")
        await page.write(KEY)
        await page.evaluate("document.getElementById('key-form').requestSubmit()")
        await page.wait_for(f"{text_of('uptime')}.startsWith('ready')")
        assert not await page.evaluate("document.getElementById('key-dialog').open")
        assert await page.evaluate("document.getElementById('banner').hidden")
        assert KEY not in await page.evaluate("JSON.stringify(localStorage) + document.cookie")
        page.complaints = [c for c in page.complaints if "status of 401" not in c]


@needs_bundle
async def test_a_server_that_went_away_is_told_and_found_again(tmp_path: Path) -> None:
    async with opened(tmp_path) as (_, page):
        await page.wait_for(f"{text_of('uptime')}.startsWith('ready')")
        offline = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
        await page.call("Network.emulateNetworkConditions", **offline)
        await page.wait_for("!document.getElementById('banner').hidden")
        assert await page.evaluate(text_of("uptime")) == "unreachable"
        offline |= {"offline": False, "downloadThroughput": -1, "uploadThroughput": -1}
        await page.call("Network.emulateNetworkConditions", **offline)
        await page.wait_for("document.getElementById('banner').hidden")
        page.complaints = [c for c in page.complaints if "ERR_INTERNET_DISCONNECTED" not in c]


async def test_plain_page_shows_the_same_numbers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(dashboard, "BUNDLE", tmp_path / "absent")
    async with opened(tmp_path) as (served, page):
        await page.wait_for("document.body.innerText.includes('queue · running')")
        assert MODEL in await page.evaluate("document.body.innerText")
        async with long_request(served):
            await page.wait_for("/queue · running\\s+1\\s/.test(document.body.innerText)")
