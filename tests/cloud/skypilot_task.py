"""Run with SkyPilot on the path: what its loader and its checks make of tasks.

    python skypilot_task.py < texts.json

One JSON list goes in, of the tasks' YAML; one comes out on the last line: what was loaded, or the text of the error.
"""

import json
import sys
from pathlib import Path

import sky
from sky import exceptions
from sky.jobs import recovery_strategy  # noqa: F401 - registers the strategies that job_recovery may name
from sky.utils import registry


def loaded(text: str) -> dict | str:
    file = Path("task.yaml")
    file.write_text(text, encoding="utf-8")
    try:
        task = sky.Task.from_yaml(str(file))
        task.validate()
        [resources] = task.resources
        recovery = resources.job_recovery and resources.job_recovery["strategy"]
        # Their own check of this name refuses it on their server only.
        strategy = registry.JOBS_RECOVERY_STRATEGY_REGISTRY.from_str(recovery)
    except (ValueError, exceptions.InvalidSkyPilotConfigError) as error:
        return str(error)
    return {
        "name": task.name,
        "num_nodes": task.num_nodes,
        "accelerators": resources.accelerators,
        "cpus": resources.cpus,
        "disk_size": resources.disk_size,
        "spot": resources.use_spot,
        "recovery": strategy and strategy.__name__,
        "workdir": task.workdir,
        "setup": task.setup,
        "run": task.run,
    }


print()
print(json.dumps([loaded(text) for text in json.load(sys.stdin)]))
