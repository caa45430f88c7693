"""Random graphs for property tests, as text of `graph_text`.

A graph is a row of steps. Each step is one of a few lines that read tensors made before; every
float tensor has the shape [4, 4], so any step may follow any other and every graph can run.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping

from graph_text import graph
from hypothesis import strategies as st
from tensorflow.core.framework import graph_pb2

# In a step {o} is the name it makes; {a} {b} {c} are float tensors, {n} is an int32 tensor of
# shape [4], {l} the handle of a tensor list. A blank line parts two steps.
_BLOCKS = {
    "allow": """
{o} = MatMul({a}, {b})

{o} = BatchMatMulV2({a}, {b}, adj_x=True)

{o} = Einsum({a}, {b}, equation="ij,jk->ik")

{o}r = Reshape({a}, [1, 4, 4, 1])
{o}w = Reshape({b}, [2, 2, 2, 2])
{o}k = StridedSlice({o}w, [0, 0, 0, 0], [2, 2, 1, 1], [1, 1, 1, 1])
{o}c = Conv2D({o}r, {o}k, strides=[1, 1, 1, 1], padding="SAME")
{o} = Reshape({o}c, [4, 4])
""",
    "infer": """
{o} = AddV2({a}, {b})

{o} = Mul({a}, {b})

{o} = Sub({a}, {b})

{o} = AddN({a}, {b}, {c})

{o} = Tanh({a})

{o} = Sigmoid({a})

{o} = Softmax({a})

{o} = Sqrt({a})

{o} = RealDiv({a}, {b})

{o} = Square({a})
""",
    "clear": """
{o} = Relu({a})

{o} = Identity({a})

{o} = StopGradient({a})

{o} = Maximum({a}, {b})

{o} = Transpose({a}, [1, 0])

{o}t = IdentityN({a}, {n}, {b})
{o} = AddV2({o}t[0], {o}t[2])

{o}t = Split(0, {a}, num_split=2)
{o} = ConcatV2({o}t[1], {o}t[0], 0)

{o}t = Pack({a}, {b})
{o}u = Unpack({o}t, num=2)
{o} = Maximum({o}u[0], {o}u[1])

{o}g = Greater({a}, {b})
{o} = SelectV2({o}g, {b}, {a})

{o} = GatherV2({a}, {n}, 0)

{o}s = ShapeN({a}, {b})
{o} = Reshape({a}, {o}s[1])

{o}s = Shape({a})
{o} = Fill({o}s, 0.5)
""",
    "deny": """
{o} = Exp({a})

{o} = Pow({a}, {b})

{o} = SparseMatMul({a}, {b})

{o}m = Mean({a}, 0, keep_dims=True)
{o} = Sub({a}, {o}m)

{o}m = Sum({a}, 1, keep_dims=True)
{o} = Mul({a}, {o}m)

{o}x = SoftmaxCrossEntropyWithLogits({a}, {b})
{o} = Mul({o}x[1], {a})
""",
    "unlisted": """
{o} = Sin({a})

{o} = Xdivy({a}, {b})

{o} = Cumsum({a}, 0)

{o} = Roll({a}, 1, 0)
""",
    "source": """
{o} = Const(0.25, [4, 4])

{o} = RandomUniform([4, 4], dtype=float32)

{o}b = Greater({a}, {b})
{o} = Cast({o}b, DstT=float32)

{o}i = Cast({a}, DstT=int32)
{o} = Cast({o}i, DstT=float32)

{o}h = Cast({a}, DstT=half)
{o}m = MatMul({o}h, {o}h)
{o} = Cast({o}m, DstT=float32)

{o}h = Cast({a}, DstT=bfloat16)
{o} = Cast({o}h, DstT=float32)

{o}d = Cast({a}, DstT=double)
{o}e = MatMul({o}d, {o}d)
{o} = Cast({o}e, DstT=float32)
""",
    "variable": """
{o}v = VarHandleOp(dtype=float32, shape=[4, 4])
{o}i = AssignVariableOp({o}v, {a})
{o} = ReadVariableOp({o}v, dtype=float32, after=[{o}i])

{o}v = VariableV2(dtype=float32, shape=[4, 4])
{o}w = Assign({o}v, {a})
{o} = Identity({o}w)

{o}v = VarHandleOp(dtype=float32, shape=[4, 4])
{o}i = AssignVariableOp({o}v, {a})
{o}r = ReadVariableOp({o}v, dtype=float32, after=[{o}i])
{o}n = Sub({o}r, {b})
{o}s = AssignVariableOp({o}v, {o}n)
{o} = ReadVariableOp({o}v, dtype=float32, after=[{o}s])
""",
    "branch": """
{o}p = Const(True)
{o}s = Switch({a}, {o}p)
{o}t = Relu({o}s[0])
{o}f = MatMul({o}s[1], {o}s[1])
{o} = Merge({o}t, {o}f)

{o}p = Const(False)
{o}s = Switch({a}, {o}p)
{o}t = Exp({o}s[0])
{o}f = Identity({o}s[1])
{o} = Merge({o}t, {o}f)
""",
    "loop": """
{o}i = Const(0)
{o}ie = Enter({o}i, frame_name="{o}")
{o}e = Enter({a}, frame_name="{o}")
{o}c = Enter({b}, frame_name="{o}", is_constant=True)
{o}im = Merge({o}ie, {o}in)
{o}m = Merge({o}e, {o}n)
{o}lim = Const(2, after=[{o}im])
{o}less = Less({o}im, {o}lim)
{o}go = LoopCond({o}less)
{o}is = Switch({o}im, {o}go)
{o}s = Switch({o}m, {o}go)
{o}one = Const(1, after=[{o}is])
{o}ia = AddV2({o}is[1], {o}one)
{o}in = NextIteration({o}ia)
{o}x = {body}
{o}n = NextIteration({o}x)
{o} = Exit({o}s[0])
""",
    "list": """
{o}l = EmptyTensorList([4, 4], 8, element_dtype=float32)
{o}p = TensorListPushBack({o}l, {a})
{o}q = TensorListPushBack({o}p, {b})
{o}r = TensorListPopBack({o}q, [4, 4], element_dtype=float32)
{o} = Identity({o}r[1])

{o}p = TensorListPushBack({l}, {a})
{o}r = TensorListPopBack({o}p, [4, 4], element_dtype=float32)
{o} = Relu({o}r[1])

{o}l = TensorListFromTensor({a}, [4])
{o} = TensorListStack({o}l, [4], element_dtype=float32)
""",
}
STEPS: Mapping[str, tuple[str, ...]] = {
    kind: tuple(block.strip().split("\n\n")) for kind, block in _BLOCKS.items()
}
"""The steps of each kind, by the list that their last op is on or by what they are about."""

BODIES = ("MatMul({o}s[1], {o}c)", "AddV2({o}s[1], {o}c)", "Relu({o}s[1])", "Exp({o}s[1])")
"""What a loop does in each turn."""

SMOOTH = tuple(
    """
{o} = MatMul({a}, {b})

{o} = Tanh({a})

{o} = Sigmoid({a})

{o} = Relu({a})

{o} = AddV2({a}, {b})

{o} = Softmax({a})

{o}m = Mean({a}, 0, keep_dims=True)
{o} = Sub({a}, {o}m)

{o}t = Split(0, {a}, num_split=2)
{o} = ConcatV2({o}t[1], {o}t[0], 0)
""".strip().split("\n\n")
)
"""Steps that hardly enlarge a rounding error, for tests of values."""

DEVICES = ("", "", "", "", "/device:CPU:0", "/device:GPU:0")


@dataclasses.dataclass(frozen=True)
class RandomGraph:
    """A graph and the nodes to preserve in it."""

    text: str
    preserve: tuple[str, ...]

    @property
    def graph_def(self) -> graph_pb2.GraphDef:
        """The graph."""
        return graph(self.text)


@st.composite
def random_graphs(
    draw: st.DrawFn,
    *,
    max_steps: int = 14,
    node_types: tuple[str, ...] = tuple(STEPS),
    devices: tuple[str, ...] = DEVICES,
    free_casts: bool = False,
) -> RandomGraph:
    """Graphs of steps of the given node_types.

    With `free_casts` no Cast is preserved or on a device of its own.
    """
    steps = [step for kind in node_types for step in STEPS[kind]]
    # Without products nothing is converted, so they are as likely as all the rest of a kind.
    steps += list(STEPS["allow"]) * 2
    floats, lists, names, may_preserve = ["x"], ["items"], ["x"], ["x"]
    text = [
        "x = Const(0.5, [4, 4])",
        "n = Const([1, 0, 3, 2])",
        "items = EmptyTensorList([4, 4], 8, element_dtype=float32)",
    ]
    for number in range(draw(st.integers(2, max_steps))):
        name = f"t{number}"
        pick = {letter: draw(st.sampled_from(floats[-5:])) for letter in "abc"}
        step = draw(st.sampled_from(steps))
        step = step.replace("{body}", draw(st.sampled_from(BODIES)) if "{body}" in step else "")
        made = step.format(o=name, n="n", l=draw(st.sampled_from(lists)), **pick).split("\n")
        device = draw(st.sampled_from(devices))
        is_free = free_casts and "Cast" in made[-1]
        if device and "Switch" not in step and "Variable" not in step and not is_free:
            made[-1] += f" @ '{device}'"
        elif draw(st.integers(0, 9)) == 0 and made[-1].endswith(")") and "after" not in made[-1]:
            made[-1] = f"{made[-1][:-1]}, after=[{draw(st.sampled_from(names))}])"
        text += made
        floats.append(name)
        names.append(name)
        if not is_free:
            may_preserve.append(name)
    preserve = draw(st.lists(st.sampled_from(may_preserve), max_size=3, unique=True))
    text.append(f"out = Identity({names[-1]})")
    return RandomGraph("\n".join(text), (*preserve, "out"))


@st.composite
def smooth_graphs(draw: st.DrawFn, *, max_steps: int = 10) -> RandomGraph:
    """Graphs whose values stay near each other when they are computed in low precision."""
    rows = [[round(0.1 * ((3 * i + 5 * j) % 7) - 0.3, 2) for j in range(4)] for i in range(4)]
    names, text = ["x"], [f"x = Const({rows})"]
    for number in range(draw(st.integers(2, max_steps))):
        step = draw(st.sampled_from(SMOOTH))
        pick = {letter: draw(st.sampled_from(names[-4:])) for letter in "ab"}
        text.append(step.format(o=f"t{number}", **pick))
        names.append(f"t{number}")
    text.append(f"out = Identity({names[-1]})")
    return RandomGraph("\n".join(text), ("out",))


def shuffled(graph_def: graph_pb2.GraphDef, seed: int) -> graph_pb2.GraphDef:
    """The same graph with its nodes in another order."""
    result = graph_pb2.GraphDef()
    result.CopyFrom(graph_def)
    nodes = list(result.node)
    random.Random(seed).shuffle(nodes)
    del result.node[:]
    result.node.extend(nodes)
    return result
