"""Tests run on one thread each and find `small`, the small federations."""

import sys
from pathlib import Path

import torch
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)
settings.register_profile("flowdup", deadline=None, max_examples=50, derandomize=True)
settings.load_profile("flowdup")
