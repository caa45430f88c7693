"""``tf-amp diagnose``: the first converted node that loses its values, and what gradients lose."""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tf_amp.cli.numbers import amount, count, count_or_none
from tf_amp.cli.options import add_target, config_for
from tf_amp.cli.strict_json import strict_json
from tf_amp.env_config import read_settings
from tf_amp.terminal import say
from tf_amp.tool_error import WrongCallError

if TYPE_CHECKING:
    from graph_passes import PrecisionConfig
    from tf_amp.diagnosis.diagnose import Diagnosis

_USUAL = frozenset(("serving_default",))


def add_parser(commands: Any) -> None:
    """Adds the command to the sub-parsers of ``tf-amp``."""
    parser = commands.add_parser(
        "diagnose",
        help="name the first converted node that loses its values on a batch",
        description="Runs a model or a training step in float32 and in mixed precision on one "
        "batch, on copies of its variables, and names the first converted node whose values are "
        "not finite, or far from float32 where its inputs are not: with the reason for its "
        "conversion, its Python line and the rule that keeps it float32. For float16, tells what "
        "is flushed to 0 of the gradients of a training step, and the loss scale that loses least. "
        "Settings come from the environment.",
        epilog="Exit status: 0 if nothing is amiss; 1 if it cannot be run; 2 for a wrong call; 3 "
        "if a node was found.",
    )
    parser.add_argument(
        "target",
        metavar="MODEL|MODULE:FUNCTION",
        help="a float32 model (SavedModel, .pb, .keras), or a function without arguments that "
        "gives a training step and the list of its arguments, such as "
        "(model.train_step, [(x, y)])",
    )
    parser.add_argument(
        "--inputs",
        metavar="FILE.npz|FILE.tfrecord|MODULE:FUNCTION",
        help="of a model: its samples, as of `tf-amp compare`, run one after another until a node "
        "is found (default: random by signature)",
    )
    parser.add_argument("--batch", type=count, default=8, help="rows of random inputs (default: 8)")
    parser.add_argument(
        "--seed", type=count_or_none, default=0, help="of random inputs (default: 0)"
    )
    parser.add_argument(
        "--signature", metavar="KEY", help="of a model: this one (default: serving_default, or all)"
    )
    add_target(parser)
    parser.add_argument(
        "--tolerance",
        type=amount,
        metavar="X",
        help="how far a node may be from float32, by the length of its value, where all is finite "
        "(default: 0.05 for float16, 0.25 for bfloat16)",
    )
    parser.add_argument(
        "--loss-scale",
        type=amount,
        metavar="X",
        help="what gradients are judged at (default: that by which the step multiplies its loss)",
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=run, needs_tensorflow=True)


def run(arguments: argparse.Namespace) -> int:
    """Diagnoses the target and prints what was found."""
    config = config_for(read_settings(), arguments)
    if arguments.loss_scale is not None and not arguments.loss_scale > 0:
        raise WrongCallError(f"--loss-scale is over 0, not {arguments.loss_scale:g}")
    is_model = Path(arguments.target).exists()
    if is_model and arguments.loss_scale is not None:
        raise WrongCallError("--loss-scale is for a training step: a model has no gradients.")
    if not is_model and ":" in arguments.target and (arguments.inputs or arguments.signature):
        raise WrongCallError("--inputs and --signature are for models: a function gives its batch.")
    diagnosed = _of_model if is_model else _of_function
    found = dict(diagnosed(arguments, config))
    if arguments.json:
        print(strict_json({name: _as_dict(one) for name, one in found.items()}))
    else:
        for name, one in found.items():
            print(f"{name} in {config.target_dtype} on {config.device}:\n\n{one}")
    return 3 if any(one.findings for one in found.values()) else 0


def _of_function(
    arguments: argparse.Namespace, config: PrecisionConfig
) -> Iterator[tuple[str, Diagnosis]]:
    from tf_amp.comparison.samples import call_named
    from tf_amp.diagnosis.diagnose import diagnose
    from tf_amp.model_files import ModelError

    made = call_named(arguments.target, "Diagnosed is a model or")
    is_pair = isinstance(made, tuple) and len(made) == 2
    if not is_pair or not callable(made[0]) or not isinstance(made[1], (list, tuple)):
        raise ModelError(
            f"{arguments.target!r} must give a function and the list of its arguments, such as "
            f"(model.train_step, [(x, y)]). Received a value of type {type(made).__name__}."
        )
    step, batch = made
    yield (
        getattr(step, "__name__", arguments.target),
        diagnose(
            step, batch, config, tolerance=arguments.tolerance, loss_scale=arguments.loss_scale
        ),
    )


def _of_model(
    arguments: argparse.Namespace, config: PrecisionConfig
) -> Iterator[tuple[str, Diagnosis]]:
    from tf_amp.comparison.callables import load_signatures
    from tf_amp.comparison.samples import random_samples, read_samples, samples_for
    from tf_amp.comparison.steps import fed, step_of
    from tf_amp.conversion.convert import as_saved_model
    from tf_amp.conversion.progress import Progress
    from tf_amp.diagnosis.diagnose import diagnose_step
    from tf_amp.model_files import ModelError

    with (
        tempfile.TemporaryDirectory(prefix="tf-amp-") as room,
        Progress(say) as progress,
        as_saved_model(Path(arguments.target), Path(room), progress) as model,
    ):
        signatures = load_signatures(model)
        # A model of Keras has more, which are the same.
        usual = _USUAL & signatures.keys() or signatures.keys()
        chosen = usual if arguments.signature is None else {arguments.signature}
        if unknown := chosen - signatures.keys():
            raise ModelError(
                f"The model has no signature {min(unknown)!r}. It has: {', '.join(signatures)}."
            )
        given = read_samples(arguments.inputs, batch=arguments.batch) if arguments.inputs else None
        # Those of a function come once.
        given = list(given) if isinstance(given, Iterator) else given
        for key in sorted(chosen):
            signature = signatures[key]
            step = step_of(signature)
            samples = (
                random_samples(
                    signature.inputs, seed=arguments.seed, batch=arguments.batch, count=1
                )
                if given is None
                else samples_for(given, signature.inputs)
            )
            last = None
            for sample in samples:
                last = diagnose_step(
                    fed(step, signature, sample), config, tolerance=arguments.tolerance
                )
                if last.findings:
                    break
            assert last is not None  # without samples that was said
            yield key, last


def _as_dict(found: Diagnosis) -> dict[str, Any]:
    findings = [
        {
            "node": finding.remark.node,
            "op": finding.remark.op,
            "function": finding.function,
            "why": finding.why,
            "reason": finding.remark.reason,
            "lines": list(finding.remark.lines),
            "largest": finding.largest,
            "non_finite": finding.non_finite,
            "error": finding.error,
            "rule": finding.rule.node,
        }
        for finding in found.findings
    ]
    told = {
        "findings": findings,
        "rules": found.rules if findings else "",
        "finite": found.finite,
        "float32_finite": found.float32_finite,
        "tensors": found.tensors,
    }
    if found.gradients is not None:
        told["gradients"] = {
            "loss_scale": found.gradients.loss_scale,
            "best_loss_scale": found.gradients.best_loss_scale,
            "of_variables": [
                {**dataclasses.asdict(gradient), "share": gradient.share}
                for gradient in found.gradients.of_variables
            ],
        }
    return told
