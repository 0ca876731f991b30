"""Checkpoints that survive crashes, full disks, flipped bits and hostile files: the file layer.

This layer knows names, tensors and JSON; its callers deal with models, meshes and optimizers. It
stores whole logical tensors, neither sharded nor padded. A checkpoint is therefore independent of
the mesh that wrote it, and any other mesh can load it.

On disk::

    folder/
      latest                           "step_00000123 <digest of its manifest>", replaced by rename
      step_00000123/
        manifest.json                  format, schema, step, config, state, mesh, files, tensors
        manifest.sha256                SHA-256 of manifest.json
        rank00000-00000.safetensors    file 0 of rank 0: the tensors that rank 0 wrote
        rank00001-00000.safetensors    file 0 of rank 1, ...

    saving on four ranks
    rank 0      creates step_00000123.tmp-<id>/ and broadcasts the name
    each rank   writes its tensors to its own files, flushes them, hashes what it wrote
    all         gather the reports, or the error of any rank
    rank 0      writes manifest and digest, flushes the folder, renames it to step_00000123,
                replaces `latest`
    all         read the step back, each rank some of the files, as when opening it
    rank 0      removes old steps

The rename makes a step visible completely or not at all. Opening first verifies everything (folder
listing, manifest digest and schema, sizes, safetensors headers, SHA-256 of every file), and only
then returns tensors. Nothing is ever unpickled, links are rejected, and no name in a manifest can
point outside the folder. A digest detects damage, not forgery: anyone who can write a complete,
consistent checkpoint can choose its numbers, but cannot run code.

Only one job at a time may write into a folder. All ranks of the job share the folder.

`save` and `read` one step · `background` saving during training · `steps` the folder of steps:
atomic publication, retention, and finding the newest · `manifest` the description of a step, in
strict JSON · `files` durable writes, and errors that all ranks share.
"""

from warpweave.checkpoint.background import BackgroundSaver
from warpweave.checkpoint.files import CheckpointError, CheckpointWarning
from warpweave.checkpoint.manifest import config_digest
from warpweave.checkpoint.read import CheckpointReader, open_checkpoint, open_latest
from warpweave.checkpoint.save import save_checkpoint
from warpweave.checkpoint.steps import latest

__all__ = [
    "BackgroundSaver", "CheckpointError", "CheckpointReader", "CheckpointWarning", "config_digest",
    "latest", "open_checkpoint", "open_latest", "save_checkpoint",
]  # fmt: skip
