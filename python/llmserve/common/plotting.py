"""Axes to draw on, with matplotlib (`pip install 'llmserve[plot]'`), imported when asked for."""

from typing import Any

from llmserve.errors import NotSupported


def axes_or_new(axes: Any) -> Any:
    """`axes`, or those of a new figure. Raises NotSupported without matplotlib."""
    if axes is not None:
        return axes
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NotSupported(
            "plots need matplotlib; install it with: pip install 'llmserve[plot]'"
        ) from error
    return Figure(layout="tight").subplots()
