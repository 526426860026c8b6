"""Names of weights in files that others wrote: what a wrapper left before them, and why they do not fit a model."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

WITHIN = r"(?:(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.)+"
"""What torch.compile, FSDP and activation checkpointing put into a name, before the module that they wrap."""
BEFORE = ("module.", "model.", "_forward_module.", "net.")
"""What DDP, Lightning and others put before all names: enough to go by where a head alone is missing."""


def own_names(
    missing: Collection[str], unexpected: Iterable[str], body: str, tied: Mapping[str, str]
) -> dict[str, str]:
    """Replacements in a file's names that make them the model's; none where that would find no weight.

    Args:
        missing: names of weights that the model has and the file lacks.
        unexpected: names that the file has and the model lacks.
        body: what the names of the model's body begin with.
        tied: see :func:`course_lib.modeling.loading._tied_names`.
    Returns:
        Replacements by pattern, in order.
    """
    wanted, prefixes, ends, wrappers = set(missing), Counter[str](), {}, 0
    for name in unexpected:
        plain, count = re.subn(WITHIN, "", name)
        parts = plain.split(".")
        cut = next(
            (
                cut
                for cut in range(len(parts) - 1)
                if (rest := ".".join(parts[cut:])) in wanted or tied.get(rest) in wanted
            ),
            None,
        )
        if cut is None:
            continue
        wrappers = max(wrappers, count)
        prefixes["".join(f"{part}." for part in parts[:cut])] += 1
        if (rest := ".".join(parts[cut:])) not in wanted:
            ends[rf"^{re.escape(rest)}$"] = tied[rest]
    prefix, _ = next(iter(prefixes.most_common(1)), ("", 0))
    if not prefixes or (prefix and prefix not in BEFORE and not _of_body(wanted, body)):
        return {}
    # transformers replaces once for each pattern: they differ by a comment
    within = {f"{WITHIN}(?#{number})": "" for number in range(wrappers)}
    return within | ({rf"^{re.escape(prefix)}": ""} if prefix else {}) | ends


def misfit(
    missing: Collection[str], unexpected: Collection[str], mismatched: Collection[tuple[Any, ...]], body: str
) -> tuple[str, str] | None:
    """Reason why a file is not of the model that its config describes, and the way out; None where it is.

    Args:
        missing: see :func:`own_names`.
        unexpected: see there.
        mismatched: names of other shapes, each with the file's and the model's.
        body: see there. A head may be missing, or of another shape: it is new then.
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
            "give the config.json of the architecture that they are of, or rename them in the file",
        )
    return what, (
        "give the config.json that they were saved with, or copy or download them again: there are fewer than it says"
    )


def _of_body(names: Iterable[str], body: str) -> list[str]:
    """Those that are of a model's body, in order; a pooler may be new."""
    return sorted(name for name in names if name.startswith(f"{body}.") and ".pooler." not in name)
