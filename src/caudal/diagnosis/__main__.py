"""A diagnosis in a process of its own: an observation on standard input, its findings out.

A server runs it so: the simulations take seconds of processor time, and nobody's stream may wait.
"""

from __future__ import annotations

import os
import sys

import msgspec

from caudal.diagnosis.doctor import diagnose
from caudal.diagnosis.report import Observation

NICENESS = 19


def main() -> None:
    """Read MessagePack, diagnose, write JSON."""
    os.nice(NICENESS)
    observation = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Observation)
    sys.stdout.buffer.write(msgspec.json.encode(diagnose(observation)))


if __name__ == "__main__":
    main()
