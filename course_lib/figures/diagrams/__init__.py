"""Drawn diagrams of structure, from code: what is cut, sent, held and waited for. One module per family.

Each function returns a :class:`~course_lib.figures.diagrams.base.Diagram`, which a notebook shows as SVG.
"""
