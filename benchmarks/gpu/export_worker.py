"""One process of `export.py`: one workload in one variant, as HLO for both modes."""

from __future__ import annotations

import argparse
import itertools
import logging
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpu import checks, values
from gpu.program import MODES, Parameter, Program
from gpu.steps import complete, prepare_variant, step_function
from gpu.training_data import task_model, write_runs

_PRODUCTS = ("MatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum", "Conv2D")


def export_function(
    function: Any, arguments: Sequence[Any], known: dict[str, Any], *, runs: bool
) -> tuple[dict[str, Any], bytes]:
    """Lowers a compiled function, its variables set to values that a rule gives.

    The parameters of the HLO are the arguments, then the variables and constants that it captures;
    its results are the outputs, then the new values of the variables that it assigns.

    Args:
        function: a `tf.function` with `jit_compile=True`.
        arguments: tensors.
        known: name -> a variable; those that are not among them are called as TensorFlow does.
        runs: whether to run it once, which gives the reference.

    Returns:
        The fields of `Program` that follow, and the serialized HLO module.
    """
    import tensorflow as tf

    concrete = function.get_concrete_function(*arguments)
    variables = {variable.name: variable for variable in concrete.graph.variables} | known
    by_handle = {id(variable.handle): name for name, variable in variables.items()}
    parameters, assigned, captured = [], {}, []
    for number, tensor in enumerate(arguments):
        parameters.append(_parameter(f"input{number}", tensor.numpy()))
    constants = itertools.count()
    for tensor in concrete.captured_inputs:
        if tensor.dtype == tf.resource:
            name = by_handle[id(tensor)]
            parameter = _parameter(name, variables[name].numpy())
            variables[name].assign(parameter.value())
            assigned[name] = variables[name]
        else:
            parameter = _parameter(f"constant{next(constants)}", tensor.numpy())
            tensor = tf.constant(parameter.value())
        parameters.append(parameter)
        captured.append(tensor)
    hlo = function.experimental_get_compiler_ir(*arguments)(stage="hlo_serialized")
    concrete.set_external_captures(captured)
    given = [tf.constant(parameter.value()) for parameter in parameters[: len(arguments)]]
    fields = {
        "parameters": tuple(parameters),
        "outputs": len(tf.nest.flatten(concrete.structured_outputs)),
        "reference": _reference(concrete, given, assigned) if runs else None,
    }
    return fields, hlo


def _parameter(name: str, value: np.ndarray) -> Parameter:
    return Parameter(name, list(value.shape), value.dtype.name, values.rule_for(value))


def _reference(concrete: Any, given: list[Any], variables: dict[str, Any]) -> dict[str, Any]:
    import tensorflow as tf

    before = {name: variable.numpy() for name, variable in variables.items()}
    outputs = [tensor.numpy() for tensor in tf.nest.flatten(concrete(*given))]
    after = {name: variable.numpy() for name, variable in variables.items()}
    changed = {name: new for name, new in after.items() if not np.array_equal(new, before[name])}
    return checks.first_step(before, outputs, changed)


def _variables_of(model: Any) -> dict[str, Any]:
    """TensorFlow's variables by the paths that Keras gives them, the same in every variant."""
    every = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    return {variable.path: variable.value for variable in every}


def _program(options: argparse.Namespace, model: Any, batch: list[np.ndarray], mode: str) -> Any:
    import tensorflow as tf

    arguments = [tf.constant(array) for array in batch[: 2 if mode == "training" else 1]]
    compiled, mean_loss = options.variant != "upstream", options.steps is None
    function = step_function(model, mode, compiled=compiled, mean_loss=mean_loss)
    if options.variant == "upstream":
        from gpu.upstream_function import through_upstream

        function = through_upstream(function, arguments, options.dtype)
    if options.variant in ("keras_policy", "upstream"):
        _require_low_products(function.get_concrete_function(*arguments).graph, options.dtype)
    return export_function(function, arguments, _variables_of(model), runs=options.reference)


def _require_low_products(graph: Any, dtype: str) -> None:
    """Raises if no product is in the dtype: float32 would be compared with itself."""
    products = [op for op in graph.get_operations() if op.type in _PRODUCTS]
    if not any(op.outputs[0].dtype.name == dtype for op in products):
        raise RuntimeError(f"None of {len(products)} products is in {dtype}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--workload", required=True)
    parser.add_argument("--variant", required=True)
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--title", required=True)
    parser.add_argument("--modes", nargs="+", choices=MODES, required=True)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--reference", action="store_true")
    options = parser.parse_args()
    logging.getLogger("tf_amp").setLevel(logging.WARNING)
    prepare_variant(options.variant, options.dtype)
    import keras
    import tensorflow as tf
    import workloads

    batches = {}
    if options.steps:
        if options.variant == "float32":
            write_runs(options.folder, options.workload, options.steps, options.seeds)
        model, batch, task = task_model(options.workload, options.steps)
        batches["inference"] = list(task.held_out)
    else:
        chosen = workloads.TINY_WORKLOADS if options.small else workloads.GPU_WORKLOADS
        model, batch = chosen[options.workload].compiled(jit_compile=True)
    complete(model, options.variant, options.dtype)
    facts = {"tensorflow": tf.__version__, "keras": keras.__version__, "small": options.small}
    # Training changes the variables, which inference would have to be given anew.
    for mode in sorted(options.modes):
        program = {"workload": options.workload, "mode": mode, "variant": options.title}
        try:
            fields, hlo = _program(options, model, batches.get(mode, batch), mode)
        except Exception as error:  # what XLA or TensorFlow refuses is a result as well
            traceback.print_exc()
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"
            refused = Program(**program, error=reason, facts=facts)
            refused.write(options.folder)
            print(f"{refused.name}: FAILED: {reason}", flush=True)
            continue
        if options.variant == "tf_amp":
            facts = facts | _evidence(options.dtype)
        exported = Program(**program, **fields, facts=facts)
        size = exported.write(options.folder, hlo)
        print(f"{exported.name}: {len(fields['parameters'])} parameters, {size} bytes", flush=True)


def _evidence(dtype: str) -> dict[str, Any]:
    """What tf_amp says it did; nothing converted would compare float32 with itself.

    Raises:
        RuntimeError: it was not planned for a GPU, or no op was converted.
    """
    from variants import amp_status

    status = amp_status()
    found = {key: status[key] for key in ("device", "target_dtype", "nodes_converted", "casts")}
    failed = status["graphs_failed"]
    if failed or (status["device"], status["target_dtype"]) != ("GPU", dtype):
        raise RuntimeError(f"tf_amp did not plan for {dtype} on a GPU: {found}, failed {failed}.")
    if not status["nodes_converted"]:
        raise RuntimeError(f"tf_amp converted nothing: {status['reason']}.")
    return found


if __name__ == "__main__":
    main()
