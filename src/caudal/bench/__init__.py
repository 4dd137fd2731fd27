"""Load generation and its reports: measures any OpenAI-compatible server, and Caudal itself."""

from __future__ import annotations
