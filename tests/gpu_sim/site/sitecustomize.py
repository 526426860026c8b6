"""Gives every process the simulated GPUs that GPU_SIM asks for, before torch is imported, which looks for them once."""

import importlib.util
import os
import sys
from pathlib import Path

if os.environ.get("GPU_SIM", "0") != "0" and "gpu_sim" not in sys.modules:
    folder = Path(__file__).resolve().parents[1]
    spec = importlib.util.spec_from_file_location(
        "gpu_sim", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec and spec.loader
    sys.modules["gpu_sim"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        module.install()
    except Exception as error:  # which Python would print, and go on without GPUs
        raise SystemExit(f"gpu_sim: {error}") from error
