"""Tells all ranks what rank 0 says, through the process manager of Open MPI or Slurm (PMIx), if its library is there.

The library is loaded by its name and called directly: no MPI is needed. Structures and constants are those of the PMIx
standard, version 2 to 5 (https://pmix.org, chapter "Data structures and types").
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping

_LIBRARY = "libpmix.so.2"
_KEY = b"phalanx"
_SUCCESS = 0
_STRING = 3  # PMIX_STRING
_GLOBAL = 3  # PMIX_GLOBAL: for ranks of every node


class _ProcessId(ctypes.Structure):
    _fields_ = [("namespace", ctypes.c_char * 256), ("rank", ctypes.c_uint32)]


class _Value(ctypes.Structure):
    # The union behind `kind` holds up to 24 bytes; of them only a string is used here.
    _fields_ = [("kind", ctypes.c_uint16), ("string", ctypes.c_char_p), ("rest", ctypes.c_uint64 * 2)]


def is_there(env: Mapping[str, str]) -> bool:
    """Returns whether a PMIx process manager started this process, and its library is installed."""
    return "PMIX_NAMESPACE" in env and "PMIX_RANK" in env and _library() is not None


def exchange(text: str | None, seconds: float) -> str:
    """Returns rank 0's text on every rank; the others pass None.

    All ranks call it, once. Raises OSError if not all of them do so within so many seconds, or the library fails.
    """
    answers: list[str | OSError] = []

    def call() -> None:
        try:
            answers.append(_exchange(text))
        except OSError as error:
            answers.append(error)

    # The library waits without limit for a rank that does not come.
    thread = threading.Thread(target=call, name="phalanx-pmix", daemon=True)
    thread.start()
    thread.join(seconds)
    if not answers:
        raise TimeoutError(f"not all ranks came within {seconds:g} s")
    if isinstance(answers[0], OSError):
        raise answers[0]
    return answers[0]


def _library() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError:
        return None


def _exchange(text: str | None) -> str:
    library = _library()
    if library is None:
        raise OSError(f"{_LIBRARY} is not installed")

    def call(name: str, *arguments: object) -> None:
        if (status := getattr(library, name)(*arguments)) != _SUCCESS:
            raise OSError(f"{name} returned {status}")

    me = _ProcessId()
    call("PMIx_Init", ctypes.byref(me), None, ctypes.c_size_t(0))
    try:
        if text is not None:
            value = _Value(_STRING, text.encode())
            call("PMIx_Put", ctypes.c_uint8(_GLOBAL), _KEY, ctypes.byref(value))
            call("PMIx_Commit")
        call("PMIx_Fence", None, ctypes.c_size_t(0), None, ctypes.c_size_t(0))
        first, found = _ProcessId(me.namespace, 0), ctypes.POINTER(_Value)()
        call("PMIx_Get", ctypes.byref(first), _KEY, None, ctypes.c_size_t(0), ctypes.byref(found))
        if found.contents.kind != _STRING:
            raise OSError("PMIx_Get returned no text")
        return found.contents.string.decode(errors="replace")
    finally:
        library.PMIx_Finalize(None, ctypes.c_size_t(0))
