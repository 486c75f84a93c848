"""What notebooks show of an object: a page of its own, in a frame that neither reads nor changes the notebook."""

from __future__ import annotations

from html import escape
from importlib import import_module
from typing import ClassVar


class ShownInNotebooks:
    """The base of what the Python API returns and a page shows."""

    __slots__ = ()
    page: ClassVar[str]
    """The function that makes the HTML document of such an object, as module:function."""
    height: ClassVar[int] = 640
    """Pixels of the frame."""

    def _repr_html_(self) -> str:
        module, _, name = self.page.partition(":")
        document = escape(getattr(import_module(module), name)(self))
        style = f"width:100%;height:{self.height}px;border:0"
        return f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{document}"></iframe>'
