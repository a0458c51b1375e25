"""From arguments to a loaded model: checks, placement, contexts, devices, RPC servers."""
