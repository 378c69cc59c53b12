"""The page at `/`: files of this package, read once. They hold no secret, so no key is asked for."""

from collections.abc import Awaitable, Callable
from importlib.resources import files

from fastapi import FastAPI
from starlette.responses import Response

_KINDS = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
_FOLDER = files("steerpipe.server") / "page"
_NAMES = sorted(each.name for each in _FOLDER.iterdir() if each.name.rpartition(".")[2] in _KINDS)
PATHS = frozenset({"/", *(f"/page/{name}" for name in _NAMES if name != "index.html")})
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def add_page(app: FastAPI) -> None:
    """One route per file: nothing of a request is ever a path on the disk."""
    for name in _NAMES:
        path = "/" if name == "index.html" else f"/page/{name}"
        app.get(path, include_in_schema=False)(_serving(name))


def _serving(name: str) -> Callable[[], Awaitable[Response]]:
    content = (_FOLDER / name).read_bytes()
    kind = f"{_KINDS[name.rpartition('.')[2]]}; charset=utf-8"

    async def serve() -> Response:
        return Response(content, headers=HEADERS | {"content-type": kind})

    return serve
