"""One exported program: compressed HLO, and JSON that tells its parameters and first results."""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np

from gpu import checks, values

VARIANTS = (
    "float32",
    "tf_amp_float16",
    "tf_amp_bfloat16",
    "keras_policy_float16",
    "keras_policy_bfloat16",
    "upstream_float16",
    "upstream_bfloat16",
)
"""What is compared. ``tf_amp_float16-RULE`` stands for the rewrite without a rule."""
MODES = ("training", "inference")


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter of the program.

    Attributes:
        name: a variable's path, "input0" and so on for what a step is called with.
        shape: its shape.
        dtype: the name of its dtype.
        rule: what its values are; see `values.make`.
    """

    name: str
    shape: list[int]
    dtype: str
    rule: values.Rule

    def value(self) -> np.ndarray:
        """Its values."""
        return values.make(self.name, self.shape, self.dtype, self.rule)


@dataclasses.dataclass(frozen=True)
class Program:
    """What travels of one step function.

    Attributes:
        workload: the network.
        mode: "training" or "inference".
        variant: one of `VARIANTS`, or one without a rule.
        error: why there is no HLO; "" where there is one.
        parameters: in the order of the HLO.
        outputs: how many results come before the new values of variables.
        reference: what the first step gave where the program was exported (`checks.differences`),
            None where it was not run.
        facts: what it was made with, for people.
    """

    workload: str
    mode: str
    variant: str
    error: str = ""
    parameters: tuple[Parameter, ...] = ()
    outputs: int = 0
    reference: dict[str, Any] | None = None
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """The stem of its files."""
        return f"{self.workload}.{self.mode}.{self.variant}"

    @property
    def dtype(self) -> str:
        """The dtype that its products are meant to have."""
        found = self.variant.partition("-")[0].rpartition("_")[2]
        return found if found in checks.OUTPUT_TOLERANCE else "float32"

    def write(self, folder: Path, hlo: bytes = b"") -> int:
        """Writes the program; returns how many bytes that took."""
        text = json.dumps(dataclasses.asdict(self)).encode()
        (folder / f"{self.name}.json").write_bytes(text)
        packed = gzip.compress(hlo, mtime=0) if hlo else b""
        if packed:
            (folder / f"{self.name}.hlo.pb.gz").write_bytes(packed)
        return len(text) + len(packed)

    def hlo(self, folder: Path) -> bytes:
        """The serialized HLO module."""
        return gzip.decompress((folder / f"{self.name}.hlo.pb.gz").read_bytes())


def read_programs(folder: Path) -> list[Program]:
    """The programs of a folder, in the order of `VARIANTS` within each workload and mode.

    Raises:
        FileNotFoundError: the folder holds none.
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        data = json.loads(path.read_text())
        if "variant" in data:
            data["parameters"] = tuple(Parameter(**each) for each in data["parameters"])
            found.append(Program(**data))
    if not found:
        raise FileNotFoundError(
            f"{folder} holds no exported program. `python -m gpu.export {folder}` writes some."
        )
    rank = {variant: place for place, variant in enumerate(VARIANTS)}
    return sorted(
        found,
        key=lambda p: (
            MODES.index(p.mode),
            p.workload,
            rank.get(p.variant, len(VARIANTS)),
            p.variant,
        ),
    )
