"""The dashboard: one page and its files. It holds no data, so it needs no key; its requests do."""

from __future__ import annotations

import re
from pathlib import Path

from caudal.errors import NotFoundError
from caudal.server.endpoint import ApiRoute, path_parameter
from caudal.server.errors import Headers
from caudal.server.exchange import Exchange
from caudal.server.state import AppState

BUNDLE = Path(__file__).parents[1] / "static" / "dashboard"
"""What `make dashboard` builds; absent where there was no Node.js."""

PLAIN = Path(__file__).parents[1] / "plain"
"""The page that stands in for it: a table of numbers."""

_PAGE = "index.html"
_TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
}
_FILE_NAME = re.compile(r"[a-z]{1,32}(-[A-Z0-9]{1,32})?\.(js|css)")

_POLICY = "; ".join(
    [
        "default-src 'none'",
        *(f"{kind}-src 'self'" for kind in ("script", "style", "connect")),
        "img-src data:",
        *(f"{what} 'none'" for what in ("base-uri", "form-action", "frame-ancestors")),
    ]
)
_HEADERS: Headers = [
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
]
_FRESH = (b"cache-control", b"no-cache")
_KEPT = (b"cache-control", b"public, max-age=31536000, immutable")


async def dashboard(state: AppState, exchange: Exchange) -> None:
    """The page; the plain one if there is no bundle."""
    folder = BUNDLE if (BUNDLE / _PAGE).exists() else PLAIN
    await _send(exchange, folder / _PAGE)


async def dashboard_folder(state: AppState, exchange: Exchange) -> None:
    """Send those who typed a slash too many to the page, which relative paths expect."""
    headers = [(b"location", b"../dashboard"), _FRESH]
    await exchange.respond(b"", status=308, content_type=_TYPES[".html"], headers=headers)


async def dashboard_file(state: AppState, exchange: Exchange) -> None:
    """A script or style sheet of either page. Raises NotFoundError."""
    name = path_parameter(exchange.scope, "name")
    # The pattern leaves no way out of the two folders.
    if _FILE_NAME.fullmatch(name) is not None:
        for folder in (BUNDLE, PLAIN):
            if (folder / name).is_file():
                await _send(exchange, folder / name)
                return
    raise NotFoundError(f"The dashboard has no file {name[:256]!r}.", code="not_found")


async def _send(exchange: Exchange, path: Path) -> None:
    # Names with a hash of the content never change their content.
    cache = _KEPT if "-" in path.stem else _FRESH
    await exchange.respond(
        path.read_bytes(), content_type=_TYPES[path.suffix], headers=[*_HEADERS, cache]
    )


ROUTES = (
    ApiRoute("GET", "/dashboard", dashboard, "Page with charts and a playground", "text/html"),
    ApiRoute("GET", "/dashboard/", dashboard_folder, "The same page", "text/html"),
    ApiRoute(
        "GET",
        "/dashboard/{name}",
        dashboard_file,
        "Script or style sheet of the page",
        "text/javascript",
        errors=(404,),
    ),
)
