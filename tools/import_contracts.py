"""A kind of contract for import-linter: what packages may import at all, however many others there are to choose."""

import sys
from typing import Any

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


class OnlyContract(Contract):
    """Packages import nothing but each other, the standard library and what is named, also by way of others.

    Options:
        source_modules: the packages.
        allowed_modules: other modules, and what lies below them.
    """

    source_modules = fields.SetField(subfield=fields.StringField())
    allowed_modules = fields.SetField(subfield=fields.StringField())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Whether they keep to it, and each chain of imports by which they do not."""
        sources: Any = self.source_modules
        allowed = {*sources, *self.allowed_modules, *sys.stdlib_module_names}  # type: ignore[misc]
        chains = {
            source: [
                graph.find_shortest_chain(source, found, as_packages=True)
                for found in sorted(graph.find_upstream_modules(source, as_package=True))
                if not _is_below(found, allowed)
            ]
            for source in sorted(sources)
        }
        return ContractCheck(kept=not any(chains.values()), metadata={"chains": chains})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Print the chains."""
        for source, chains in check.metadata["chains"].items():
            for chain in chains:
                output.print_error(f"{source} may not import {chain[-1]}: {' -> '.join(chain)}", bold=False)


def _is_below(module: str, packages: set[str]) -> bool:
    parts = module.split(".")
    return any(".".join(parts[:length]) in packages for length in range(1, len(parts) + 1))
