"""The C API of draftwood.h from Python: one engine a context, its counters and its curves."""
