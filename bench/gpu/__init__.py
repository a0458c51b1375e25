"""The parts of bench/run.py: speed on a GPU at a given acceptance, ours beside stock llama-server's."""
