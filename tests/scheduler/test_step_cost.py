"""The cost model learns machines it has never seen, through noise and hiccups."""

from __future__ import annotations

import random

import pytest

from caudal.scheduler.step_cost import StepCostModel, StepCosts

MACHINES = {
    "laptop": StepCosts(6.0, 0.3, 0.16, 2e-5),
    "slow core": StepCosts(60.0, 4.0, 2.5, 5e-4),
    "server": StepCosts(1.5, 0.04, 0.01, 1e-6),
    "attention bound": StepCosts(5.0, 0.1, 0.1, 4e-4),
    "no overhead": StepCosts(0.0, 1.0, 0.5, 0.0),
}


class Machine:
    """Steps of random shape with their true and measured times."""

    def __init__(self, costs: StepCosts, seed: int, noise: float = 0.05) -> None:
        self.costs = costs
        self.rng = random.Random(seed)
        self.noise = noise

    def shape(self) -> tuple[int, int, int]:
        rng = self.rng
        rows = rng.randint(0, 32)
        tokens = rng.choice([0, 0, 16, 100, 300, 512])
        if rows + tokens == 0:
            rows = 1
        context = rows * rng.randint(50, 1500) + tokens * rng.randint(0, 2000)
        return rows, tokens, context

    def true_ms(self, shape: tuple[int, int, int]) -> float:
        rows, tokens, context = shape
        c = self.costs
        return (
            c.step_ms
            + c.decode_row_ms * rows
            + c.prefill_token_ms * tokens
            + c.context_token_ms * context
        )

    def measure(self, shape: tuple[int, int, int]) -> float:
        return self.true_ms(shape) * (1 + self.rng.gauss(0, self.noise))

    def worst_error(self, model: StepCostModel, num: int = 200) -> float:
        """The 95th percentile of the relative prediction error."""
        errors = []
        for _ in range(num):
            shape = self.shape()
            errors.append(abs(model.predict(*shape) / self.true_ms(shape) - 1))
        return sorted(errors)[int(num * 0.95)]


def train(model: StepCostModel, machine: Machine, num_steps: int) -> None:
    for _ in range(num_steps):
        shape = machine.shape()
        model.observe(*shape, machine.measure(shape))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", list(MACHINES))
def test_unknown_machine_is_predicted_within_10_percent_after_50_steps(
    name: str, seed: int
) -> None:
    machine = Machine(MACHINES[name], seed)
    model = StepCostModel()
    train(model, machine, 50)
    assert machine.worst_error(model) < 0.10


@pytest.mark.parametrize("seed", range(5))
def test_hiccups_do_not_wreck_the_fit(seed: int) -> None:
    machine = Machine(MACHINES["laptop"], seed)
    model = StepCostModel()
    for step in range(150):
        shape = machine.shape()
        slow = 10.0 if step % 20 == 7 else 1.0
        model.observe(*shape, machine.measure(shape) * slow)
    assert machine.worst_error(model) < 0.15


def test_one_hiccup_hardly_moves_a_settled_model() -> None:
    machine = Machine(MACHINES["laptop"], 1)
    model = StepCostModel()
    train(model, machine, 200)
    before = model.predict(8, 100, 20_000)
    model.observe(8, 100, 20_000, before * 10)
    assert model.predict(8, 100, 20_000) == pytest.approx(before, rel=0.05)


def test_first_step_that_is_a_hiccup_is_forgotten() -> None:
    machine = Machine(MACHINES["laptop"], 2)
    model = StepCostModel()
    shape = machine.shape()
    model.observe(*shape, machine.true_ms(shape) * 10)
    train(model, machine, 60)
    assert machine.worst_error(model) < 0.12


def test_machine_that_turns_twice_as_slow_is_followed() -> None:
    fast, slow = MACHINES["laptop"], StepCosts(12.0, 0.6, 0.32, 4e-5)
    model = StepCostModel()
    train(model, Machine(fast, 3), 200)
    machine = Machine(slow, 4)
    train(model, machine, 150)
    assert machine.worst_error(model) < 0.15


@pytest.mark.parametrize("speed", [0.5, 2.0])
def test_decode_steps_of_another_speed_do_not_change_what_prompts_cost(speed: float) -> None:
    """The server's own work slows short steps; a burst's wait must not be told wrong for that."""
    costs = MACHINES["laptop"]
    machine, model = Machine(costs, 5), StepCostModel()
    train(model, machine, 200)
    for _ in range(100):
        shape = (8, 0, 2000)
        model.observe(*shape, machine.measure(shape) * speed)
    assert model.predict(8, 0, 2000) == pytest.approx(
        machine.true_ms((8, 0, 2000)) * speed, rel=0.1
    )
    assert model.prefill_ms(256, 0) == pytest.approx(costs.prefill_token_ms * 256, rel=0.25)


def test_prompts_that_turn_twice_as_slow_are_followed_within_thirty_steps() -> None:
    machine, model = Machine(MACHINES["laptop"], 6), StepCostModel()
    train(model, machine, 200)
    for _ in range(30):
        shape = (machine.rng.randint(0, 32), machine.rng.choice([100, 300, 512]), 5000)
        model.observe(*shape, machine.measure(shape) * 2)
    shape = (8, 256, 5000)
    assert model.predict(*shape) == pytest.approx(machine.true_ms(shape) * 2, rel=0.15)


def test_long_decoding_does_not_unlearn_prefill() -> None:
    machine = Machine(MACHINES["slow core"], 5)
    model = StepCostModel()
    train(model, machine, 100)
    for _ in range(5000):
        shape = (8, 0, 8 * 700)
        model.observe(*shape, machine.measure(shape))
    for tokens in (100, 512):
        shape = (8, tokens, 8 * 700 + tokens * 200)
        assert model.predict(*shape) == pytest.approx(machine.true_ms(shape), rel=0.15)


def test_coefficients_never_become_negative() -> None:
    """Times that fall with load (a clock that speeds up) must not give negative costs."""
    model = StepCostModel()
    rng = random.Random(6)
    for _ in range(300):
        rows, tokens = rng.randint(1, 32), rng.choice([0, 64, 512])
        model.observe(rows, tokens, rows * 100, 50.0 - rows)
        costs = model.costs
        parts = (
            costs.step_ms,
            costs.decode_row_ms,
            costs.prefill_token_ms,
            costs.context_token_ms,
        )
        assert min(parts) >= 0
        assert model.predict(0, 0, 0) >= 0


@pytest.mark.parametrize("bad", [0.0, -1.0, float("inf"), float("nan")])
def test_impossible_measurements_are_ignored(bad: float) -> None:
    model = StepCostModel()
    before = model.costs
    model.observe(4, 100, 1000, bad)
    assert model.costs == before


@pytest.mark.parametrize("num_computed", [0, 100, 5000])
@pytest.mark.parametrize("budget_ms", [0.5, 7.0, 40.0, 1000.0])
def test_largest_chunk_fits_the_budget_and_one_more_token_does_not(
    budget_ms: float, num_computed: int
) -> None:
    model = StepCostModel(StepCosts(5.0, 0.5, 0.2, 3e-5))
    size = model.max_prefill_tokens(budget_ms, num_computed, 4096)
    assert model.prefill_ms(size, num_computed) <= budget_ms * (1 + 1e-9)
    assert size == 4096 or model.prefill_ms(size + 1, num_computed) > budget_ms


def test_no_budget_gives_no_chunk_and_no_limit_gives_all() -> None:
    model = StepCostModel()
    assert model.max_prefill_tokens(-3.0, 0, 512) == 0
    assert model.max_prefill_tokens(float("inf"), 100, 512) == 512
