"""Names of traced functions, for people."""

from __future__ import annotations

import pytest

from tf_amp.hosts.function_names import readable_name


@pytest.mark.parametrize(
    ("runtime_name", "name"),
    [
        ("__inference_train_step_118", "train_step"),
        ("__inference_step_2_118", "step_2"),
        ("__forward_f_9", "f"),
        ("__inference___backward_train_step_90_118", "backward of train_step"),
        ("__inference___backward___backward_step_2_125_183_265", "backward of backward of step_2"),
        ("__forward___forward_step_2_966_1311", "step_2"),
        ("while_body_12", "while_body"),
        ("unusual", "unusual"),
    ],
)
def test_readable_name(runtime_name: str, name: str) -> None:
    assert readable_name(runtime_name) == name
