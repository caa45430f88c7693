"""Dtype policies of Keras, which make layers cast by themselves."""

from __future__ import annotations

import sys
from typing import NamedTuple


class MixedPolicy(NamedTuple):
    """A mixed policy that is in force.

    Attributes:
        library: "keras" or "tf_keras".
        name: Such as "mixed_bfloat16".
        remedy: The call that takes it back.
    """

    library: str
    name: str
    remedy: str


def mixed_policy() -> MixedPolicy | None:
    """Returns the mixed policy of an imported library, None if there is none."""
    for library, remedy in (
        ("keras", "keras.config.set_dtype_policy('float32')"),
        ("tf_keras", "tf_keras.mixed_precision.set_global_policy('float32')"),
    ):
        precision = getattr(sys.modules.get(library), "mixed_precision", None)
        for getter in ("dtype_policy", "global_policy"):
            if hasattr(precision, getter):
                name = str(getattr(precision, getter)().name)
                if name.startswith("mixed_"):
                    return MixedPolicy(library, name, remedy)
                break
    return None
