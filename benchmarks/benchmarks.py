"""The package `benchmarks` where one of its files is run as `python benchmarks/x.py`.

Python then looks in this folder alone, and not in the one that it lies in.
"""

import sys
from pathlib import Path

__path__ = [str(Path(__file__).parent)]
sys.path.insert(1, str(Path(__file__).parents[1]))
