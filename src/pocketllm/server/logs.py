"""Log lines of the server, for people or as JSON: `fields` of a record are its data."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

from pocketllm.options import LogFormat


def set_up_logging(format: LogFormat) -> None:
    """Lines go to stderr: those of this package, and warnings of uvicorn."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    for name, level in (("pocketllm", logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level)
        logger.propagate = False


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return getattr(record, "fields", {})


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        values = {"time": time, "level": record.levelname.lower(), "message": record.getMessage(), **_fields(record)}
        if record.exc_info:
            values["error"] = self.formatException(record.exc_info)
        return json.dumps(values, ensure_ascii=True)


class TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        head, *rest = super().format(record).split("\n", 1)  # an exception's lines come after the fields
        return "\n".join([" ".join([head, *(f"{name}={value}" for name, value in _fields(record).items())]), *rest])
