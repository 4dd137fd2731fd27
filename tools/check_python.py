"""Says in one line what the interpreter of the virtual environment lacks; exit code 1 if anything.

Runs before anything is installed, so it must parse on old interpreters too.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig

MINIMUM = (3, 11)


def find_problem() -> str | None:
    """What is missing, with its remedy; None when all is there."""
    if sys.version_info < MINIMUM:
        version = ".".join(str(part) for part in sys.version_info[:3])
        return f"Python 3.11 or newer is needed, this is {version} (choose one with PYTHON=...)"
    if importlib.util.find_spec("ensurepip") is None:
        return "Python has no ensurepip, which venv needs (Debian: apt install python3-venv)"
    if not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")):
        return "Python.h is missing (Debian: apt install python3-dev)"
    if not any(shutil.which(name) for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++")):
        return "no C++ compiler was found (Debian: apt install g++)"
    return None


if __name__ == "__main__":
    problem = find_problem()
    if problem:
        sys.exit(f"caudal: {problem}")
