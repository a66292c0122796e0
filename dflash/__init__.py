"""Training of DFlash drafters. Of `env` it knows the voice of errors and the directory it is handed, nothing else."""

import os

HANDED = dict(os.environ)
"""The environment as it was handed to this process: torch writes directories of its own into it when it is imported."""
