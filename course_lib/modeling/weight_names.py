"""Names of weights in files that others wrote, and why they do not fit a model."""

from collections.abc import Collection, Iterable
from typing import Any


def misfit(
    missing: Collection[str], unexpected: Collection[str], mismatched: Collection[tuple[Any, ...]], body: str
) -> tuple[str, str] | None:
    """Reason why a file is not of the model that its config describes, and the way out; None where it is.

    Args:
        missing: names of weights that the model has and the file lacks.
        unexpected: names that the file has and the model lacks.
        mismatched: names of other shapes, each with the file's and the model's.
        body: what the names of the model's body begin with. A head may be missing, or of another shape: it is new then.
    """
    if shapes := sorted((key, *rest) for key, *rest in mismatched if _of_body([key], body)):
        key, theirs, ours = shapes[0][:3]
        return (
            f"{len(shapes)} are of another shape, first {key}, {list(theirs)} in the file and {list(ours)} by "
            "config.json",
            "give the weights the config.json that they were saved with",
        )
    absent = _of_body(missing, body)
    if not absent:
        return None
    what = f"{len(absent)} are missing, first {absent[0]}"
    if 2 * len(unexpected) >= len(absent):
        return (
            f"{what}, and the file has names such as {min(unexpected)}",
            "give the config.json of the architecture that they are of, or rename them in the file: what DDP, FSDP and "
            "torch.compile put before names is left out by saving the model that they wrap",
        )
    return what, (
        "give the config.json that they were saved with, or copy or download them again: there are fewer than it says"
    )


def _of_body(names: Iterable[str], body: str) -> list[str]:
    """Those that are of a model's body, in order; a pooler may be new."""
    return sorted(name for name in names if name.startswith(f"{body}.") and ".pooler." not in name)
