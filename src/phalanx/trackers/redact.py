"""Keeps secrets out of what trackers print: keys in the environment, and passwords in URLs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TextIO

_NAME = re.compile("KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
_SHORTEST = 6  # characters of a value that is masked: shorter ones are words such as "on"
_USER = re.compile(r"://[^/@\s]*@")


class Redactor:
    """Masks the values of variables whose names say that they are secret, and the user before a URL's host."""

    def __init__(self, environment: Mapping[str, str]):
        found = {value for name, value in environment.items() if _NAME.search(name) and len(value) >= _SHORTEST}
        self._secrets = sorted(found, key=len, reverse=True)

    def __call__(self, text: str) -> str:
        """Returns the text without secrets."""
        for secret in self._secrets:
            text = text.replace(secret, "…")
        return _USER.sub("://…@", text)


class RedactedStream:
    """A text stream that masks secrets in each piece written to it."""

    def __init__(self, stream: TextIO, redact: Redactor):
        self._stream, self._redact = stream, redact
        self.encoding = stream.encoding

    def write(self, text: str) -> int:
        self._stream.write(self._redact(text))
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return self._stream.fileno()
