"""Shares the machine between tenants: of equally important requests, who has had least goes first.

Virtual token counters, after Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024),
with the output paid in advance: a burst that fills all seats at once is charged at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from caudal.scheduler.request import Request
from caudal.scheduler.stats import TrafficAverages

OUTPUT_COST = 2.0
"""What an output token costs, in prompt tokens."""


@dataclass(slots=True)
class Share:
    """What one tenant has had."""

    weight: float = 1.0
    """A tenant of weight 2 gets twice as much as one of weight 1 while both wait."""
    served: float = 0.0
    """Tokens computed for it (outputs at OUTPUT_COST), divided by its weight."""


class FairShares:
    """Counts what each tenant has had. Background requests count for nobody."""

    def __init__(self, averages: TrafficAverages) -> None:
        self._averages = averages
        self._shares: dict[str, Share] = {}
        self._last_served = 0.0

    def served(self, tenant: str) -> float:
        """The tenant's counter: the smallest among those that wait is next."""
        share = self._shares.get(tenant)
        return 0.0 if share is None else share.served

    def weight(self, tenant: str) -> float:
        """The tenant's weight."""
        share = self._shares.get(tenant)
        return 1.0 if share is None else share.weight

    def arrive(self, request: Request, waiting: Iterable[str]) -> None:
        """`request` joins the queue in which the tenants `waiting` have requests.

        A tenant that had none starts level with the others: time in which it asked for nothing
        is not saved up.
        """
        share = self._shares.setdefault(request.tenant, Share())
        share.weight = request.weight
        others = list(waiting)
        if request.tenant not in others:
            share.served = max(share.served, self.floor(others))

    def floor(self, waiting: Iterable[str]) -> float:
        """Where a tenant starts that had no request in the queue."""
        return min(map(self.served, waiting), default=self._last_served)

    def charge(self, request: Request) -> None:
        """`request` starts: the rest of its prompt, and what it will probably say."""
        if request.is_background:
            return
        left = request.max_total_tokens - len(request.token_ids)
        expected = min(float(max(0, left)), self._averages.lengths.mean)
        request.num_prepaid = request.num_output_tokens + expected
        share = self._shares[request.tenant]
        self._last_served = share.served
        share.served += (request.num_tokens_left + OUTPUT_COST * expected) / share.weight

    def settle(self, request: Request) -> None:
        """`request` stops running: correct what it paid in advance."""
        if request.is_background:
            return
        share = self._shares[request.tenant]
        owed = request.num_output_tokens - request.num_prepaid
        share.served += OUTPUT_COST * owed / share.weight

    def cost(self, num_requests: int, num_tokens: int) -> float:
        """What waiting requests with so many tokens will probably be charged, at weight 1."""
        averages = self._averages
        outputs = num_requests * averages.lengths.mean * OUTPUT_COST
        return num_tokens * averages.miss_ratio + outputs
