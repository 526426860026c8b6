"""Widgets with a static picture beside them, for pages that can show none."""

import base64
import io
from typing import Any

import ipywidgets as widgets
from matplotlib.figure import Figure

from course_lib import learner_files

VIEW = "application/vnd.jupyter.widget-view+json"


def view(widget: widgets.DOMWidget) -> dict[str, Any]:
    """The entry of a display's bundle that shows a widget."""
    return {VIEW: {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}}


def bundle(widget: widgets.DOMWidget, picture: bytes, said: str) -> dict[str, Any]:
    """A display's bundle: a static picture, and before a live page the widget too.

    Args:
        widget: what a live page shows.
        picture: PNG, for all other pages.
        said: for a terminal.
    """
    data = {"text/plain": said, "image/png": base64.b64encode(picture).decode()}
    return data | (view(widget) if learner_files.is_live() else {})


def png(figure: Figure) -> bytes:
    """A figure as PNG, at the resolution that it was made for."""
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=figure.dpi, bbox_inches="tight")
    return image.getvalue()
