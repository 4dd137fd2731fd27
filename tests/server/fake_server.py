"""A server process over fake engines: `python -m tests.server.fake_server PLAN`.

PLAN is one word: `good` (the engine stays up), `dies` (each engine dies soon after it is ready),
`once` (only the first one does), `unready` (never ready), `broken` (cannot start), `nomodel`.
"""

from __future__ import annotations

import asyncio
import sys

from caudal.config import ServerConfig
from caudal.engine.messages import EngineReady
from caudal.errors import ModelFileError
from caudal.server.model import ServedModel
from caudal.server.run import ServeSpec, serve
from tests.server.fake_engine import FakeEngine
from tests.server.harness import make_model


class PlannedEngine(FakeEngine):
    """Becomes ready, or not, and dies as the plan says."""

    plan = "good"
    num_made = 0

    def __init__(self) -> None:
        type(self).num_made += 1
        super().__init__(script=lambda request: [5] * 200, vocab_size=300, eos_id=2, step_s=0.01)

    async def start(self) -> None:
        await super().start()
        if self.plan != "unready":
            self.become_ready()

    async def wait_ready(self) -> EngineReady:
        if self.plan == "broken":
            self.start_error = "the weights do not fit"
        ready = await super().wait_ready()
        if self.plan == "dies" or (self.plan == "once" and self.num_made == 1):
            asyncio.get_running_loop().call_later(0.2, self.die)
        return ready


def load_model() -> ServedModel:
    if PlannedEngine.plan == "nomodel":
        raise ModelFileError("tokenizer.ggml.tokens is missing")
    if PlannedEngine.plan == "unready":
        sys.stdout.write("loading\n")
        sys.stdout.flush()
    return make_model()


def main() -> int:
    PlannedEngine.plan = sys.argv[1]
    config = ServerConfig(port=0, drain_timeout_s=1.0)
    return serve(ServeSpec(config, PlannedEngine, load_model))


if __name__ == "__main__":
    sys.exit(main())
