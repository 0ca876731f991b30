"""Fault trials: what is promised of a run in which something dies, hangs, lies or is stopped, and
runs in which it happens.

`faults` what can be planted in a rank, and when · `job` a training job as a shell would start it ·
`trial` the layouts, and what a trial is given · `deaths`, `stops`, `disagreements`, `disk` the
trials · `command` ``warpweave trials``, which runs them and prints the table.
"""
