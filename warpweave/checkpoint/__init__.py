"""Checkpoints that survive crashes, full disks, flipped bits and hostile files: the file layer.

This room knows names, tensors and JSON; models, meshes and optimizers are its callers' business. It
stores whole logical tensors, so a checkpoint does not know the layout that wrote it.

On disk::

    folder/
      latest                       "step_00000123 <digest of its manifest>", replaced by rename
      step_00000123/
        manifest.json              format, schema, step, config, state, mesh, files, tensors
        manifest.sha256            digest of manifest.json
        rank00000-00000.safetensors ...

Saving writes ``step_00000123.tmp-<id>/``, flushes files and folder to the disk and renames the
folder: a step is there whole or not at all. Opening checks everything first (folder listing,
manifest digest and schema, sizes, safetensors headers, SHA-256 of every file) and only then hands
out a tensor. Nothing is ever unpickled, links are refused, and no name in a manifest can leave the
folder. A digest detects damage, not forgery: who can write a whole consistent checkpoint can choose
its numbers, not run code.

One job at a time writes into a folder, which all its ranks share.

`save` and `read` one step · `steps` the folder of them: how one appears whole, which stay, which is
the newest · `manifest` what a step says of itself, in strict JSON · `files` what that stands on.
"""

from warpweave.checkpoint.files import CheckpointError, CheckpointWarning
from warpweave.checkpoint.manifest import config_digest
from warpweave.checkpoint.read import CheckpointReader, open_checkpoint, open_latest
from warpweave.checkpoint.save import save_checkpoint
from warpweave.checkpoint.steps import latest

__all__ = [
    "CheckpointError",
    "CheckpointReader",
    "CheckpointWarning",
    "config_digest",
    "latest",
    "open_checkpoint",
    "open_latest",
    "save_checkpoint",
]
