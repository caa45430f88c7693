"""A callback of Keras that diagnoses the step that first made a loss or weights no numbers."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from graph_passes import PrecisionConfig
from tf_amp.diagnosis.diagnose import Diagnosis, diagnose
from tf_amp.diagnosis.recording import DiagnosisError
from tf_amp.diagnosis.step import is_finite
from tf_amp.loss_scale.telemetry import callback_class, scale_variables

_log = logging.getLogger("tf_amp")
_ORIGINAL = "tf_amp_train_function"


def make_callback(
    model: Any,
    config: PrecisionConfig,
    *,
    stop: bool,
    tell: Callable[[Diagnosis], None] | None,
    loss_scale: float | None,
) -> Any:
    """See `tf_amp.diagnose_callback`.

    Args:
        model: the model that will be fitted.
        config: what its steps are converted with.
        stop: whether training stops then.
        tell: is given the diagnosis; by default it is logged as a warning.
        loss_scale: what gradients are judged at, as `diagnose`.
    """
    base = callback_class(model)

    class DiagnoseCallback(base):  # type: ignore[misc,valid-type]
        """Keeps two batches and what variables held before them, until the loss is no number."""

        _supports_tf_logs = True
        diagnosis: Diagnosis | None = None
        _batch: Any = None
        _values: dict[int, tf.Tensor] | None = None
        _before: tuple[Any, dict[int, tf.Tensor] | None] = None, None

        def on_train_begin(self, logs: Any = None) -> None:
            del logs
            run = getattr(self.model.train_function, _ORIGINAL, self.model.train_function)
            several = getattr(self.model, "steps_per_execution", 1) or 1
            strategy = self.model.distribute_strategy
            if run is None or int(several) != 1 or strategy.num_replicas_in_sync > 1:
                _log.warning(
                    "The callback diagnoses nothing: it needs one replica and one step per "
                    "execution."
                )
                return

            def train_function(iterator: Any) -> Any:
                batch = iterator.get_next()
                self._before = self._batch, self._values
                self._batch = batch
                self._values = {id(v): v.read_value() for v in _variables(self.model)}
                return run(iter(tf.data.Dataset.from_tensors(batch)))

            setattr(train_function, _ORIGINAL, run)
            self.model.train_function = train_function

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            loss = (logs or {}).get("loss")
            if self._values is None or loss is None or math.isfinite(float(loss)):
                return
            given = self._batch
            values: dict[int, tf.Tensor] | None = self._values
            where = f"The loss is {float(loss)} at batch {batch}"
            if _spoiled(self._before[1], values):
                given, values = self._before
                where += ", and the step before it left variables that are not finite"
            try:
                self.diagnosis = diagnose(
                    tf.function(self.model.train_step, autograph=False),
                    [given],
                    config,
                    values=values,
                    loss_scale=loss_scale,
                )
            except DiagnosisError as error:
                _log.warning("%s. %s", where, error)
            else:
                if tell is not None:
                    tell(self.diagnosis)
                else:
                    _log.warning("%s:\n%s", where, self.diagnosis)
            self._release()
            if stop:
                self.model.stop_training = True

        def on_train_end(self, logs: Any = None) -> None:
            del logs
            self._release()

        def _release(self) -> None:
            """Lets training go on as if this were not there."""
            self._batch = self._values = None
            self._before = None, None
            run = getattr(self.model.train_function, _ORIGINAL, None)
            if run is not None:
                self.model.train_function = run

    return DiagnoseCallback()


def _variables(model: Any) -> list[tf.Variable]:
    """The variables of a model, its optimizer and its metrics."""
    found: list[Any] = list(model.variables)
    optimizer = getattr(model, "optimizer", None)
    held = getattr(optimizer, "variables", ())
    found.extend(held() if callable(held) else held)
    found.extend(scale_variables())
    for metric in model.metrics:
        found.extend(metric.variables)
    values = (v if isinstance(v, tf.Variable) else getattr(v, "value", None) for v in found)
    return [v for v in values if isinstance(v, tf.Variable)]


def _spoiled(
    before: Mapping[int, tf.Tensor] | None, behind: Mapping[int, tf.Tensor] | None
) -> bool:
    """Whether a variable was finite before a step and is not behind it."""
    if not before or not behind:
        return False
    return any(
        key in before and is_finite(before[key])
        for key, value in behind.items()
        if not is_finite(value)
    )
