"""``warpweave doctor``: check and time this machine's kernels, links, and mesh axes.

`options` the command line, without torch · `command` runs the checks, writes the page · `check` a
check and its verdict · `machine` versions, devices, and links · `kernels` each family against
`kernels.reference` · `ranks` axes and fused products over ranks · `times` next to other libraries.
"""
