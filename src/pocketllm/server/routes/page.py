"""GET /: the status page, one static file without a secret in it. What it shows comes from /slots, which may need a key."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from fastapi import APIRouter, Response

from pocketllm.server.service import Service


def router(service: Service) -> APIRouter:
    routes = APIRouter()
    page = files("pocketllm.server").joinpath("page", "index.html").read_bytes()
    headers = {
        "Cache-Control": "no-cache",
        "Content-Security-Policy": content_security_policy(page.decode()),
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }

    @routes.get("/", response_model=None, include_in_schema=False)
    async def status_page() -> Response:
        return Response(page, media_type="text/html", headers=headers)

    return routes


def content_security_policy(page: str) -> str:
    """Lets the page's own script and style run, known by their hashes, and connections to this server; nothing else."""
    hashes = {
        tag: " ".join(_hash(text) for text in re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL))
        for tag in ("script", "style")
    }
    return (
        "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
        f" script-src {hashes['script']}; style-src {hashes['style']}"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
