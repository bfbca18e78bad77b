"""Structured logs: one JSON object a line, without the texts of prompts and answers."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any, TextIO

_LONGEST = 20_000  # characters of a text that is logged


class JsonLines(logging.Handler):
    """Log records as JSON, whoever makes them."""

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__()
        self._stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {"time": f"{when}.{int(record.msecs):03d}Z"}
        line |= {"level": record.levelname.lower(), "event": record.getMessage()[:_LONGEST]}
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["traceback"] = logging.Formatter().formatException(record.exc_info)
        try:
            (self._stream or sys.stderr).write(json.dumps(line, default=str) + "\n")
            (self._stream or sys.stderr).flush()
        except (OSError, ValueError):  # nobody reads them any more
            pass


class Log:
    """Writes events of a server."""

    def __init__(self, *, prompts: bool = False, stream: TextIO | None = None) -> None:
        """`prompts`: bodies of requests are logged too."""
        self.prompts = prompts
        self._logger = logging.Logger("rlx.serve", logging.INFO)
        self._logger.addHandler(JsonLines(stream))

    def __call__(self, event: str, *, level: int = logging.INFO, **fields: Any) -> None:
        self._logger.log(level, event, extra={"fields": fields})

    def failure(self, event: str, error: BaseException, **fields: Any) -> None:
        """An error of our own, with where it came from."""
        info = (type(error), error, error.__traceback__)
        self._logger.error(event, exc_info=info, extra={"fields": fields})
