"""The page at `/`, to chat with the models of a server: one answer, nothing else is fetched.

Its policy lets the browser run this script and this style alone, and speak to this server alone.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

_FOLDER = Path(__file__).resolve().parent


@cache
def page() -> tuple[bytes, dict[str, str]]:
    """The page with its style and script inside, and the headers it is sent with."""
    text = (_FOLDER / "chat.html").read_text(encoding="utf-8")
    sources = {}
    for tag, name in (("style", "chat.css"), ("script", "chat.js")):
        inside = (_FOLDER / name).read_text(encoding="utf-8")
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        sources[tag] = f"{tag}-src 'sha256-{digest}'"
        text = text.replace(f"<{tag}></{tag}>", f"<{tag}>{inside}</{tag}>")
    policy = (
        "default-src 'none'", sources["script"], sources["style"], "connect-src 'self'",
        "img-src data:", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'",
        "require-trusted-types-for 'script'", "trusted-types 'none'",
    )  # fmt: skip
    return text.encode(), {
        "Content-Security-Policy": "; ".join(policy),
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }


async def chat_page(request: Request) -> Response:
    body, headers = page()
    return Response(body, headers=headers, media_type="text/html")
