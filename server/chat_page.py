"""The chat page: its files, which need no key, and the rules that they give to the browser."""

from __future__ import annotations

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

# Files of the page by their paths.
FILES = {
    "/": "page.html",
    **{f"/{name}": name for name in ("page.js", "marked.umd.js", "purify.min.js")},
}
# Headers of the files. Scripts and requests are those of this server only, and only the sanitiser
# may make elements out of text.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; "
    "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types dompurify",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


async def send_file(name: str, request: Request) -> Response:
    """Send a file of the page."""
    content = files("mlx_redrafter.server").joinpath("page", name).read_bytes()
    kind = "text/javascript" if name.endswith(".js") else "text/html"
    return Response(content, headers=HEADERS, media_type=kind)
