"""One process of `loss_parity.py`: trains a task with a seed in the dtype of the process."""

from __future__ import annotations

import argparse

import numpy as np
from parity_tasks import make_task
from variants import DTYPES, VARIANTS, amp_status, prepare
from worker_channel import Message, serve


def train(request: Message, variant: str) -> Message:
    """Trains for `steps` steps and evaluates.

    Args:
        request: `task`, `seed` and `steps`.
        variant: that of this process.

    Returns:
        The loss of every step, the accuracy on held-out data, and the evidence of what ran.

    Raises:
        RuntimeError: AMP is on and has converted nothing, or says that optimizers are given a loss
            scale, and this one has none.
    """
    from function_evidence import low_precision_ops

    task = make_task(request["task"], request["seed"], request["steps"])
    rng = np.random.default_rng(request["seed"])
    losses = []
    for _ in range(request["steps"]):
        loss, _ = task.model.train_on_batch(*task.batch(rng))
        losses.append(float(loss))
    math_ops = low_precision_ops()
    held_out_loss, accuracy = task.model.evaluate(*task.held_out, batch_size=128, verbose=0)
    answer: Message = {
        "seed": request["seed"],
        "losses": losses,
        "held_out_loss": float(held_out_loss),
        "accuracy": float(accuracy),
        "math_ops": math_ops,
    }
    if variant == "tf_amp":
        status = amp_status()
        if not math_ops.get(status["target_dtype"]):
            raise RuntimeError(
                f"AMP is on for {status['target_dtype']}, but all matrix products and convolutions "
                f"ran in another dtype: {math_ops}. The run would compare float32 with itself."
            )
        wanted = "target_dtype nodes_converted casts graphs_rewritten graphs_failed loss_scaling"
        answer["amp"] = {key: status[key] for key in (*wanted.split(), "loss_scale")}
        if status["loss_scaling"] and not status["loss_scale"].get("managers"):
            raise RuntimeError(
                f"Loss scaling is on ({status['loss_scaling_reason']}), but the optimizer "
                f"{task.model.optimizer!r} was trained without a loss scale."
            )
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", choices=VARIANTS, required=True)
    parser.add_argument("--dtype", choices=DTYPES, required=True)
    options = parser.parse_args()
    prepare(options.variant, options.dtype)
    serve(lambda request: train(request, options.variant))


if __name__ == "__main__":
    main()
