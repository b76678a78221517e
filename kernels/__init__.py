"""GPU kernels, each beside a plain torch twin in reference.py; imports nothing of ours."""
