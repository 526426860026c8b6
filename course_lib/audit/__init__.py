"""`course audit`: is a distributed gradient right? One process against every layout, parameter by parameter.

A wrong gradient seldom shows in the loss: the first loss is computed before any gradient, and Adam divides a constant
factor out. Here a model is made on one process and on every layout of up to N ranks, two steps are taken on each, and
the first gradient of each parameter is compared. What differs is named: the parameter, the factor, and its axis.
"""

from course_lib.audit.finding import Finding
from course_lib.audit.layouts import AXES, Layout, layouts
from course_lib.audit.session import Audited, audit
from course_lib.audit.step import AuditedStep, GradientDiffers, Reference, step
from course_lib.audit.subject import Subject, gathered_shards
from course_lib.audit.verdict import Verdict

__all__ = [
    "AXES",
    "Audited",
    "AuditedStep",
    "Finding",
    "GradientDiffers",
    "Layout",
    "Reference",
    "Subject",
    "Verdict",
    "audit",
    "gathered_shards",
    "layouts",
    "step",
]
