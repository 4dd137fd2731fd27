"""`python -m caudal` is the `caudal` command."""

from __future__ import annotations

from caudal.cli.main import main

if __name__ == "__main__":
    main()
