"""Compiled grammars, and the one that each request follows."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from caudal.errors import CaudalError, InvalidRequestError
from caudal.sampling_params import StructuredOutputsParams
from caudal.structured_output.grammar import (
    create_grammar,
    grammar_error,
    parser_limits,
    short,
)
from caudal.structured_output.limits import MAX_DIGITS
from caudal.structured_output.number_runs import NumberRuns
from caudal.structured_output.vocabulary import GrammarVocabulary

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

MAX_CACHED_GRAMMARS = 256
NUM_COMPILERS = 2
WHERE = "structured_outputs"
TOO_LONG = "the grammar took too long to be followed any further"


class ConstraintError(CaudalError):
    """The grammar of a request cannot be followed any further; only this request fails."""


class Constraint:
    """Follows the output of one request and says which tokens may come next.

    Not thread-safe: between the start of a mask and its end nothing else may be called.
    """

    __slots__ = (
        "_runs",
        "_template",
        "_vocabulary",
        "has_mask",
        "is_complete",
        "mask",
        "mask_error",
        "matcher",
    )

    def __init__(self, template: _Template) -> None:
        self._template = template
        self._vocabulary = template.vocabulary
        self._runs = NumberRuns(template.trigger) if template.has_json else None
        self.mask: NDArray[np.int32] = np.zeros(self.num_words, np.int32)
        """As it was filled: [num_words], a bit per token."""
        self.matcher = template.matcher.deep_copy()
        self.is_complete = False
        """An end-of-generation token has been accepted: nothing can follow."""
        self.has_mask = False
        """The mask of the present state has been computed, or is about to be."""
        self.mask_error: Exception | None = None

    @property
    def grammar(self) -> object:
        """The same for all constraints whose matchers share a lock."""
        return self._template

    @property
    def num_words(self) -> int:
        """Words of a mask."""
        return self._vocabulary.num_words

    def give_up(self) -> None:
        """Fail this and all others of its compiled grammar: their matchers share a lock.

        Requests that come later compile the grammar anew.
        """
        self._template.is_stuck = True

    def accept(self, token_id: int) -> None:
        """Advance by a sampled token. Raises ConstraintError if the grammar does not allow it."""
        if self.is_complete:
            return
        self.check_lock()
        if not self.matcher.consume_token(token_id):
            raise ConstraintError("the output left the form that was asked for")
        self._note(token_id)

    def _note(self, token_id: int) -> None:
        self.has_mask = False
        if token_id in self._vocabulary.eog_ids:
            self.is_complete = True
        elif self._runs is not None:
            self._runs.push(self._vocabulary.token_bytes[token_id])

    def try_accept(self, token_id: int) -> bool:
        """Advance by a token that was sampled without a mask, unless the grammar refuses it."""
        self.check_lock()
        if token_id >= self._vocabulary.vocab_size:
            return False
        if self.matcher.try_consume_tokens([token_id]) == 0:
            return False
        self._note(token_id)
        return True

    @property
    def can_check(self) -> bool:
        """A token that the grammar takes in this state is one that the mask would allow."""
        return self._runs is None or self._runs.digits < MAX_DIGITS

    def fill_mask(self) -> None:
        """Compute the mask of the present state; whatever fails is kept for `take_mask`."""
        try:
            self.check_lock()
            self.mask = np.zeros(self.num_words, np.int32)
            self.matcher.unsafe_compute_mask_ptr(self.mask.ctypes.data, self.mask.nbytes)
        except Exception as error:
            self.mask_error = error

    def take_mask(self) -> NDArray[np.int32]:
        """The mask that was filled: [num_words], a bit per token; valid until the next one.

        Numbers that go on for ever are ended. Raises ConstraintError if the matcher has given up,
        and what went wrong in `fill_mask`.
        """
        self.check_lock()
        if self.mask_error is not None:
            raise self.mask_error
        if self.matcher.is_error():
            raise ConstraintError("the grammar became too complex to follow any further")
        mask = self.mask
        if self._runs is not None and self._runs.digits >= MAX_DIGITS:
            others = mask & self._vocabulary.without_digits
            if others.any():
                return others
        return mask

    def check_lock(self) -> None:
        """Nothing may be asked of a matcher whose grammar hangs: it would not answer."""
        if self._template.is_stuck:
            raise ConstraintError(TOO_LONG)


def fill_masks(executor: LLExecutor, constraints: Sequence[Constraint]) -> None:
    """`fill_mask` for several constraints of one grammar, in one call.

    It needs the interpreter only at its ends: between them another thread may keep it.
    """
    first = constraints[0]
    if len(constraints) == 1:
        first.fill_mask()
        return
    masks = np.zeros((len(constraints), first.num_words), np.int32)
    for constraint, mask in zip(constraints, masks, strict=True):
        constraint.mask = mask
    places = [(constraint.matcher, row) for row, constraint in enumerate(constraints)]
    try:
        first.check_lock()
        executor.unsafe_compute_mask_ptr(places, masks.ctypes.data, masks.strides[0], len(masks))
    except Exception as error:
        for constraint in constraints:
            constraint.mask_error = error


class _Template(msgspec.Struct, eq=False):
    """A compiled grammar in its first state; copies share what it has learnt."""

    matcher: LLMatcher
    vocabulary: GrammarVocabulary
    trigger: bytes | None
    has_json: bool
    is_stuck: bool = False
    """A mask has not come back, and holds the lock that all copies share."""

    def create(self) -> Constraint:
        return Constraint(self)


def _is_usable(future: Future[_Template]) -> bool:
    return not future.done() or (future.exception() is None and not future.result().is_stuck)


class ConstraintFactory:
    """Compiles grammars in threads of its own and keeps the latest.

    The vocabulary is read when the first grammar comes, because most servers never need it.
    """

    def __init__(self, load_vocabulary: Callable[[], GrammarVocabulary]) -> None:
        self._load_vocabulary = load_vocabulary
        self._vocabulary: GrammarVocabulary | None = None
        self._lock = threading.Lock()
        self._templates: OrderedDict[str, Future[_Template]] = OrderedDict()
        self._pool: ThreadPoolExecutor | None = None

    def prepare(self, params: StructuredOutputsParams) -> Future[_Template]:
        """Compile without waiting. The future raises InvalidRequestError if that is impossible."""
        key = repr(params)
        future = self._templates.get(key)
        if future is not None and _is_usable(future):
            self._templates.move_to_end(key)
            return future
        if self._pool is None:
            self._pool = ThreadPoolExecutor(NUM_COMPILERS, "caudal-grammar")
        future = self._templates[key] = self._pool.submit(self._compile, params)
        while len(self._templates) > MAX_CACHED_GRAMMARS:
            self._templates.popitem(last=False)
        return future

    def create(self, params: StructuredOutputsParams, output_ids: Sequence[int]) -> Constraint:
        """The constraint of a request that has produced `output_ids` so far.

        Waits if the grammar was not prepared. Raises InvalidRequestError if it cannot be compiled,
        ConstraintError if it does not allow `output_ids`.
        """
        constraint = self.prepare(params).result().create()
        for token_id in output_ids:
            constraint.accept(token_id)
        return constraint

    def shutdown(self) -> None:
        """End the threads after what they compile now."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _compile(self, params: StructuredOutputsParams) -> _Template:
        from llguidance import LLMatcher

        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._load_vocabulary()
        vocabulary = self._vocabulary
        grammar = create_grammar(params, WHERE, vocabulary.special_ids)
        matcher = LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=parser_limits())
        if matcher.is_error():
            raise grammar_error(params, WHERE, short(matcher.get_error()))
        first = matcher.deep_copy()
        mask = np.frombuffer(first.compute_bitmask(), dtype=np.uint8)
        if first.is_error() or not mask.any() or first.stop_reason() != "NotStopped":
            raise InvalidRequestError(
                f"{WHERE}: no output can have this form, or it is too complex to be checked.",
                code="invalid_value",
            )
        tags = params.structural_tags
        trigger = tags.trigger if tags is not None and tags.trigger else params.after
        return _Template(
            matcher=matcher,
            vocabulary=vocabulary,
            trigger=trigger.encode() if trigger else None,
            has_json=params.json is not None or params.json_object or tags is not None,
        )
