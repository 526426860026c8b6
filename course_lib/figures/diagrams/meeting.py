"""A diagram of how ranks find each other: launchers, the rendezvous at a store, and the connections made from it."""

from course_lib.errors import ConfigError
from course_lib.figures.diagrams.base import Diagram
from course_lib.figures.diagrams.collectives import SENT
from course_lib.figures.diagrams.marks import GREY, MARGIN, SMALL, WIDTH, tint
from course_lib.figures.style import COLOURS


def rendezvous(machines: int = 2, per_machine: int = 2) -> Diagram:
    """What a launcher tells each process, and whom each process asks first.

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
    store = diagram.box(
        left + 20,
        top + 224,
        min(width - 56, 300),
        40,
        "the store, which listens at\nMASTER_ADDR:MASTER_PORT",
        fill=tint(COLOURS["data"], 0.35),
        radius=6,
        size=SMALL,
        means="store",
    )
    for machine in range(machines):
        x = left + machine * width
        diagram.box(x, top, width - 16, 186, dashed=True, stroke=GREY, radius=8, means=("machine", machine))
        diagram.text(x + 10, top + 14, f"machine {machine}", SMALL, "start", GREY)
        launcher = diagram.box(
            x + width / 2 - 78,
            top + 24,
            140,
            28,
            "launcher",
            fill=tint(COLOURS["forward"], 0.4),
            radius=6,
            means=("launcher", machine),
        )
        pitch = (width - 32) / per_machine
        for local in range(per_machine):
            rank = machine * per_machine + local
            box = diagram.box(
                x + 8 + local * pitch,
                top + 92,
                pitch - 8,
                74,
                fill=tint(COLOURS["parameters"], 0.18),
                radius=6,
                means=("rank", rank, local),
            )
            diagram.text(*box.centre, f"RANK={rank}\nLOCAL_RANK={local}\nWORLD_SIZE={world}", SMALL)
            diagram.arrow(
                (launcher.x + launcher.width * (local + 1) / (per_machine + 1), launcher.bottom),
                box.edge("top"),
                width=1.4,
                means=("starts", rank),
            )
            end = (store.x + store.width * (rank + 1) / (world + 1), store.y)
            across = top + 200 + 4 * machine
            if machine:
                end = (store.right, store.y + 10 + 8 * local)
                diagram.arrow(
                    (box.centre[0], box.bottom), (box.centre[0], end[1]), end, colour=SENT, means=("asks", rank)
                )
            else:
                diagram.arrow(box.edge("bottom"), (box.centre[0], across), end, colour=SENT, means=("asks", rank))
    diagram.text(
        left,
        store.bottom + 18,
        "1. The launchers start the processes.  2. All meet at the store: the rendezvous.",
        SMALL,
        "start",
    )
    diagram.text(
        left,
        store.bottom + 34,
        "3. Each reads the others' addresses there, and from then on they talk directly.",
        SMALL,
        "start",
    )
    return diagram
