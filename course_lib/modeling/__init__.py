"""Models and tokenizers by Hub name, local folder or preset, fitted to a task and to each other."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from course_lib.modeling.loading import LoadedModel, load, load_trained

__all__ = ["LoadedModel", "load", "load_trained"]


def __getattr__(name: str) -> Any:
    # On first use: transformers' model code takes three seconds, which a look at MiniLM's files need not pay.
    if name in __all__:
        from course_lib.modeling import loading

        return getattr(loading, name)
    raise AttributeError(f"module {__name__} has no attribute {name}")
