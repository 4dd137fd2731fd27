"""Requests that schemathesis makes from a server's own OpenAPI document; needs the `test` extra.

    python benchmarks/fuzz_schema.py [--model smollm2-135m] [--examples 300] [--seed 0] [--only …]

For every operation so many requests, half of them within the schema and half outside of it. No
status may be 500 or above but a 504 for a `timeout` that was asked for, and each must be one that
the document lists for the operation. Exits with 1 if anything of this is not so. The first fault
of an operation is printed with the request, made as small as possible.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import logging
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import requests

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import schemathesis
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

from benchmarks.serve_vs_peer import caudal_server

FLAGS = ["--served-model-name", "fuzzed", "--kv-cache-memory", "64MiB"]
TIMEOUT_S = 120.0
HTTP_LAYER = frozenset({400, 404, 405, 408, 413, 415, 431})
"""What any operation may answer to a request that is not even HTTP, or not one of its own."""


class SchemaFuzzer:
    """Sends what the document of one server allows, and what it does not."""

    def __init__(self, url: str, *, num_examples: int, random_seed: int) -> None:
        self._http = httpx.Client(base_url=url, timeout=TIMEOUT_S)
        self._url = url
        self._num_examples = num_examples
        self._seed = random_seed
        self.statuses: Counter[int] = Counter()
        document = self._http.get("/openapi.json").json()
        results: Any = schemathesis.openapi.from_dict(document).get_all_operations()
        operations = [result.ok() for result in results]
        self.operations: dict[str, Any] = {operation.label: operation for operation in operations}

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def check(self, label: str) -> None:
        """Raise AssertionError with the smallest request that is answered as it must not be."""
        operation = self.operations[label]
        documented = {int(status) for status in operation.definition.raw["responses"]}
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            if mode is GenerationMode.NEGATIVE and not _has_input(operation):
                continue

            @seed(self._seed)
            @settings(
                max_examples=max(1, self._num_examples // 2),
                deadline=None,
                database=None,
                phases=(Phase.generate, Phase.shrink),
                suppress_health_check=list(HealthCheck),
                verbosity=Verbosity.quiet,
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def send(case: Any) -> None:
                self._send(case, documented)

            with contextlib.suppress(Unsatisfiable):  # nothing is outside the schema
                send()

    def _send(self, case: Any, documented: set[int]) -> None:
        arguments = case.as_transport_kwargs(base_url=self._url)
        arguments.pop("timeout", None)
        try:
            prepared: Any = requests.Request(**arguments).prepare()
            request = self._http.build_request(
                prepared.method or "GET",
                prepared.url or "",
                headers=[*prepared.headers.items()],
                content=prepared.body,
            )
        except (ValueError, UnicodeError, httpx.InvalidURL, http.client.HTTPException):
            return  # cannot be sent with a client
        response = self._http.send(request)
        self.statuses[response.status_code] += 1
        shown = f"{request.method} {request.url} {prepared.body!r:.2000}"
        answer = f"{response.status_code} {response.text:.1000}"
        is_known = response.status_code in documented | HTTP_LAYER or response.is_redirect
        assert is_known, f"not a documented status: {shown}\n    {answer}"
        assert response.status_code in (200, 504) or response.status_code < 500, (
            f"a server's fault: {shown}\n    {answer}"
        )


def _has_input(operation: Any) -> bool:
    return bool(operation.body) or any(True for _ in operation.iter_parameters())


def main() -> None:
    """Start a server, fuzz every operation, print a summary."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="known name or GGUF path")
    parser.add_argument("--examples", type=int, default=300, help="per operation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="part of the paths to test")
    options = parser.parse_args()
    logging.disable()
    num_faults = 0
    with (
        tempfile.TemporaryDirectory() as folder,
        caudal_server(options.model, [*FLAGS, "--data-dir", folder]) as url,
    ):
        fuzzer = SchemaFuzzer(url, num_examples=options.examples, random_seed=options.seed)
        for label in fuzzer.operations:
            if options.only not in label:
                continue
            try:
                fuzzer.check(label)
            except AssertionError as fault:
                num_faults += 1
                print(f"FAULT in {label}: {fault}")
        print(f"answers by status: {dict(sorted(fuzzer.statuses.items()))}")
        print(f"{num_faults} operations with faults, seed {options.seed}")
        fuzzer.close()
    sys.exit(1 if num_faults else 0)


if __name__ == "__main__":
    main()
