"""Runs a service under uvicorn until a signal ends it: running streams are finished, or told that they end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import uvicorn

from pocketllm.server.app import create_app
from pocketllm.server.service import Service

_LAST_WORDS = 5  # seconds for the error events of streams that were ended


class Server(uvicorn.Server):
    """SIGTERM or SIGINT: no new connections or generations; those that run get `shutdown_timeout` seconds, then end with
    an error that says why. A second signal ends the process at once."""

    def __init__(self, service: Service, *, on_start: Callable[[str], None] = lambda url: None) -> None:
        """on_start: called with the server's URL once it listens."""
        options = service.options
        self._service, self._on_start = service, on_start
        super().__init__(
            uvicorn.Config(
                create_app(service),
                host=options.host,
                port=options.port,
                log_config=None,
                access_log=False,
                server_header=False,
                ws="none",
                timeout_graceful_shutdown=int(options.shutdown_timeout) + _LAST_WORDS,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            host, port = self.address
            self._on_start(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens; the port is known here even if 0 was asked for."""
        host, port, *_ = self.servers[0].sockets[0].getsockname()
        return host, port

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.stop_accepting()
        ending = asyncio.create_task(self._end_later())
        await super().shutdown(sockets)
        ending.cancel()

    async def _end_later(self) -> None:
        await asyncio.sleep(self._service.options.shutdown_timeout)
        await self._service.close()
