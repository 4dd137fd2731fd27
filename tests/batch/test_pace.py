"""Places in flight: how many, whose turn, and when a batch may press."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from caudal.engine.client import EngineClient
from caudal.scheduler.service_class import ServiceClass
from caudal.server.batch.pace import LOOKAHEAD, Customer, Slots, Speed, choose_service
from tests.server.fake_engine import FakeEngine

DAY = 24 * 3600


class Engine(FakeEngine):
    """Says that it runs so many background requests."""

    num_background = 0

    @property
    def stats(self) -> Any:
        stats = super().stats
        stats.num_background_running = self.num_background
        return stats


def make_engine() -> Engine:
    engine = Engine(script=lambda request: [5], vocab_size=300, eos_id=2)
    engine.become_ready()
    return engine


def make_slots(engine: Engine) -> Slots:
    return Slots(lambda: cast(EngineClient, engine))


async def taken(slots: Slots, customer: Customer, num: int) -> list[asyncio.Task[Any]]:
    tasks = [asyncio.create_task(slots.take(customer)) for _ in range(num)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return tasks


def num_done(tasks: list[asyncio.Task[Any]]) -> int:
    return sum(task.done() for task in tasks)


async def cancel(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_places_follow_what_the_engine_runs() -> None:
    engine = make_engine()
    slots = make_slots(engine)
    tasks = await taken(slots, Customer("a"), 40)
    assert num_done(tasks) == LOOKAHEAD
    engine.num_background = 5
    slots.refresh()
    await asyncio.sleep(0)
    assert num_done(tasks) == LOOKAHEAD + 5
    engine.num_background = 0
    for task in tasks[:3]:
        task.result().release()
    await asyncio.sleep(0)
    assert num_done(tasks) == LOOKAHEAD + 5
    engine.num_background = 1000
    slots.refresh()
    await asyncio.sleep(0)
    # 8 rows at most, in this engine.
    assert slots.num_background == LOOKAHEAD + 8
    await cancel(tasks)


async def test_engine_that_is_not_ready_gets_nothing() -> None:
    engine = make_engine()
    slots = make_slots(engine)
    engine.die()
    tasks = await taken(slots, Customer("a"), 3)
    assert num_done(tasks) == 0
    await cancel(tasks)


async def test_place_is_given_back_once_however_often_it_is_released() -> None:
    slots = make_slots(make_engine())
    place = await slots.take(Customer("a"))
    assert slots.num_background == 1
    place.release()
    place.release()
    place.change(ServiceClass.LATE)
    assert (slots.num_background, slots.num_late) == (0, 0)


async def test_place_of_a_taker_that_was_cancelled_is_not_lost() -> None:
    engine = make_engine()
    slots = make_slots(engine)
    first = await taken(slots, Customer("a"), LOOKAHEAD)
    second = await taken(slots, Customer("a"), LOOKAHEAD + 2)
    for task in first:
        task.result().release()
    await cancel(second)  # most have a place that they do not know of yet, two wait
    assert all(task.cancelled() for task in second)
    assert slots.num_background == 0
    assert num_done(await taken(slots, Customer("b"), LOOKAHEAD + 1)) == LOOKAHEAD


async def test_owners_take_turns_however_many_batches_each_has() -> None:
    slots = make_slots(make_engine())
    first = await taken(slots, Customer("a"), LOOKAHEAD)
    order: list[str] = []

    async def take(customer: Customer, name: str) -> None:
        await slots.take(customer)
        order.append(name)

    waiting = [
        asyncio.create_task(take(customer, name))
        for customer, name in [(Customer("a"), f"a{i}") for i in range(4)]
        + [(Customer("b"), f"b{i}") for i in range(4)]
    ]
    await asyncio.sleep(0)
    for task in first:
        task.result().release()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert [name[0] for name in order] == ["b", "a"] * 4
    await cancel(waiting)


async def test_pressing_batches_go_first_and_late_ones_have_places_of_their_own() -> None:
    slots = make_slots(make_engine())
    first = await taken(slots, Customer("a"), LOOKAHEAD)
    idle = await taken(slots, Customer("a"), 1)
    urgent = await taken(slots, Customer("b", ServiceClass.URGENT), 1)
    late = await taken(slots, Customer("c", ServiceClass.LATE), 6)
    assert (num_done(idle), num_done(urgent), num_done(late)) == (0, 0, 4)
    first[0].result().release()
    await asyncio.sleep(0)
    assert (num_done(idle), num_done(urgent)) == (0, 1)
    await cancel([*idle, *late])


def choose(
    current: ServiceClass = ServiceClass.IDLE, *, left: int, speed: float, elapsed_s: float
) -> ServiceClass:
    return choose_service(
        current, num_left=left, speed=speed, elapsed_s=elapsed_s, left_s=DAY - elapsed_s
    )


@pytest.mark.parametrize(
    ("left", "speed", "elapsed_s", "expected"),
    [
        (100_000, 0.0, 60, ServiceClass.IDLE),  # it has just begun
        (0, 0.0, DAY * 0.9, ServiceClass.IDLE),  # nothing left
        (1000, 1.0, DAY * 0.5, ServiceClass.IDLE),  # a thousand seconds, half a day to go
        (50_000, 1.0, DAY * 0.5, ServiceClass.URGENT),
        (40_000, 1.0, DAY * 0.5, ServiceClass.URGENT),  # would just do, without a margin
        (50_000, 0.0, DAY * 0.5, ServiceClass.URGENT),
        (50_000, 1.0, DAY * 0.8, ServiceClass.LATE),
        (1000, 1.0, DAY * 0.99, ServiceClass.LATE),
        (500, 1.0, DAY * 0.99, ServiceClass.IDLE),
    ],
)
def test_urgency_rises_only_where_the_deadline_asks_for_it(
    left: int, speed: float, elapsed_s: float, expected: ServiceClass
) -> None:
    assert choose(left=left, speed=speed, elapsed_s=elapsed_s) is expected


def test_urgent_batch_relaxes_only_when_well_ahead() -> None:
    half = DAY / 2
    for current in (ServiceClass.URGENT, ServiceClass.LATE):
        assert choose(current, left=30_000, speed=1.0, elapsed_s=half) is current
        assert choose(current, left=20_000, speed=1.0, elapsed_s=half) is ServiceClass.IDLE
    assert choose(left=30_000, speed=1.0, elapsed_s=half) is ServiceClass.IDLE


def test_speed_follows_the_last_minutes() -> None:
    speed = Speed(memory_s=60.0, now=0.0)
    assert speed.per_s(0.0) == 0.0
    for second in range(1, 11):
        speed.add(float(second))
        speed.add(float(second))
    assert speed.per_s(10.0) == pytest.approx(2.0, rel=0.15)
    for second in range(11, 600):
        speed.add(float(second))
    assert speed.per_s(600.0) == pytest.approx(1.0, rel=0.05)
    assert speed.per_s(1200.0) < 0.001
