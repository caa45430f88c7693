"""The Python API on models and functions that are converted, compared or looked into aside."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tf_amp.api import rules_of

if TYPE_CHECKING:
    import tensorflow as tf

    from graph_passes import PrecisionConfig, Rule
    from graph_passes.policy.config import Device, TargetDtype
    from tf_amp.calibration.calibrate import Calibration
    from tf_amp.comparison.compare import Comparison
    from tf_amp.conversion.convert import Conversion
    from tf_amp.diagnosis.diagnose import Diagnosis
    from tf_amp.installation import Installation


def convert_saved_model(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    target_dtype: TargetDtype | tf.DType = "float16",
    device: Device = "GPU",
    rules: str | os.PathLike[str] | Iterable[Rule] = (),
    weights: bool = False,
    embeddings: bool = False,
    io: Literal["float32", "target"] = "float32",
    rows: int | None = None,
    outputs: Collection[str] = (),
    allow_lambda: bool = False,
    force: bool = False,
    config: PrecisionConfig | None = None,
) -> Conversion:
    """Writes a model with its products in low precision, for plain TensorFlow to load.

    Signatures, input and output names, shapes and dtypes, assets, variables, functions and objects
    stay as they are. What is written is there whole or not at all.

    Args:
        src: a SavedModel's directory, a GraphDef or MetaGraphDef (`.pb`, `.pbtxt`, `.meta`), or a
            Keras model (`.keras`), which becomes a SavedModel.
        dst: the directory or file to make.
        target_dtype: "float16" (the default) or "bfloat16", as a name or a dtype of TensorFlow.
        device: "GPU" (the default) or "CPU": where the result is to run. No GPU is needed for a GPU
            plan. Where it is this machine's, the measured costs of its kernels count.
        rules: what single nodes are to be: `Rule` objects, or the path of a TOML file of rules, as
            `calibrate` makes them.
        weights: whether variables are stored in the target dtype if all that read them take them
            so: smaller files, and no cast of them per call. The constants of a frozen graph always
            are.
        embeddings: with `weights`, whether tables are stored so too whose rows are used in float32:
            the rows are rounded to the target dtype. Without, only those of which all rows are cast
            to it anyway.
        io: "float32" (the default), or "target" for signatures that take and give the target dtype
            in place of float32.
        rows: the batch that is expected where a signature leaves it open: what is faster in float32
            for it stays so, where measured costs count. By default that of `config`, 32.
        outputs: for a graph without signatures, the nodes that are fetched; by default those that
            no other node reads.
        allow_lambda: whether Python code inside a `.keras` file may be loaded. It can do anything.
        force: whether `dst` may be replaced if it exists.
        config: everything at once, list edits included, in place of `target_dtype`, `device` and
            `rules`.

    Returns:
        What was done: a remark on each decision, which variables changed, and the sizes.

    Raises:
        ValueError: an argument is not a legal value; or (`tf_amp.model_files.ModelError`) the model
            cannot be read, has nothing to convert, or cannot be written.
        TypeError: `outputs` is one string, or `rules` holds something else than `Rule` objects.
    """
    from tf_amp.conversion.convert import convert

    if io not in ("float32", "target"):
        raise ValueError(f"`io` must be 'float32' or 'target'. Received: io={io!r}.")
    if isinstance(outputs, str):
        raise TypeError(f"`outputs` must be a collection of names. Received: {outputs!r}.")
    config = _config_asked_for(target_dtype, device, config, rules_of(rules))
    if rows is not None:
        config = dataclasses.replace(config, unknown_dimension=rows)
    return convert(
        Path(src),
        Path(dst),
        config,
        weights=weights,
        embeddings=embeddings,
        io=io,
        outputs=outputs,
        allow_lambda=allow_lambda,
        force=force,
    )


def compare_models(
    first: str | os.PathLike[str],
    second: str | os.PathLike[str],
    samples: Iterable[Mapping[str, Any]] | None = None,
    *,
    seed: int = 0,
    batch: int = 8,
    count: int = 4,
) -> Comparison:
    """Runs two models on the same inputs and says how far apart their outputs are.

    Args:
        first: the model that is right: a SavedModel's directory, a frozen GraphDef, or a `.keras`
            file.
        second: the model to judge.
        samples: dicts from names of inputs to arrays; by default random ones by signature.
        seed: of random samples.
        batch: rows of random samples where a signature leaves that open, 8 by default.
        count: how many random samples, 4 by default.

    Returns:
        For each output the largest absolute and relative difference, the cosine, the shares that
        overflowed or became 0, and the top-1 and top-5 agreement; the median time of a call of
        each, taken in turns; and the sizes. `Comparison.beyond(tolerance)` gives what is too far.

    Raises:
        ValueError: (`tf_amp.model_files.ModelError`) a model cannot be loaded or fed, or the
            second lacks what the first gives.
    """
    from tf_amp.comparison.compare import compare

    return compare(Path(first), Path(second), samples, seed=seed, batch=batch, count=count)


def calibrate(
    model: str | os.PathLike[str],
    samples: Iterable[Mapping[str, Any]],
    *,
    target_dtype: TargetDtype | tf.DType = "float16",
    device: Device = "GPU",
    batches: int | None = None,
    tolerance: float | None = None,
    underflow: float = 0.5,
    config: PrecisionConfig | None = None,
) -> Calibration:
    """Finds the rules that a model needs, from its values on sample inputs.

    The model runs in float32. Of each tensor that a plan would convert, only the largest magnitude
    and counts are kept. A node stays float32 if values that it makes or reads are not finite or
    over the largest of the target dtype, 65,504 for float16, or if that flushes too many to 0.

    Args:
        model: a SavedModel's directory, a frozen GraphDef, or a `.keras` file.
        samples: dicts from names of inputs to arrays, one for a batch.
        target_dtype: as `convert_saved_model`.
        device: as `convert_saved_model`.
        batches: how many of the samples are taken; by default all.
        tolerance: if the model that is converted with these rules fails
            `compare_models(...).beyond(tolerance)` on these samples, it is bisected over what is
            converted, what adds most to the error first, until it holds with as many FLOPs in the
            target dtype as possible. By default nothing is compared.
        underflow: the share of its values other than 0 from which on a tensor that is flushed to 0
            stays float32.
        config: everything at once, in place of `target_dtype` and `device`. Its rules hold anyway.

    Returns:
        The rules: `rules` for `enable_mixed_precision_graph_rewrite` and `PrecisionConfig`, `text`
        for a file; the share of the FLOPs that is left, and how many runs were needed.

    Raises:
        ValueError: an argument is not a legal value; or (`tf_amp.model_files.ModelError`) the model
            cannot be read, fed or converted.
    """
    from tf_amp.calibration.calibrate import calibrate

    return calibrate(
        Path(model),
        samples,
        _config_asked_for(target_dtype, device, config),
        batches=batches,
        tolerance=tolerance,
        underflow=underflow,
    )


def diagnose(
    fn: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    config: PrecisionConfig | None = None,
    tolerance: float | None = None,
    loss_scale: float | None = None,
) -> Diagnosis:
    """Runs a function on one batch in float32 and in mixed precision, and says where values go.

    Both run on copies of the variables, so nothing is changed, and draw the same random numbers. Of
    each tensor that a converted node makes, the number of values that are not finite, the largest
    magnitude and 4,096 values are kept, whatever its size.

    Args:
        fn: a function of one batch: a Python function or tf.function, such as `model.train_step`.
        inputs: its arguments, as tensors or arrays.
        config: how it is converted; by default as this process is, and with AMP off in float16 for
            the GPU, or for the CPU where there is none.
        tolerance: how far a converted node may be from float32, by the length of its value, where
            all is finite and its inputs are near; by default 0.05 for float16, 0.25 for bfloat16.
        loss_scale: the loss scale at which float16 gradients are judged; by default that by which
            `fn` multiplies its loss: the one of its optimizer, or 1.

    Returns:
        The first converted node, in the order in which they ran, whose values are not finite, or
        far from float32; then, with that one in float32, the next one, until all is finite. Each
        with the reason for its conversion, the Python line, and the rule to paste; `print` shows
        them. For float16, `gradients` tells of each variable what share of its gradient is flushed
        to 0 at the loss scale, and the loss scale that loses least.

    Raises:
        ValueError: (`tf_amp.diagnosis.recording.DiagnosisError`) the function takes its batch from
            an iterator, or cannot be converted.
    """
    from tf_amp.diagnosis.diagnose import diagnose

    return diagnose(
        fn, inputs, config or _config_in_force(), tolerance=tolerance, loss_scale=loss_scale
    )


def diagnose_callback(
    model: Any,
    *,
    stop: bool = True,
    tell: Callable[[Diagnosis], None] | None = None,
    config: PrecisionConfig | None = None,
    loss_scale: float | None = None,
) -> Any:
    """A callback for `model.fit(callbacks=[...])` that diagnoses the batch that broke the loss.

    It keeps the last two batches, and what variables held before them, until the loss is NaN or
    infinite for the first time; then it does what `diagnose` does with that batch, or with the one
    before it where that left variables that are not finite, as a gradient does that is NaN. Until
    then a step needs the memory of the variables three times.

    Args:
        model: a compiled model of Keras 3 or tf_keras.
        stop: whether training stops then (the default) or goes on.
        tell: is given the diagnosis; by default it is logged as a warning.
        config: as `diagnose`.
        loss_scale: as `diagnose`.

    Returns:
        A callback of the model's library. Its `diagnosis` is None until there is one.

    Raises:
        TypeError: `model` is of neither library.
    """
    from tf_amp.diagnosis.callback import make_callback

    return make_callback(
        model, config or _config_in_force(), stop=stop, tell=tell, loss_scale=loss_scale
    )


def _config_asked_for(
    target_dtype: TargetDtype | tf.DType,
    device: Device,
    config: PrecisionConfig | None,
    rules: tuple[Rule, ...] = (),
) -> PrecisionConfig:
    """What a model is converted with."""
    import graph_passes
    from tf_amp.cost_tables import choose_table
    from tf_amp.env_config import Settings
    from tf_amp.hardware import Target

    name = getattr(target_dtype, "name", target_dtype)
    if config is None:
        config = graph_passes.PrecisionConfig(target_dtype=name, device=device, rules=rules)
        costs = choose_table(Settings(), Target(name, device, "as asked for"))
        return dataclasses.replace(config, cost_table=costs.table)
    if (name, device, rules) != ("float16", "GPU", ()):
        raise ValueError(
            "`config` replaces `target_dtype`, `device` and `rules`. Received `config` and "
            f"target_dtype={name!r}, device={device!r}, rules={rules!r}; give only one."
        )
    return config


def _config_in_force() -> PrecisionConfig:
    """What graphs are rewritten with; with AMP off, float16 without a cost table."""
    import tensorflow as tf

    import graph_passes

    module = sys.modules.get("tf_amp.installation")
    installed: Installation | None = module.current() if module else None
    if installed is not None and installed.config is not None and installed.config.converts:
        return installed.config
    device: Device = "GPU" if tf.config.get_visible_devices("GPU") else "CPU"
    return graph_passes.PrecisionConfig(target_dtype="float16", device=device)
