"""Whose request it is, and what follows from it: turns, cache, priority, quota and deadline."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from caudal.errors import DeadlineError, InvalidRequestError
from caudal.server.auth import OWNER, QUOTA
from caudal.server.exchange import Exchange
from caudal.server.generation.plan import GenerationPlan
from caudal.server.protocol.common import MAX_TIMEOUT_S
from caudal.server.quota import RATE_LIMIT, Quota

if TYPE_CHECKING:
    from caudal.server.state import AppState

TIMEOUT_HEADER: Final = b"x-request-timeout"

TRACE_HEADER: Final = b"traceparent"

TIER_STEP = 1 << 32
"""Distance between the priorities of two service tiers: more than callers can give."""

_TIERS: Final = {"priority": -1, "default": 0, "flex": 1}


def quota_of(exchange: Exchange) -> Quota | None:
    """What limits the key of this request; None for requests without a key, and for batches."""
    quota: Quota | None = exchange.scope.get(QUOTA)
    return quota


def with_tier(state: AppState, exchange: Exchange, plan: GenerationPlan) -> GenerationPlan:
    """`plan` with the service tier that it will really get, for the answer to tell."""
    if plan.service_tier is None:
        return plan
    tier = plan.service_tier if plan.service_tier in _TIERS else "default"
    least = state.keys.limits_of(exchange.scope.get(OWNER, "")).min_priority
    if tier == "priority" and least is not None and least >= 0:
        tier = "default"
    return replace(plan, service_tier=tier)


def for_tenant(state: AppState, exchange: Exchange, plan: GenerationPlan) -> GenerationPlan:
    """`plan` as it goes to the engine, and its prompts charged to the key.

    Raises InvalidRequestError for a priority or timeout that is not allowed, RateLimitError when
    the key's tokens are used up, DeadlineError when the time is over.
    """
    owner: str = exchange.scope.get(OWNER, "")
    limits = state.keys.limits_of(owner)
    if limits.min_priority is not None and plan.priority < limits.min_priority:
        raise InvalidRequestError(
            f"priority: must be at least {limits.min_priority} for this API key, "
            f"got {plan.priority}.",
            param="priority",
            code="invalid_value",
        )
    plan = with_tier(state, exchange, plan)
    timeout_s = _timeout_s(exchange, plan)
    if timeout_s is not None and time.monotonic() - plan.arrival >= timeout_s:
        raise DeadlineError(timeout_s, "before it could be queued")
    quota = quota_of(exchange)
    if quota is not None:
        quota.take_prompt(sum(len(prompt.token_ids) for prompt in plan.prompts))
        _tell_limits(exchange, quota)
    namespace = plan.namespace
    if owner and state.config.prefix_cache_per_key:
        namespace = f"{owner}\0{namespace}"
    return replace(
        plan,
        service=exchange.service,
        tenant=owner,
        weight=limits.weight,
        namespace=namespace,
        priority=plan.priority + _TIERS.get(plan.service_tier or "", 0) * TIER_STEP,
        timeout_s=timeout_s,
        path=exchange.scope["path"],
        traceparent=exchange.headers.get(TRACE_HEADER, b"").decode("latin-1"),
    )


def refund(exchange: Exchange, plan: GenerationPlan) -> None:
    """Give the prompts' tokens back: the engine has refused the request."""
    quota = quota_of(exchange)
    if quota is not None:
        quota.use_tokens(-sum(len(prompt.token_ids) for prompt in plan.prompts))
        _tell_limits(exchange, quota)


def _tell_limits(exchange: Exchange, quota: Quota) -> None:
    others = [header for header in exchange.reply_headers if not header[0].startswith(RATE_LIMIT)]
    exchange.reply_headers[:] = others + quota.headers()


def _timeout_s(exchange: Exchange, plan: GenerationPlan) -> float | None:
    """The smaller of the body's and the header's. Raises InvalidRequestError."""
    text = exchange.headers.get(TIMEOUT_HEADER)
    if text is None:
        return plan.timeout_s
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_TIMEOUT_S:
        name = TIMEOUT_HEADER.decode()
        raise InvalidRequestError(
            f"{name}: must be a number of seconds above 0 and up to {MAX_TIMEOUT_S}.",
            param=name,
            code="invalid_value",
        )
    return seconds if plan.timeout_s is None else min(seconds, plan.timeout_s)
