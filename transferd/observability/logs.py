"""Logs: structlog, one JSON object a line or console text, to stderr."""

from __future__ import annotations

import logging
import sys

import structlog

from transferd.config import LogSection

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class _Level:
    """The level of all loggers, changeable while they are in use (SIGHUP)."""

    def __init__(self) -> None:
        self.number = logging.INFO

    def __call__(
        self,
        _logger: object,
        method: str,
        event: structlog.typing.EventDict,
    ) -> structlog.typing.EventDict:
        if _LEVELS.get(method, logging.ERROR) < self.number:
            raise structlog.DropEvent
        return event


_level = _Level()


def configure(section: LogSection) -> None:
    """Set up structlog and route the standard library's logging into the same stream."""
    set_level(section.level)
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts"),
    ]
    last: structlog.typing.Processor
    if section.format == "json":
        shared.append(structlog.processors.format_exc_info)
        last = structlog.processors.JSONRenderer(default=str)
    else:
        last = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    structlog.configure(
        processors=[_level, *shared, last],
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        wrapper_class=structlog.make_filtering_bound_logger(logging.NOTSET),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, last], foreign_pre_chain=shared
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)


def set_level(level: str) -> None:
    """Take effect at once, for every logger."""
    _level.number = _LEVELS[level]
