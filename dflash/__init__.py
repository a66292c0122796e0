"""Training of DFlash drafters. Of `env` it knows the voice of errors and the directory it is handed, nothing else."""
