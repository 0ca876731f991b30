"""Imported last by the forkserver of `ranks`: the garbage collectors of its processes then skip all
modules loaded before, so they share their memory and end sooner."""

import gc

gc.freeze()
