"""Mutants of the solutions that are as good as these, by exercise and change, each with the reason."""

EQUIVALENT: dict[tuple[str, str], str] = {}
