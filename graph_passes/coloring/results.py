"""Results: what nothing but results is made of is computed in float32, as losses are.

    Reshape(Softmax(logits));  (Sigmoid(offset) + grid) * 32;  (noisy - rate * noise) / signal

A result is float32 whatever made it, so that rounding right before it saves no Cast, and a program
goes on with it: it draws by probabilities, which must add up to 1, takes the logarithm of 1 - p,
places a box by pixels, or steps on from it. Behind the last matrix products, and the bias that is
part of their kernel, the infer ops of which nothing but results is made stay float32.
"""

from __future__ import annotations

from graph_passes.coloring.losses import PART_OF_THE_MODEL
from graph_passes.coloring.state import CLEAR, INFER, Coloring
from graph_passes.ir.graph_view import RESULT
from graph_passes.ops.node_types import WHOLE, NodeType
from graph_passes.ops.reasons import Reason


def keep_results(coloring: Coloring) -> None:
    """Keeps what is behind the last products, and leads to results alone, in float32."""
    codes, edges, view = coloring.list_codes, coloring.edges, coloring.view
    is_end = (codes == CLEAR) | (codes == INFER) | coloring.has_op({RESULT})
    is_end &= ~view.is_vertex_of(lambda node_type: node_type.is_inlined_call)
    is_between = ((codes == CLEAR) | (codes == INFER)) & ~view.is_vertex_of(_is_part_of_the_model)
    asks = view.is_vertex_of(_asks)  # as for the likeliest class
    pending = [v for v in coloring.where(is_end) if coloring.why[v] == Reason.PRESERVED]
    given, others = set(pending), dict[int, int]()
    while pending:
        for maker in edges.producers(pending.pop()):
            if maker in given or not is_between[maker]:
                continue
            if maker not in others:
                others[maker] = sum(not asks[reader] for reader in edges.readers(maker))
            others[maker] -= 1
            if not others[maker]:
                given.add(maker)
                pending.append(maker)
    chosen = coloring.rules  # by the user
    kept = [v for v in sorted(given) if codes[v] == INFER and view.vertex_nodes[v] not in chosen]
    coloring.block(kept, Reason.RESULT)


def _is_part_of_the_model(node_type: NodeType) -> bool:
    op = node_type.op
    return op in PART_OF_THE_MODEL or op.startswith("FusedBatchNorm") or op.endswith("Grad")


def _asks(node_type: NodeType) -> bool:
    made = [node_type.dtypes[slot] for slot in node_type.layout.out_slots]
    return bool(made) and WHOLE.issuperset(made)
