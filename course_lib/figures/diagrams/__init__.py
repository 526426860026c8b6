"""Diagrams of structure, drawn by code: the kit, and the diagrams of several lessons.

Each function of a diagram returns a :class:`~course_lib.figures.diagrams.base.Diagram`, which a notebook shows as SVG.
"""
