"""The configuration of a run: sections of plain fields, which of them go together, files and options.

The docstring under a field is its help on the command line, where every field is an option. No torch is needed.
"""

from course_lib.config.learning import DataConfig, ModelConfig, OptimConfig, RunConfig
from course_lib.config.run import Config, Option, build, flatten, option, options

__all__ = [
    "Config",
    "DataConfig",
    "ModelConfig",
    "OptimConfig",
    "Option",
    "RunConfig",
    "build",
    "flatten",
    "option",
    "options",
]
