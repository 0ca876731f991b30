"""The records of all parameters of a module."""

from __future__ import annotations

from torch import nn

from warpweave.parallel.shard import ParamRecord


def collect_records(module: nn.Module, prefix: str = "") -> dict[str, ParamRecord]:
    """Map the full name of every parameter of `module` to its record.

    A layer of this package keeps ``self.records``, which maps the short names of its own parameters
    to their records. Full names are those of ``named_parameters``, with `prefix` in front. A
    parameter of a foreign module has no record and gets one: replicated over the tensor axis, with
    weight decay if it is a matrix.

    Examples:
        >>> from warpweave import TransformerBlock
        >>> records = collect_records(TransformerBlock(64, 8, 256))
        >>> records["attention.qkv.weight"].shape
        (192, 64)
    """
    records: dict[str, ParamRecord] = {}
    for path, child in module.named_modules(prefix=prefix):
        own = getattr(child, "records", {})
        own = own if isinstance(own, dict) else {}  # an attribute of a foreign module
        for short, param in child.named_parameters(recurse=False):
            name = f"{path}.{short}" if path else short
            record = own.get(short)
            if record is None:
                record = ParamRecord(short, tuple(param.shape), decay=param.ndim >= 2)
            records[name] = record.renamed(name)
    return records
