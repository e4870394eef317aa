"""Logs, one line per record, and the Prometheus registry of a process."""

from __future__ import annotations

import logging
import re
import sys
import time
from typing import Any, Final

import msgspec

from sllm_runtime.platform.settings import Settings
from sllm_runtime.platform.trace import current, trace_id

_PLAIN = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName", "color_message"}
"""What every record has; anything else came by ``extra`` and is printed as a field."""


_COMMANDS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


class _Line(logging.Formatter):
    def __init__(self, component: str, identity: str) -> None:
        super().__init__()
        self.component, self.identity = component, identity

    @staticmethod
    def fields(record: logging.LogRecord) -> dict[str, Any]:
        found = {key: value for key, value in vars(record).items() if key not in _PLAIN}
        return found | {"trace": known} if (known := trace_id(current())) else found

    def text(self, record: logging.LogRecord) -> str:
        """The message with its traceback."""
        message = record.getMessage()
        if record.exc_info:
            message += "\n" + self.formatException(record.exc_info)
        return message


class _Text(_Line):
    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields = "".join(f" {key}={value}" for key, value in self.fields(record).items())
        message = _shown(self.text(record)).replace("\n", "\n    ") + _shown(fields).replace("\n", " ")
        return f"{moment}.{int(record.msecs):03d}Z {record.levelname:<7} {self.identity} {message}"


def _shown(text: str) -> str:
    """What a function says may be in it: nothing there commands a terminal, or looks like a line of its own."""
    return _COMMANDS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class _Json(_Line):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "at": record.created,
            "level": record.levelname.lower(),
            "component": self.component,
            "identity": self.identity,
            "logger": record.name,
            "message": self.text(record),
            **self.fields(record),
        }
        return msgspec.json.encode(line, enc_hook=str).decode()


class Once:
    """Logs what may be met many times a second: the same text once, until that is ``over``."""

    def __init__(self, log: logging.Logger) -> None:
        self._log, self._said = log, ""

    def say(self, level: int, text: str) -> None:
        """Unless it was the last that was said."""
        if text != self._said:
            self._log.log(level, "%s", text)
            self._said = text

    def over(self) -> None:
        """All is well: what is met from now on is new."""
        self._said = ""


def configure_logging(component: str, identity: str, settings: Settings) -> None:
    """Log to stderr, one record per line (text, or JSON with ``log_json``); ``extra=`` fields are printed too."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter((_Json if settings.log_json else _Text)(component, identity))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(settings.log_level.upper())
    logging.getLogger("nats").setLevel(logging.WARNING)
    logging.getLogger("httpx").setLevel(logging.WARNING)
