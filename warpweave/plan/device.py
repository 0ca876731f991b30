"""Hardware by name: GPU figures, memory, GPUs per node, and the efficiency that training reaches.

The data sheets' figures are those of ``kernels.devices``, the only table of GPUs. A user's file
(TOML or JSON) has fields of `Hardware`, `Device` and `Efficiency` by name. They override those of
its ``base``, a row of `HARDWARE`, if it names one:

    base = "h100"
    network = 12.5e9      # bytes per second in one direction, per GPU
    node = 4              # GPUs that NVLink connects
    far = 0.9             # the fraction of the network's speed that collectives reach
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

from warpweave.kernels.devices import A40, A100, B200, H100, H200, H800, L40S, Device
from warpweave.kernels.structure import read_document, structure
from warpweave.kernels.words import did_you_mean


@dataclass(frozen=True)
class Efficiency:
    """The fractions of a data sheet's figures that training reaches: one set per GPU, for all
    models.

    Attributes:
        product: fraction of the FLOP/s, in large matrix products.
        attention: fraction of the FLOP/s, in fused attention.
        elementwise: fraction of the memory's bytes per second, in elementwise kernels.
        near, far: fraction of NVLink's and of the network's bytes per second, in collectives.
        latency: seconds of a kernel or message that has no work.
    """

    product: float
    attention: float
    elementwise: float
    near: float
    far: float
    latency: float


@dataclass(frozen=True)
class Hardware:
    """A cluster of identical GPUs.

    Attributes:
        name: as given in the option.
        device: the GPU's figures.
        capacity: bytes of its memory.
        efficiency: what training reaches of the figures.
        node: GPUs that NVLink connects.
    """

    name: str
    device: Device
    capacity: float
    efficiency: Efficiency
    node: int = 8

    @property
    def products(self) -> float:
        """FLOP/s of a large matrix product."""
        return self.device.half * self.efficiency.product

    @property
    def stream(self) -> float:
        """Bytes per second that an elementwise kernel moves."""
        return self.device.memory * self.efficiency.elementwise

    def joins(self, inner: int, size: int) -> bool:
        """Return True if every group of `size` ranks, neighbors `inner` apart, is within a node.

        Three ranks in nodes of eight are not: those of the third group are 6 7 | 8.
        """
        return self.node % (inner * size) == 0

    def bandwidth(self, inner: int, size: int) -> float:
        """Return a collective's bytes per second and rank: `size` ranks, neighbors `inner` apart.

        Within a node this is NVLink's speed. Across nodes it is that of the network adapters of the
        group's ranks in a node, which its rings share. For example, for one of the two dp groups of
        two nodes of 4 GPUs, tp = 2, dp = 4:

            node 0   [0] 1 [2] 3      rings 0 2 | 4 6 and 2 0 | 6 4 leave a node by two adapters
            node 1   [4] 5 [6] 7
        """
        near = self.device.nvlink * self.efficiency.near
        if self.joins(inner, size):
            return near
        return min(near, max(1, self.node // inner) * self.device.network * self.efficiency.far)


# Fitted to half of the published rows in benchmarks/plan_rows.py; benchmarks/results/plan/rows.md
# shows how well they predict the other half. `far` of A100 80GB is that of 40GB: most of its own
# rows are of one cluster with a quarter of a DGX's network. There are no rows of A40, L40S and
# H800, and too few of H200: these use the values of the most similar chip.
_A100_40 = Efficiency(0.70, 0.61, 0.58, 0.70, 0.68, 4e-6)
_A100 = Efficiency(0.68, 0.63, 0.57, 0.79, 0.68, 4e-6)
_H100 = Efficiency(0.62, 0.36, 0.45, 0.75, 0.40, 4e-6)
_B200 = Efficiency(0.65, 0.37, 0.60, 0.70, 0.70, 4e-6)

HARDWARE = {
    h.name: h
    for h in (
        Hardware("a100-40g", replace(A100, memory=1.555e12), 40e9, _A100_40),
        Hardware("a100-80g", A100, 80e9, _A100),
        Hardware("a40", A40, 48e9, _A100),
        Hardware("l40s", L40S, 48e9, _H100),
        Hardware("h100", H100, 80e9, _H100),
        Hardware("h800", H800, 80e9, _H100),
        Hardware("h200", H200, 141e9, _H100),
        Hardware("b200", B200, 180e9, _B200),
    )
}
_FIGURES = {"half": "FLOP/s in 16 bits", "memory": "bytes/s of memory",
            "nvlink": "bytes/s over NVLink", "network": "bytes/s over the network"}  # fmt: skip
_FIGURE = Annotated[float, "a positive number", lambda x: 0 < x < math.inf]
_PART = Annotated[float, "a fraction above 0 and at most 1", lambda x: 0 < x <= 1]
_WHOLE = Annotated[
    Any, "a whole number of GPUs", lambda x: type(x) in (int, float) and x > 0 and x % 1 == 0
]
_FIELDS: dict[str, tuple[str, Any]] = {  # of a file: the record that has the field, and its type
    **dict.fromkeys(_FIGURES, ("device", _FIGURE)),
    "capacity": ("hardware", _FIGURE),
    "node": ("hardware", _WHOLE),
    **{f.name: ("efficiency", _PART) for f in fields(Efficiency)},
    "latency": ("efficiency", _FIGURE),
}


def find_hardware(name: str) -> Hardware:
    """Return the row of `HARDWARE` of that name, or the hardware of the file of that name. Raise
    ValueError if there is no such row or file, or if a field is unknown or missing."""
    if name in HARDWARE:
        found = HARDWARE[name]
    elif Path(name).suffix in (".toml", ".json"):
        found = _read_hardware(Path(name))
    else:
        raise ValueError(
            f"hw must be one of {', '.join(HARDWARE)}, or a .toml or .json file, got {name!r}"
            f"{did_you_mean(name, HARDWARE)}"
        )
    for figure, what in _FIGURES.items():
        if not getattr(found.device, figure) > 0:
            raise ValueError(
                f"{name} has no value for {figure} ({what}); set it in a .toml or .json file with "
                f'base = "{name if name in HARDWARE else "h100"}", and pass that file as hw'
            )
    return found


def _read_hardware(path: Path) -> Hardware:
    """Read hardware from a file; a ValueError names the file and the problem."""
    given = read_document(path, "JSON" if path.suffix == ".json" else "TOML")
    given = structure(dict, given, str(path))
    base = given.pop("base", None)
    if base is not None and base not in [*HARDWARE]:
        known, near = ", ".join(HARDWARE), did_you_mean(str(base), HARDWARE)
        raise ValueError(f"{path}: base must be one of {known}, got {base!r}{near}")
    own: dict[str, dict[str, Any]] = {"device": {}, "efficiency": {}, "hardware": {}}
    for key, value in given.items():
        if key not in _FIELDS:
            raise ValueError(f"{path}: unknown field {key}; expected base, {', '.join(_FIELDS)}")
        record, kind = _FIELDS[key]
        own[record][key] = structure(kind, value, f"{path}: {key}")
    missing = [key for key in (*_FIGURES, "capacity") if base is None and key not in given]
    if missing:
        raise ValueError(
            f"{path} has no base; set base to one of {', '.join(HARDWARE)}, or set "
            f"{', '.join(missing)}"
        )
    like = HARDWARE[base or "h100"]
    device = replace(like.device, name=path.stem, **own["device"])
    efficiency = replace(like.efficiency, **own["efficiency"])
    return replace(like, name=path.stem, device=device, efficiency=efficiency, **own["hardware"])
