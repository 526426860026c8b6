"""Models and tokenizers by Hub name, local folder or preset, fitted to a task and to each other."""

from course_lib.modeling.loading import LoadedModel, load, load_trained

__all__ = ["LoadedModel", "load", "load_trained"]
