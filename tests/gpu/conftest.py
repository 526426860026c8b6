"""The GPUs, one machine with them a worker: simulated, or real with GPU_TESTS=hardware in the environment."""

import pytest

from course_lib.lessons import parity
from tests import cpu_by_room
from tests.gpu import training
from tests.gpu.machine import ON_HARDWARE, machine
from tests.gpu_sim.build import missing

if not ON_HARDWARE:  # as in the machine
    from tests.narrow_presets import narrow_presets  # noqa: F401


@pytest.fixture(scope="session")
def gpus():
    """A :class:`~tests.gpu.machine.Machine`: ``gpus.run(function, ...)`` calls it where there are GPUs."""
    if not ON_HARDWARE and (lacks := missing()):
        pytest.skip(lacks)
    with machine() as made:
        cpu_by_room.beside.append(made.cpu)
        yield made


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The parity task's plain loop on the CPU."""
    folder = tmp_path_factory.mktemp("plain")
    return parity.trace(parity.task(folder, 1, training_type="basic", max_steps=training.STEPS))


@pytest.fixture(autouse=True)
def _simulated_alone(request):
    """Skips on real GPUs what is marked as a test of the simulated ones."""
    mark = request.node.get_closest_marker("simulated")
    if ON_HARDWARE and mark:
        pytest.skip(f"needs the simulated device: {mark.args[0]}")
