"""The functions of the package: switch AMP on and off, ask for its state, rewrite one graph."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from tf_amp.env_variables import DISABLE_CALL, ENABLE_CALL, ENABLING_VARIABLES, is_on
from tf_amp.explanation import Explanation
from tf_amp.keras_policy import mixed_policy
from tf_amp.state import Status

if TYPE_CHECKING:
    import tensorflow as tf
    from tensorflow.core.framework.graph_pb2 import GraphDef

    from graph_passes import PrecisionConfig, RewriteResult, Rule
    from graph_passes.policy.config import Device, TargetDtype
    from tf_amp.installation import Installation

# The modules that need TensorFlow are imported by the functions that use them: `status` answers
# without it, and importing `tf_amp` must not import it.

_log = logging.getLogger("tf_amp")
_Optimizer = TypeVar("_Optimizer")


def enable_mixed_precision_graph_rewrite(
    opt: _Optimizer = None,  # type: ignore[assignment]
    loss_scale: Any = "dynamic",
    *,
    rules: str | os.PathLike[str] | Iterable[Rule] = (),
) -> _Optimizer:
    """Switches the graph rewrite on and gives the optimizer a loss scale.

    Call it before the first `tf.function`, `fit` or session runs: what was traced before stays
    in float32. Variables stay float32 in any case. The call wins over the three enabling
    environment variables; everything it does not set comes from the environment (`env_config.md`).

    Args:
        opt: an optimizer of `tf.compat.v1.train`, `tf_keras` or Keras 3. None, the default,
            switches on the rewrite alone, as inference needs it.
        loss_scale: "dynamic" (the default), a fixed scale greater than 0, or a rule of
            `tf_amp.loss_scale`. With "dynamic" and a target dtype of bfloat16, or none, the scale
            is 1 and never changes, unless ``TF_ENABLE_AUTO_MIXED_PRECISION_LOSS_SCALING=1`` asks
            for one: bfloat16 has the range of float32.
        rules: what single nodes are to be: `Rule` objects, or the path of a TOML file of rules
            (`env_config.md`). They win over those of a file that a variable names.

    Returns:
        The wrapped optimizer, to be used in place of `opt`; None for None. Where this TensorFlow is
        not supported, which a warning says, `opt` as it is.

    Raises:
        ValueError: `opt` has a loss scale already or was wrapped before, a Keras mixed-precision
            policy is active, or `loss_scale` or a rule is not a legal value.
        TypeError: `opt` is not an optimizer of a kind that can be wrapped, or `rules` holds
            something else than `Rule` objects.
        tf_amp.env_config.EnvConfigError: an environment variable has an illegal value.
    """
    from tf_amp import installation
    from tf_amp.loss_scale.rule import resolve

    _refuse_keras_policy()
    if opt is not None:
        _refuse_optimizer(opt)
        resolve(loss_scale)
    before = installation.current()
    installed = _switch_on(before, rules_of(rules))
    if opt is None or installed is None:
        return opt
    try:
        return _wrap(opt, loss_scale, installed)
    except Exception:
        if installed is not before:  # else what was rewritten would run in float32 from then on
            installation.uninstall()
            if before is not None:
                installation.install(before.settings, source=before.plan.source)
        raise


def disable_mixed_precision_graph_rewrite() -> None:
    """Switches AMP off: what is traced from now on is what TensorFlow alone makes.

    Wrapped optimizers keep their loss scale. Functions that XLA has compiled keep their compiled
    code until they are traced anew; other functions run in float32 from now on. Sessions that
    have run a graph keep it.
    """
    from tf_amp import installation

    if installation.uninstall(f"{DISABLE_CALL} switched it off"):
        _log.info("AMP off: what is traced from now on stays in float32.")
    else:
        _log.warning("%s did nothing: AMP is not on.", DISABLE_CALL)


def status() -> Status:
    """Tells what AMP is doing in this process.

    Returns:
        A frozen record of plain values, which can be read like a dict too (`status()["enabled"]`);
        `Status` says what each one is.
    """
    # Without this module nothing was ever installed, and importing it would import TensorFlow.
    module = sys.modules.get("tf_amp.installation")
    installed: Installation | None = module.current() if module else None
    if installed is not None:
        return installed.status()
    refusal: str | None = module.refusal() if module else None
    return Status(why=refusal or _why_off())


def explain() -> Explanation:
    """Tells people what AMP did in this process, function by function, and why not more.

    Returns:
        A frozen record to `print`; its `status` is that of `status()`. For single nodes and their
        Python lines there is ``tf-amp explain``.
    """
    return Explanation(status())


def rewrite_graph_def(
    graph_def: GraphDef,
    *,
    preserve: Iterable[str] = (),
    target_dtype: TargetDtype | tf.DType = "float16",
    device: Device = "GPU",
    parity: bool = False,
    rules: str | os.PathLike[str] | Iterable[Rule] = (),
    config: PrecisionConfig | None = None,
) -> RewriteResult:
    """Rewrites one graph. Nothing has to be switched on, and no environment variable is read.

    Args:
        graph_def: the graph; it is not changed.
        preserve: names of nodes or tensors that are fed, fetched or otherwise to be left alone.
        target_dtype: "float16" (the default) or "bfloat16", as a name or a dtype of TensorFlow.
        device: "GPU" (the default) or "CPU": whose kernels must exist. No GPU is needed for a GPU
            plan.
        parity: plan as TensorFlow's own pass does, instead of with this project's rules.
        rules: what single nodes are to be: `Rule` objects, or the path of a TOML file of rules.
        config: everything at once, list edits included, in place of the four arguments above.

    Returns:
        A result whose `graph_def` is the new graph and whose `report` says what was done and why.
        A graph that cannot be rewritten is given back as it is, with `failure` saying why.

    Raises:
        TypeError: `graph_def` is not a GraphDef, `preserve` is one string, or `rules` holds
            something else than `Rule` objects.
        ValueError: an argument is not a legal value, or `config` is given with one of those that it
            replaces.
    """
    from tensorflow.core.framework import graph_pb2

    import graph_passes
    from graph_passes.ir.graph_view import no_shapes
    from tf_amp.hosts import offline

    if not isinstance(graph_def, graph_pb2.GraphDef):
        raise TypeError(
            "`graph_def` must be a GraphDef, such as tf.Graph.as_graph_def() returns. "
            f"Received a value of type {type(graph_def).__name__}."
        )
    if isinstance(preserve, str):
        raise TypeError(
            f"`preserve` must be a collection of names. Received the string {preserve!r}; "
            f"write [{preserve!r}]."
        )
    preserve = tuple(preserve)  # which a generator gives but once
    target_dtype, rules = getattr(target_dtype, "name", target_dtype), rules_of(rules)
    if config is None:
        config = graph_passes.PrecisionConfig(
            target_dtype=target_dtype, device=device, parity=parity, rules=rules
        )
    elif (target_dtype, device, parity, rules) != ("float16", "GPU", False, ()):
        raise ValueError(
            "`config` replaces `target_dtype`, `device`, `parity` and `rules`. Received `config` "
            f"and target_dtype={target_dtype!r}, device={device!r}, parity={parity!r}, "
            f"rules={rules!r}; give only one."
        )
    known = {node.name for node in graph_def.node}
    for name in preserve:
        if name.removeprefix("^").partition(":")[0] not in known:
            _log.warning("`preserve` names %r, which is no node of the graph.", name)
    shapes = None if config.parity else offline.InferredShapes(graph_def)
    result = graph_passes.rewrite_graph_def(
        graph_def,
        config,
        preserve=preserve,
        shapes=shapes.of_graph if shapes else None,
        function_shapes=shapes.of_function if shapes else no_shapes,
    )
    if result.failure is not None:
        _log.error("The graph was not rewritten and is returned as it was: %s", result.failure)
    else:
        for rule in config.rules:
            if not result.matched[rule]:
                _log.warning("No node of the graph meets the criteria of %s", rule)
    return result


def rules_of(rules: str | os.PathLike[str] | Iterable[Rule]) -> tuple[Rule, ...]:
    """The rules that an argument stands for, as rules of a call.

    Raises:
        RulesError: a file cannot be read, or a rule in it is not legal.
        TypeError: there is something else among them.
    """
    from graph_passes.policy.rules import Rule, load_rules

    if isinstance(rules, (str, os.PathLike)):
        return load_rules(os.fspath(rules), "call")
    rules = tuple(rules)
    for rule in rules:
        if not isinstance(rule, Rule):
            raise TypeError(
                "`rules` must be the path of a file or tf_amp.Rule objects. "
                f"Received among them: {rule!r}."
            )
    return rules


def _switch_on(before: Installation | None, rules: tuple[Rule, ...]) -> Installation | None:
    """Installs the rewrite, unless it is on already; either way returns what is on, if anything."""
    from tf_amp import installation
    from tf_amp.env_config import read_settings

    if before is not None and before.settings.graph_rewrite:
        new = tuple(rule for rule in rules if rule not in before.settings.rules)
        if not new:
            return before
        settings = dataclasses.replace(before.settings, rules=before.settings.rules + new)
    else:
        settings = read_settings()
        settings = dataclasses.replace(
            settings,
            graph_rewrite=True,
            rules=settings.rules + rules,
            decided_by={**settings.decided_by, "graph_rewrite": ENABLE_CALL},
        )
    return installation.install(settings, source=ENABLE_CALL)


def _wrap(opt: _Optimizer, loss_scale: Any, installed: Installation) -> _Optimizer:
    from tf_amp.loss_scale import NoLossScale, wrap_optimizer

    if isinstance(loss_scale, str) and not installed.settings.loss_scaling_asked:
        dtype = installed.plan.target.target_dtype
        if loss_scale == "dynamic" and dtype != "float16":
            why = f"{dtype} has the range of float32" if dtype else "nothing is converted"
            _log.info("Loss scaling is off by itself: %s.", why)
            loss_scale = NoLossScale()
    return wrap_optimizer(opt, loss_scale)


def _refuse_optimizer(opt: object) -> None:
    """Raises if an optimizer cannot be wrapped, before anything is switched on."""
    from tf_amp.loss_scale.wrapping import find_family, require_not_wrapped

    find_family(opt)
    require_not_wrapped(opt)


def _refuse_keras_policy() -> None:
    """Raises if Keras computes layers in low precision by itself."""
    policy = mixed_policy()
    if policy is not None:
        raise ValueError(
            f"The {policy.library} dtype policy is {policy.name!r}, which makes layers cast by "
            f"themselves. It and the graph rewrite exclude each other: call {policy.remedy} before "
            f"the model is built, or do without {ENABLE_CALL}."
        )


def _why_off() -> str:
    on = [name for name in ENABLING_VARIABLES if is_on(os.environ.get(name, ""))]
    if not on:
        return f"none of {', '.join(ENABLING_VARIABLES)} is set, and {ENABLE_CALL} was not called"
    if "tensorflow" not in sys.modules:
        return f"{on[0]} is set and takes effect when TensorFlow is imported"
    if "tf_amp.late_settings" in sys.modules:
        late = "was set after TensorFlow had been imported; set it before, or call"
        return f"{on[0]} {late} {ENABLE_CALL}"
    return (
        f"{on[0]} is set, but the start-up file of tf-amp did not run: install tf-amp, start the "
        f"program with `tf-amp run`, or call {ENABLE_CALL}"
    )
