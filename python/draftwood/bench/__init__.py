"""`draftwood bench`: plain decode and every way of drafting, interleaved in one process on the same prompts.

run.py ties the rooms together: modes.py (what this model can run), prompts.py, measure.py (the clock),
rounds.py and intervals.py (the figures), report.py, claims.py, results.py and plot.py (what becomes of them).
"""
