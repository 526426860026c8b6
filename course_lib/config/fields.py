"""Kinds of fields, and what all sections have in common."""

from typing import Annotated

from annotated_types import Ge, Lt

Positive = Annotated[int, Ge(1)]
NotNegative = Annotated[int, Ge(0)]
Fraction = Annotated[float, Ge(0), Lt(1)]


class Strict:
    """Unknown keys are errors (read by pydantic when a mapping is validated)."""

    __pydantic_config__ = {"extra": "forbid"}
