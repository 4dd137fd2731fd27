"""Streamed text must add up to the whole text, and nothing of a stop string may slip out."""

from __future__ import annotations

import random
import time

import pytest

from caudal.tokenizer import IncrementalDetokenizer, Tokenizer
from tests.tiny_vocabulary import bpe_metadata, spm_metadata
from tests.tokenizer.naive import random_text

BPE = Tokenizer.from_gguf_metadata(bpe_metadata("smollm"))
SPM = Tokenizer.from_gguf_metadata(spm_metadata())


def first_stop(text: str, stop: list[str]) -> tuple[str, str | None]:
    """By definition: read letter by letter until the text ends with a stop string."""
    for end in range(len(text) + 1):
        ending = [s for s in stop if text[:end].endswith(s)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def stream(
    detokenizer: IncrementalDetokenizer, ids: list[int], rng: random.Random
) -> tuple[list[str], str | None, int]:
    """Push `ids` in random portions; (texts, stopped_by, tokens used)."""
    texts, used = [], 0
    while True:
        count = rng.choice([1, 1, 1, 2, 5])
        portion, ids = ids[:count], ids[count:]
        delta = detokenizer.push(portion, final=not ids)
        texts.append(delta.text)
        used += delta.num_tokens_used
        if delta.stopped_by is not None or not ids:
            return texts, delta.stopped_by, used


@pytest.mark.parametrize("tokenizer", [BPE, SPM], ids=["bpe", "spm"])
@pytest.mark.parametrize("skip_special", [True, False])
def test_deltas_add_up_to_the_decoded_text(tokenizer: Tokenizer, skip_special: bool) -> None:
    rng = random.Random(7)
    for _ in range(300):
        # Random ids give broken characters and special tokens anywhere.
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randint(0, 30))]
        if rng.random() < 0.5:
            ids = tokenizer.encode(random_text(rng), add_bos=False)
        detokenizer = IncrementalDetokenizer(tokenizer, skip_special=skip_special)
        texts, stopped_by, used = stream(detokenizer, ids, rng)
        assert "".join(texts) == tokenizer.decode(ids, skip_special=skip_special)
        assert (stopped_by, used) == (None, len(ids))
        "".join(texts).encode()


def test_no_replacement_character_is_sent_while_a_character_can_complete() -> None:
    ids = BPE.encode("a👩\u200d👩\u200d👧\u200d👦b")
    assert len(ids) > 20
    detokenizer = IncrementalDetokenizer(BPE)
    texts = [detokenizer.push([token_id]).text for token_id in ids]
    assert "\ufffd" not in "".join(texts)
    assert [t for t in texts if t] == ["a", *"👩\u200d👩\u200d👧\u200d👦", "b"]


def test_unfinished_character_becomes_one_replacement_at_the_end() -> None:
    ids = BPE.encode("x🚀")[:-1]
    detokenizer = IncrementalDetokenizer(BPE)
    assert detokenizer.push(ids).text == "x"
    assert detokenizer.push([], final=True).text == "\ufffd"


@pytest.mark.parametrize("tokenizer", [BPE, SPM], ids=["bpe", "spm"])
@pytest.mark.parametrize("include_stop", [False, True])
def test_stop_strings_end_text_as_if_read_letter_by_letter(
    tokenizer: Tokenizer, include_stop: bool
) -> None:
    rng = random.Random(8)
    num_stopped = 0
    for _ in range(600):
        text = "".join(rng.choice(["a", "b", "ab", "é", "😊", "the river"]) for _ in range(12))
        stop = ["".join(rng.choice("aabbé😊r ") for _ in range(rng.randint(1, 4)))]
        stop += [text[i : i + rng.randint(1, 9)] for i in rng.sample(range(len(text)), 2)]
        stop = [s for s in stop if s] if rng.random() < 0.8 else ["aaaab", "aab b"]
        ids = tokenizer.encode(text, add_bos=False)
        detokenizer = IncrementalDetokenizer(tokenizer, stop=stop, include_stop=include_stop)
        texts, stopped_by, used = stream(detokenizer, ids, rng)
        expected, expected_stop = first_stop(text, stop)
        if include_stop and expected_stop is not None:
            expected += expected_stop
        assert ("".join(texts), stopped_by) == (expected, expected_stop), (text, stop)
        num_stopped += stopped_by is not None
        if stopped_by is not None and used > 1:
            # One token less does not hold the stop string yet.
            assert first_stop(tokenizer.decode(ids[: used - 1]), stop)[1] is None
    assert num_stopped > 200


def test_no_letter_of_a_stop_string_across_tokens_is_sent() -> None:
    detokenizer = IncrementalDetokenizer(BPE, stop=["DEFGHIJ"])
    texts = [detokenizer.push([token_id]) for token_id in BPE.encode("ABCDEFGHIJK")]
    assert "".join(delta.text for delta in texts) == "ABC"
    assert texts[9].stopped_by == "DEFGHIJ"
    assert texts[10] == ("", "DEFGHIJ", 0)


def test_stop_string_may_begin_inside_a_token() -> None:
    detokenizer = IncrementalDetokenizer(BPE, stop=["own fox"])
    ids = BPE.encode("The quick brown fox jumps")
    texts, stopped_by, _ = stream(detokenizer, ids, random.Random(1))
    assert ("".join(texts), stopped_by) == ("The quick br", "own fox")


def test_near_miss_is_released_as_soon_as_it_cannot_match() -> None:
    detokenizer = IncrementalDetokenizer(BPE, stop=["\n\nUser:"])
    texts = [detokenizer.push([token_id]).text for token_id in BPE.encode("a\n\nUsx")]
    assert [text for text in texts if text] == ["a", "\n\nUsx"]
    assert texts[-1] == "\n\nUsx"


def test_text_without_a_prefix_of_a_stop_string_is_not_delayed() -> None:
    detokenizer = IncrementalDetokenizer(BPE, stop=["zebra", "###"])
    for token_id in BPE.encode("the people of the town come to the river"):
        assert detokenizer.push([token_id]).text == BPE.token_text(token_id)


def test_held_text_is_released_at_the_end() -> None:
    detokenizer = IncrementalDetokenizer(BPE, stop=["river bank"])
    ids = BPE.encode("the river b")
    before = detokenizer.push(ids).text
    assert before == "the "
    assert detokenizer.push([], final=True).text == "river b"


def test_stop_strings_do_not_count_within_the_first_min_tokens() -> None:
    ids = BPE.encode("ababab")
    assert len(ids) == 6
    detokenizer = IncrementalDetokenizer(BPE, stop=["b"], min_tokens=3)
    texts, stopped_by, used = stream(detokenizer, ids, random.Random(2))
    assert ("".join(texts), stopped_by, used) == ("aba", "b", 4)


def test_tokens_after_the_stop_in_one_push_are_not_counted() -> None:
    ids = BPE.encode("abcd")
    delta = IncrementalDetokenizer(BPE, stop=["b"]).push(ids)
    assert delta == ("a", "b", 2)


def test_leading_space_of_sentencepiece_is_kept_when_text_continues_a_prompt() -> None:
    ids = SPM.encode("the river", add_bos=False)
    assert IncrementalDetokenizer(SPM).push(ids, final=True).text == "the river"
    continued = IncrementalDetokenizer(SPM, initial_ids=SPM.encode("by"))
    assert continued.push(ids, final=True).text == " the river"
    after_bos = IncrementalDetokenizer(SPM, initial_ids=[1])
    assert after_bos.push(ids, final=True).text == "the river"


def test_cost_per_token_does_not_grow_with_the_text() -> None:
    ids = BPE.encode("the river and the town " * 4000)
    detokenizer = IncrementalDetokenizer(BPE, stop=["zebra", "the river was"])
    times = []
    for _ in range(2):
        started = time.perf_counter()
        for token_id in ids[: len(ids) // 2]:
            detokenizer.push([token_id])
        times.append(time.perf_counter() - started)
    assert times[1] < 3 * times[0] + 0.05
