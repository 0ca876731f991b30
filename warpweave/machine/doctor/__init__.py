"""``warpweave doctor``: is this machine's every kernel, link and axis right, and how fast is it?

`options` the command line, without torch · `command` runs the checks, writes the page · `check` a
check and its verdict · `machine` versions, devices and links · `kernels` each family against
`kernels.reference` · `ranks` axes and fused products over ranks · `times` beside other libraries.
"""
