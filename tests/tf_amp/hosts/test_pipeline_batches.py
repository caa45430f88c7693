"""The batch that a data set tells beforehand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops

from tf_amp.hosts.pipeline_batches import PipelineBatches
from tf_amp.patches import Patches


class Source(dataset_ops.DatasetSource):  # type: ignore[misc]
    """A data set of another library, as DALI's: one op gives whole batches."""

    def __init__(self, batch_size: Any) -> None:
        self._given, self._batch_size = tf.data.Dataset.range(8).batch(4), batch_size
        super().__init__(self._given._variant_tensor)

    @property
    def element_spec(self) -> Any:
        return self._given.element_spec


@pytest.fixture
def batches() -> Iterator[PipelineBatches]:
    patches, found = Patches(), PipelineBatches()
    found.install(patches)
    yield found
    patches.undo()


@pytest.mark.parametrize(
    ("batch_size", "told"), [(4, 4), (tf.constant(4), 4), ([4, 2], None), ("4", None), (-1, None)]
)
def test_data_sets_of_other_libraries(batches: PipelineBatches, batch_size: Any, told: Any) -> None:
    source = Source(batch_size)
    iterator = iter(source.map(lambda x: x + 1))
    assert batches.size([source._variant_tensor]) == told
    assert batches.size([iterator._iterator_resource]) == told
