"""What this package takes for granted of TensorFlow, Keras and tf_keras: versions and members.

Most of the members are private and may change with any release. Each stands here as a row, and all
rows of a part are checked before that part replaces anything.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

OLDEST, NEWEST = (2, 17), (2, 21)
SUPPORTED = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"


class Member(NamedTuple):
    """A member of another library.

    Attributes:
        module: Where it is.
        path: Its name in the module, `Class.method` for one of a class.
        parameters: Of a function whose calls are rebuilt or passed on by position: the names of
            its parameters. None where they do not matter or cannot be read.
    """

    module: str
    path: str
    parameters: tuple[str, ...] | None = None

    def find(self) -> Any:
        """Returns the member.

        Raises:
            ImportError: There is no such module.
            AttributeError: The module has no such member.
        """
        found = importlib.import_module(self.module)
        for name in self.path.split("."):
            found = inspect.getattr_static(found, name)
        return found


_EAGER = "tensorflow.python.eager"
_ATOMIC = f"{_EAGER}.polymorphic_function.atomic_function"
_PYWRAP = "tensorflow.python.client.pywrap_tf_session"
_POLICY_STATE = "tensorflow.python.training.experimental.mixed_precision_global_state"
_FRAMEWORK = "tensorflow.python.framework"

THE_PASS = (
    # Read, by graph_passes.
    Member(f"{_FRAMEWORK}.dtypes", "as_dtype"),
    Member(f"{_FRAMEWORK}.kernels", "get_all_registered_kernels"),
    Member(f"{_FRAMEWORK}.kernels", "get_registered_kernels_for_op"),
    Member(f"{_FRAMEWORK}.op_def_registry", "get"),
    Member(f"{_FRAMEWORK}.tensor_util", "MakeNdarray"),
    Member(f"{_FRAMEWORK}.tensor_util", "make_tensor_proto"),
)
FUNCTION_HOST = (
    # Replaced.
    Member(_ATOMIC, "from_func_graph", ("name", "graph", "attrs", "function_type", "overwrite")),
    Member(_ATOMIC, "AtomicFunction._c_func"),
    Member(_ATOMIC, "AtomicFunction.graph_debug_info"),
    Member(_ATOMIC, "InterpolateRuntimeError.__exit__", ("self", "typ", "exc", "tb")),
    Member(f"{_EAGER}.context", "Context.add_function_def", ("self", "fdef")),
    Member(
        f"{_EAGER}.context",
        "Context.call_function",
        ("self", "name", "tensor_inputs", "num_outputs"),
    ),
    Member(f"{_EAGER}.context", "Context.get_compiler_ir"),
    Member(f"{_EAGER}.context", "Context.remove_function", ("self", "name")),
    Member(f"{_EAGER}.context", "Context.set_optimizer_experimental_options", ("self", "options")),
    Member("tensorflow.python.data.ops.structured_function", "StructuredFunctionWrapper.__init__"),
    Member(
        "tensorflow.python.data.ops.iterator_ops",
        "OwnedIterator._create_iterator",
        ("self", "dataset"),
    ),
    Member(
        "tensorflow.python.data.ops.dataset_ops", "DatasetV2.__init__", ("self", "variant_tensor")
    ),
    # Read.
    Member("tensorflow.python.data.ops.dataset_autograph", "_general_purpose_scan"),
    Member(_ATOMIC, "RUNTIME_FUNCTION_REFS"),
    Member(_ATOMIC, "AtomicFunction.cached_definition"),
    Member(_ATOMIC, "AtomicFunction.children"),
    Member(_ATOMIC, "AtomicFunction.definition"),
    Member(_ATOMIC, "AtomicFunction.graph"),
    Member(_ATOMIC, "AtomicFunction.name"),
    Member(f"{_EAGER}.context", "context"),
    Member(f"{_EAGER}.context", "context_safe"),
    Member(f"{_EAGER}.context", "Context.function_scope_id"),
    Member(f"{_EAGER}.context", "Context.get_c_function", ("self", "name")),
    Member(f"{_EAGER}.context", "Context.get_device_details", ("self", "device")),
    Member(f"{_EAGER}.context", "Context.get_function_def", ("self", "name")),
    Member(f"{_EAGER}.context", "Context.get_optimizer_experimental_options", ("self",)),
    Member(f"{_EAGER}.context", "Context.get_visible_devices", ("self", "device_type")),
    Member(f"{_EAGER}.context", "Context.has_function", ("self", "name")),
    Member(f"{_EAGER}.polymorphic_function.attributes", "TF_DATA_FUNCTION"),
    Member(f"{_FRAMEWORK}.c_api_util", "ScopedTFFunction.get"),
    Member(f"{_FRAMEWORK}.c_api_util", "tf_buffer"),
    Member(f"{_FRAMEWORK}.errors", "OpError"),
    Member(f"{_FRAMEWORK}.func_graph", "FuncGraph"),
    Member(f"{_FRAMEWORK}.ops", "executing_eagerly_outside_functions"),
    Member(f"{_FRAMEWORK}.tensor_util", "constant_value"),
    Member("tensorflow.python.types.core", "Value"),
    Member("tensorflow.python.util.tf_stack", "GraphDebugInfoBuilder"),
    Member("tensorflow.python.util._pywrap_util_port", "IsMklEnabled"),
    Member(_PYWRAP, "TF_FunctionToFunctionDef"),
    Member(_PYWRAP, "TF_GetBuffer"),
    *THE_PASS,
)
SESSION_HOST = (
    # Replaced.
    Member(
        "tensorflow.python.client.session",
        "BaseSession.__init__",
        ("self", "target", "graph", "config"),
    ),
    Member("tensorflow.python.training.server_lib", "Server.__init__"),
    Member(_PYWRAP, "TF_SessionRun_wrapper"),
    Member(_PYWRAP, "TF_SessionPRunSetup_wrapper"),
    Member(_PYWRAP, "TF_SessionMakeCallable"),
    # Read.
    Member(_PYWRAP, "TF_LoadPluggableDeviceLibrary"),
    Member(_PYWRAP, "TF_OperationName"),
    Member(_POLICY_STATE, "non_mixed_precision_session_created"),
    Member(_POLICY_STATE, "set_non_mixed_precision_session_created"),
    Member("tensorflow.python.util._pywrap_util_port", "IsMklEnabled"),
    *THE_PASS,
)
LATE_SETTINGS = (
    # Replaced.
    Member(_ATOMIC, "from_func_graph"),
    Member("tensorflow.python.client.session", "BaseSession._extend_graph", ("self",)),
)
STEP_WATCH = (
    # Replaced.
    Member(f"{_EAGER}.polymorphic_function.polymorphic_function", "Function.__call__"),
    Member("tensorflow.python.client.session", "BaseSession.run"),
    # Read.
    Member(
        f"{_EAGER}.polymorphic_function.polymorphic_function",
        "Function._list_all_concrete_functions",
    ),
)
SOURCE_MAPS = (
    # Read.
    Member("tensorflow.python.autograph.impl.api", "_TRANSPILER._cache._cache"),
)
TRACEBACKS = (
    # Replaced, as in Keras and tf_keras where they have it.
    Member("tensorflow.python.util.traceback_utils", "include_frame", ("fname",)),
)
SCOPES = (
    # Replaced.
    Member(f"{_FRAMEWORK}.func_graph", "FuncGraph.__init__"),
    Member(
        f"{_EAGER}.execute",
        "record_gradient",
        ("op_name", "inputs", "attrs", "outputs"),
    ),
    Member(
        f"{_EAGER}.record",
        "record_operation",
        ("op_type", "output_tensors", "input_tensors", "backward_function", "forward_function"),
    ),
    Member(f"{_FRAMEWORK}.ops", "Graph._original_op", ("self", "op")),
    Member(f"{_FRAMEWORK}.registry", "Registry.lookup", ("self", "name")),
    # Read.
    Member("tensorflow.python.autograph.impl.api", "do_not_convert"),
    Member(f"{_FRAMEWORK}.ops", "Graph._attr_scope"),
    Member(f"{_FRAMEWORK}.ops", "Operation"),
    Member(f"{_FRAMEWORK}.ops", "_gradient_registry"),
    Member(f"{_FRAMEWORK}.ops", "get_default_graph"),
    Member("tensorflow.python.util.tf_stack", "extract_stack"),
)
DIAGNOSIS = (
    # Replaced.
    Member(
        f"{_EAGER}.backprop",
        "GradientTape.gradient",
        ("self", "target", "sources", "output_gradients", "unconnected_gradients"),
    ),
    # Read.
    Member(
        f"{_EAGER}.polymorphic_function.polymorphic_function",
        "Function._clone",
        ("self", "python_function"),
    ),
)
COMMANDS = (
    # Read.
    Member(f"{_FRAMEWORK}.meta_graph", "stripped_op_list_for_graph"),
    Member("tensorflow.python.grappler.tf_optimizer", "OptimizeGraph"),
    Member("tensorflow.python.saved_model.pywrap_saved_model", "fingerprinting"),
)
_LOSS_SCALE = (
    # Read.
    Member("tensorflow.python.autograph.impl.api", "autograph_artifact"),
    Member(f"{_EAGER}.context", "Context.host_address_space", ("self",)),
    Member("tensorflow.python.ops.control_flow_util", "GraphOrParentsInXlaContext"),
    Member("tensorflow.python.ops.control_flow_v2_func_graphs", "ControlFlowFuncGraph"),
    Member("tensorflow.python.ops.control_flow_v2_func_graphs", "WhileBodyFuncGraph"),
    Member("tensorflow.python.trackable.base", "Trackable._lookup_dependency"),
    Member("tensorflow.python.trackable.base", "Trackable._track_trackable"),
    Member("tensorflow.python.trackable.base", "Trackable._trackable_children"),
    Member(
        "tensorflow.python.training.experimental.loss_scale_optimizer",
        "MixedPrecisionLossScaleOptimizer",
    ),
)
KERAS = (
    Member("keras", "Model.compile"),
    Member("keras", "Model.fit"),
    Member("keras", "Model.train_step"),
    Member("keras", "optimizers.LossScaleOptimizer.apply"),
    Member("keras", "optimizers.LossScaleOptimizer.scale_loss"),
    Member("keras", "optimizers.Optimizer.apply"),
    Member("keras", "optimizers.Optimizer.apply_gradients"),
    Member("keras", "optimizers.Optimizer.scale_loss"),
    # Read.
    Member("keras.src.saving.keras_saveable", "KerasSaveable"),
    *_LOSS_SCALE,
)
TF_KERAS = (
    Member("tf_keras", "Model.compile"),
    Member("tf_keras", "Model.fit"),
    Member("tf_keras", "optimizers.Optimizer.apply_gradients"),
    Member(
        "tf_keras", "optimizers.Optimizer.compute_gradients", ("self", "loss", "var_list", "tape")
    ),
    Member("tf_keras", "optimizers.Optimizer.minimize"),
    Member("tf_keras", "optimizers.legacy.Optimizer.apply_gradients"),
    Member(
        "tf_keras",
        "optimizers.legacy.Optimizer._get_gradients",
        ("self", "tape", "loss", "var_list", "grad_loss"),
    ),
    Member("tf_keras", "optimizers.legacy.Optimizer.minimize"),
    Member("tf_keras.src.engine.training_v1", "Model.compile"),
    Member("tf_keras.src.optimizers.optimizer_v1", "TFOptimizer.__init__"),
    Member(
        "tf_keras.src.optimizers.optimizer_v1",
        "TFOptimizer.minimize",
        ("self", "loss", "var_list", "grad_loss", "tape"),
    ),
    Member(
        "tf_keras.src.mixed_precision.loss_scale_optimizer", "LossScaleOptimizer.get_scaled_loss"
    ),
    Member(
        "tf_keras.src.mixed_precision.loss_scale_optimizer", "LossScaleOptimizerV3.get_scaled_loss"
    ),
    Member("tf_keras", "optimizers.legacy.Optimizer.get_updates", ("self", "loss", "params")),
    # Read.
    Member("tensorflow.python.eager.backprop", "GradientTape._ensure_recording"),
    Member("tf_keras", "optimizers.legacy.Optimizer.get_gradients", ("self", "loss", "params")),
    Member("tf_keras", "optimizers.legacy.Optimizer._aggregate_gradients"),
    Member("tf_keras", "optimizers.legacy.Optimizer._create_all_weights"),
    Member("tf_keras", "optimizers.legacy.Optimizer._transform_unaggregated_gradients"),
    *_LOSS_SCALE,
)
V1_OPTIMIZERS = (
    Member("tensorflow.python.training.optimizer", "Optimizer.__init__"),
    Member("tensorflow.python.training.optimizer", "Optimizer.apply_gradients"),
    Member("tensorflow.python.training.optimizer", "Optimizer.compute_gradients"),
    Member("tensorflow.python.training.saver", "Saver.restore"),
    Member(
        "tensorflow.python.training.experimental.loss_scale_optimizer",
        "MixedPrecisionLossScaleOptimizer.compute_gradients",
    ),
    # Read.
    Member("tensorflow.python.training.optimizer", "Optimizer._create_or_restore_slot_variable"),
    Member("tensorflow.python.training.optimizer", "Optimizer._create_slots"),
    Member("tensorflow.python.training.optimizer", "Optimizer._restore_slot_variable"),
    *_LOSS_SCALE,
)


def require(members: Iterable[Member]) -> None:
    """Raises AttributeError, which names the member, unless all are as expected."""
    found = obstacle(members)
    if found is not None:
        raise AttributeError(found)


def unsupported(version: str) -> str | None:
    """Says why a TensorFlow is not supported, None if it is.

    Args:
        version: Its version, such as "2.21.0".
    """
    release = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if OLDEST <= release <= NEWEST:
        return None
    return (
        f"TensorFlow {version} is not supported (supported: {SUPPORTED}). Install a supported "
        "version, or a newer tf-amp."
    )


def obstacle(members: Iterable[Member]) -> str | None:
    """Says which member is not as expected, None if all are.

    A member that another package has wrapped counts with the parameters that it claims to have.
    """
    for member in members:
        try:
            found = member.find()
        except (ImportError, AttributeError) as error:
            return f"{member.module}.{member.path} cannot be found ({error})"
        if member.parameters is not None:
            parameters = tuple(inspect.signature(found).parameters)
            if parameters != member.parameters:
                return (
                    f"{member.module}.{member.path} has the parameters {parameters}, and "
                    f"{member.parameters} were expected: another package may have replaced it"
                )
    return None
