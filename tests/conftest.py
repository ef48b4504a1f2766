"""Shared set-up: no test needs a network, and the helpers beside the tests can be imported by name."""

import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "recipes"), str(Path(__file__).resolve().parent)]
os.environ["ACCUMFT_CACHE"] = ""  # nothing is kept on disk; a test of the cache gives it a folder of its own
