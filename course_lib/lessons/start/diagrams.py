"""A diagram of how ranks find each other: launchers, the rendezvous at a store, and the connections made from it."""

from course_lib.errors import ConfigError
from course_lib.figures.diagrams.base import Diagram
from course_lib.figures.diagrams.collectives import SENT
from course_lib.figures.diagrams.marks import GREY, INK, MARGIN, SMALL, WIDTH, Box, tint
from course_lib.figures.style import COLOURS


def rendezvous(machines: int = 2, per_machine: int = 2) -> Diagram:
    """Meeting of the ranks: what a launcher tells each process, and whom each process asks first.

    Args:
        machines: 1 or 2.
        per_machine: ranks on each, 1 to 3.
    Raises:
        ConfigError: another number of either.
    Source: ``torch.distributed``, initialization by environment variables, and its ``TCPStore``.
    """
    if machines not in (1, 2) or not 1 <= per_machine <= 3:
        raise ConfigError(
            f"a diagram of {machines} machines with {per_machine} ranks each",
            "take 1 or 2 machines with 1 to 3 ranks each",
        )
    world = machines * per_machine
    diagram = Diagram(
        f"{world} processes become {world} ranks: each is told its number and one address, and finds the others there",
        f"{machines} machines, each with a launcher that starts {per_machine} processes and gives each its RANK, its "
        "LOCAL_RANK, the WORLD_SIZE, and one address. Every process connects to the store that listens "
        "at that address, writes its own address there, reads those of the others, and connects to them.",
    )
    left, top = MARGIN + 2, diagram.head + 8
    width = (WIDTH - 2 * left + 16) / machines
    text, fill = "the store, which listens at\nMASTER_ADDR:MASTER_PORT", tint(COLOURS["data"], 0.35)
    wide = min(width - 56, 300)
    store = diagram.box(left + 20, top + 224, wide, 40, text, fill=fill, radius=6, size=SMALL, means="store")
    pitch, fill = (width - 32) / per_machine, tint(COLOURS["parameters"], 0.18)
    for machine in range(machines):
        x = left + machine * width
        launcher = _machine(diagram, x, top, width, machine)
        for local in range(per_machine):
            rank = machine * per_machine + local
            means = ("rank", rank, local)
            box = diagram.box(x + 8 + local * pitch, top + 92, pitch - 8, 74, fill=fill, radius=6, means=means)
            diagram.text(*box.centre, f"RANK={rank}\nLOCAL_RANK={local}\nWORLD_SIZE={world}", SMALL)
            start = launcher.edge("bottom", (local + 1) / (per_machine + 1))
            diagram.arrow(start, box.edge("top"), width=1.4, means=("starts", rank))
            end, turn = store.edge("top", (rank + 1) / (world + 1)), top + 200
            if machine:
                end = store.right, store.y + 10 + 8 * local
                turn = end[1]
            diagram.arrow(box.edge("bottom"), (box.centre[0], turn), end, colour=SENT, means=("asks", rank))
    for down, line in (
        (18, "1. The launchers start the processes.  2. All meet at the store: the rendezvous."),
        (34, "3. Each reads the others' addresses there, and from then on they talk directly."),
    ):
        diagram.note(left, store.bottom + down, line, INK)
    return diagram


def _machine(diagram: Diagram, x: float, y: float, width: float, number: int) -> Box:
    """A machine's frame and, in it, its launcher, which is returned."""
    diagram.box(x, y, width - 16, 186, dashed=True, stroke=GREY, radius=8, means=("machine", number))
    diagram.note(x + 10, y + 14, f"machine {number}")
    fill, means = tint(COLOURS["forward"], 0.4), ("launcher", number)
    return diagram.box(x + width / 2 - 78, y + 24, 140, 28, "launcher", fill=fill, radius=6, means=means)
