"""Asking whether there is a GPU does not use it, so that ranks which use one can be forked afterwards."""

import os
import subprocess
import sys

VARIABLE = "PYTORCH_NVML_BASED_CUDA_CHECK"


def in_a_new_process(program, **environment):
    around = {name: value for name, value in os.environ.items() if name != VARIABLE} | environment
    return subprocess.run(
        [sys.executable, "-c", program], env=around, capture_output=True, text=True, check=True, timeout=400
    ).stdout.strip()


def test_torch_asks_the_management_library_once_the_course_is_imported():
    asks = "import torch; print(torch.cuda._nvml_based_avail())"
    assert in_a_new_process(asks) == "False"
    assert in_a_new_process("import course_lib.launching.launch; " + asks) == "True"


def test_who_says_otherwise_is_left_alone():
    assert in_a_new_process(f"import course_lib, os; print(os.environ['{VARIABLE}'])", **{VARIABLE: "0"}) == "0"
