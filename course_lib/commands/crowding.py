"""Warns of more ranks than a machine has cores or memory for, with the figures, before they start."""

RANK_BYTES = 200 * 2**20
"""What a forked rank takes beside its model and its batch: about the pages of Python, torch and gloo it writes."""


def crowding(ranks: int, cores: int, available: int) -> str | None:
    """A warning in one line, or None where the ranks have room.

    Args:
        ranks: to be started on this machine's CPUs.
        cores: that this process may use.
        available: bytes of memory that can be allocated now.
    """
    needed = ranks * RANK_BYTES
    parts = []
    if ranks > cores:
        parts.append(
            f"{ranks} ranks share {cores} core{'s' * (cores > 1)}, so they take turns and are no faster than "
            f"--num_processes {cores}"
        )
    if needed > available:
        parts.append(
            f"{ranks} ranks take at least {needed / 2**30:.1f} GiB before they hold a model, and "
            f"{available / 2**30:.1f} GiB are free: the system may end some of them"
        )
    return "; ".join(parts) or None
