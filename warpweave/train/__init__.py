"""``warpweave train``: options, the training loop, and a run's output.

`options` the command line, without torch · `command` starts the ranks · `trainer` the loop of one
rank · `state` and `resume` checkpoints · `metrics`, `boards`, and `timeline` records of a run ·
`checks` and `replicas` comparisons between ranks · `elastic` replicas that join and leave ·
`server` parameter servers · `sample` and `export` commands that use a run's checkpoint.
"""
