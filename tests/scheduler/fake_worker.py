"""A worker without a model: it checks every step and tags each KV slot with what it holds."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

from caudal.sampling_params import SamplingParams
from caudal.scheduler.step_cost import guess_reads, prompt_reads
from caudal.step_io import (
    CachedRequestData,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
    TokenLogprobs,
)

VOCAB_SIZE = 50
EOG = frozenset({1, 2})


@dataclass
class WorkerLimits:
    max_num_batched_tokens: int
    max_num_seqs: int
    max_num_logits: int
    max_model_len: int


@dataclass
class Row:
    """A request as a worker keeps it, from the messages alone."""

    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int
    block_ids: list[int]
    num_computed_tokens: int
    tags: list[int] = field(default_factory=list)
    """Per known token: a hash of namespace, all tokens up to it, and so its position."""

    def extend_tags(self, root: int) -> None:
        while len(self.tags) < len(self.token_ids):
            before = self.tags[-1] if self.tags else root
            self.tags.append(hash((before, self.token_ids[len(self.tags)])))

    def next_token(self) -> int:
        """What the row samples after all it knows."""
        num_output = len(self.token_ids) - self.num_prompt_tokens
        return sample(self.tags[-1], self.seed, num_output, self.sampling)


def root_tag(namespace: str) -> int:
    return zlib.crc32(namespace.encode()) + 1


def sample(tag: int, seed: int, num_output: int, sampling: SamplingParams) -> int:
    """The token that follows the prefix `tag`; as a sampler, it masks stops before min_tokens."""
    attempt = 0
    while True:
        token_id = hash((tag, seed, attempt)) % VOCAB_SIZE
        is_stop = token_id in sampling.stop_token_ids or (
            token_id in EOG and not sampling.ignore_eos
        )
        if not is_stop or num_output >= sampling.min_tokens:
            return token_id
        attempt += 1


@dataclass
class Expected:
    token_ids: list[int]
    finish_reason: str


def expected_output(
    prompt: list[int], namespace: str, sampling: SamplingParams, seed: int, max_model_len: int
) -> Expected:
    """What a request must produce, whatever else runs: one token after another."""
    row = Row(list(prompt), len(prompt), sampling, seed, [], 0)
    max_total = min(len(prompt) + sampling.max_tokens, max_model_len)
    stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else EOG)
    output: list[int] = []
    while len(row.token_ids) < max_total:
        row.extend_tags(root_tag(namespace))
        token_id = sample(row.tags[-1], seed, len(output), sampling)
        row.token_ids.append(token_id)
        output.append(token_id)
        if token_id in stops and len(output) > sampling.min_tokens:
            return Expected(output, "stop")
    return Expected(output, "length")


class FakeWorker:
    """Runs SchedulerOutputs; any inconsistency is an AssertionError.

    Slots keep their tags after a block is freed, so a block that is reused too early or a
    prefix hit on the wrong content shows as a wrong tag when a row reads its context.
    """

    def __init__(self, num_blocks: int, block_size: int, limits: WorkerLimits) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.limits = limits
        self.rows: dict[str, Row] = {}
        self.namespaces: dict[str, str] = {}
        """Request id -> namespace, which the messages do not carry."""
        self.failing: dict[str, str] = {}
        self.slots: list[int | None] = [None] * (num_blocks * block_size)
        self.num_computed_in_all = 0
        self.draft_accuracy = 0.0
        """Share of guessed tokens that are right; 0: nothing is guessed."""
        self.interrupts: Callable[[], bool] = lambda: False
        """Whether the next step that may be interrupted is."""

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        for request_id in output.finished_request_ids:
            assert self.rows.pop(request_id, None) is not None, f"{request_id} has no row"
        for new in output.new_requests:
            self._add(new)
        for cached in output.cached_requests:
            self._update(cached)
        self._check_shape(output)
        owners: dict[int, int] = {}
        for row in self.rows.values():
            for block_id in row.block_ids:
                owners[block_id] = owners.get(block_id, 0) + 1
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            drafts = output.draft_token_ids.get(request_id, [])
            self._write(request_id, num_tokens, drafts, owners)
        if output.is_interruptible and self.interrupts():
            for request_id, num_tokens in output.num_scheduled_tokens.items():
                start = self.rows[request_id].num_computed_tokens
                for position in range(start, start + num_tokens):
                    self.slots[self._slot(self.rows[request_id], position)] = None
            return ModelRunnerOutput(is_interrupted=True)
        result = ModelRunnerOutput()
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            drafts = output.draft_token_ids.get(request_id, [])
            self._read(request_id, num_tokens, drafts, result)
        return result

    def _add(self, new: NewRequestData) -> None:
        assert new.request_id not in self.rows
        row = Row(
            list(new.token_ids),
            new.num_prompt_tokens,
            new.sampling,
            new.seed,
            list(new.block_ids),
            new.num_computed_tokens,
        )
        row.extend_tags(root_tag(self.namespaces[new.request_id]))
        self.rows[new.request_id] = row
        assert new.num_computed_tokens < len(new.token_ids)
        assert new.num_computed_tokens % self.block_size == 0
        self._check_context(row, new.num_computed_tokens, "wrong prefix hit")

    def _update(self, cached: CachedRequestData) -> None:
        row = self.rows[cached.request_id]
        assert cached.num_computed_tokens == row.num_computed_tokens
        row.block_ids += cached.new_block_ids

    def _check_shape(self, output: SchedulerOutput) -> None:
        limits = self.limits
        scheduled = output.num_scheduled_tokens
        ids = [new.request_id for new in output.new_requests]
        ids += [cached.request_id for cached in output.cached_requests]
        assert sorted(ids) == sorted(scheduled), "data and scheduled rows differ"
        assert len(self.rows) <= limits.max_num_seqs
        assert output.num_tokens == sum(scheduled.values()) <= limits.max_num_batched_tokens
        num_decode = num_logits = 0
        context_reads = 0.0
        for request_id, num_tokens in scheduled.items():
            row = self.rows[request_id]
            end = row.num_computed_tokens + num_tokens
            num_drafts = len(output.draft_token_ids.get(request_id, ()))
            num_known = len(row.token_ids) + num_drafts
            assert num_tokens > 0 and end <= num_known <= limits.max_model_len
            samples = end == num_known and row.sampling.max_tokens > 0
            if samples and num_tokens == 1 + num_drafts:
                num_decode += num_tokens
                context_reads += len(row.token_ids) + guess_reads(num_drafts, len(row.token_ids))
            else:
                context_reads += prompt_reads(num_tokens, row.num_computed_tokens)
            assert num_drafts == 0 or (samples and num_tokens == 1 + num_drafts)
            num_logits += samples * (1 + num_drafts)
            if row.sampling.num_prompt_logprobs is not None:
                num_logits += max(0, min(end, row.num_prompt_tokens - 1) - row.num_computed_tokens)
        assert num_decode == output.num_decode_rows
        assert math.isclose(context_reads, output.context_reads, abs_tol=1e-6)
        assert num_logits <= limits.max_num_logits

    def _write(
        self, request_id: str, num_tokens: int, drafts: list[int], owners: dict[int, int]
    ) -> None:
        row = self.rows[request_id]
        start = row.num_computed_tokens
        tags = list(row.tags)
        for token_id in drafts:
            tags.append(hash((tags[-1], token_id)))
        for position in range(start, start + num_tokens):
            block_id = row.block_ids[position // self.block_size]
            assert owners[block_id] == 1, "a shared block is written"
            self.slots[self._slot(row, position)] = tags[position]
        self.num_computed_in_all += num_tokens

    def _slot(self, row: Row, position: int) -> int:
        block_id = row.block_ids[position // self.block_size]
        return block_id * self.block_size + position % self.block_size

    def _check_context(self, row: Row, num_tokens: int, what: str) -> None:
        size = self.block_size
        for start in range(0, num_tokens, size):
            count = min(size, num_tokens - start)
            slot = row.block_ids[start // size] * size
            assert self.slots[slot : slot + count] == row.tags[start : start + count], what

    def _read(
        self, request_id: str, num_tokens: int, drafts: list[int], result: ModelRunnerOutput
    ) -> None:
        row = self.rows[request_id]
        start = row.num_computed_tokens
        end = start + num_tokens - len(drafts)
        row.num_computed_tokens = end
        if request_id in self.failing:
            result.errors[request_id] = self.failing[request_id]
            return
        self._check_context(row, end, "KV was overwritten")
        if row.sampling.num_prompt_logprobs is not None:
            result.prompt_logprobs[request_id] = [
                TokenLogprobs(row.token_ids[i + 1], -1.0, 1, [], [])
                for i in range(start, min(end, row.num_prompt_tokens - 1))
            ]
        if end == len(row.token_ids) and row.sampling.max_tokens > 0:
            sampled = result.sampled_token_ids[request_id] = []
            while True:
                token_id = row.next_token()
                row.token_ids.append(token_id)
                row.extend_tags(0)
                sampled.append(token_id)
                if len(sampled) > len(drafts) or token_id != drafts[len(sampled) - 1]:
                    break
            row.num_computed_tokens = len(row.token_ids) - 1
            if row.sampling.num_logprobs is not None:
                result.logprobs[request_id] = [TokenLogprobs(i, -1.0, 1, [], []) for i in sampled]
            if self.draft_accuracy:
                result.draft_token_ids[request_id] = self._guess(row)

    def _guess(self, row: Row) -> list[int]:
        """What comes next, sometimes; from one wrong token on all is wrong."""
        ahead = Row(list(row.token_ids), row.num_prompt_tokens, row.sampling, row.seed, [], 0)
        ahead.tags = list(row.tags)
        guesses = []
        for _ in range(1 + row.tags[-1] % 8):
            is_right = ahead.tags[-1] % 1000 < 1000 * self.draft_accuracy
            token_id = (ahead.next_token() + (not is_right)) % VOCAB_SIZE
            guesses.append(token_id)
            ahead.token_ids.append(token_id)
            ahead.extend_tags(0)
        return guesses
