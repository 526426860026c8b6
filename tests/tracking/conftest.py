"""What is tracked does not depend on a model's width."""

from tests.narrow_presets import narrow_presets  # noqa: F401
