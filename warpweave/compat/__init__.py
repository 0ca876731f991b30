"""Drop-in replacements for other libraries, with the kernels of this one: change one import.

`flash_attn` has the functions of flash-attention 2 · `liger` has the modules of Liger-Kernel. Both
accept the arguments of their namesakes, in the same order and with the same meaning. Anything that
the kernels do not support raises an error that names the argument. Arguments that are only hints
about speed are accepted, and documented as having no effect.
"""
