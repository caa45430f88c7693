"""Programs of other people's packages, as their users write them; see `field_trials.py`."""

from __future__ import annotations

from field_programs import (
    keras_applications,
    keras_hub,
    smaller_packages,
    tensorflow_probability,
    tensorflow_recommenders,
    tf_agents,
    tf_keras,
    transformers,
)
from field_programs.program import Program

PROGRAMS: dict[str, Program] = {
    program.name: program
    for module in (
        keras_applications,
        keras_hub,
        smaller_packages,
        tensorflow_probability,
        tensorflow_recommenders,
        tf_agents,
        tf_keras,
        transformers,
    )
    for program in module.PROGRAMS
}
"""Name ("package/what") -> program."""
