"""GELU by the normal distribution, told from how it is written, and written at the least cost.

    y = x * cdf(x)            dy/dx = cdf(x) + x * pdf(x)

`tf.nn.gelu` writes cdf(x) as 0.5 * Erfc(-x * sqrt(0.5)), others as 0.5 * (1 + Erf(x * sqrt(0.5))).
The two differ by float32's rounding of a number near 1. A CPU takes three times as long for Erfc
(1.9 and 0.6 ms for 2.4 million elements on two cores), and TensorFlow's remapper knows Erf alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from fractions import Fraction

from graph_passes.ir.adjacency import walk
from graph_passes.policy.op_lists import FLOAT32
from graph_passes.rewriter.algebra import Polynomial, constant, symbol
from graph_passes.rewriter.emitter import Emitter
from graph_passes.rewriter.matcher import Matcher
from graph_passes.rewriter.replacement import Replacement
from graph_passes.units.activation.values import MOST_STEPS, X, made_of

ERFS = ("Erf", "Erfc")
_CDF, _PDF = symbol("cdf"), symbol("pdf")
_ROOT = math.sqrt(0.5)
_HEIGHT = 1 / math.sqrt(2 * math.pi)
"""The density at 0."""
_CLOSEST = 1e-6


@dataclasses.dataclass(frozen=True)
class ExactGelu:
    """One GELU.

    Attributes:
        x: the tensor that it is of.
        y: the tensor that it makes.
        values: tensors made of x alone -> what they are in x, the cumulative distribution "cdf"
            and the density "pdf".
    """

    x: str
    y: str
    values: Mapping[str, Polynomial]

    def is_only_read_inside(self, m: Matcher) -> bool:
        """Whether nothing but y is made of x, nor of what is made of it, and nothing waits."""
        x, y = m.maker(self.x), m.maker(self.y)
        made = {m.maker(tensor) for tensor in self.values} - {x}
        inside = set(walk([y], lambda n: [maker for maker in m.makers(n) if maker in made]))
        readers = {r for n in {x, *inside} - {y} for r in m.readers(n)}
        return readers <= inside and not any(map(m.view.is_ordered, (x, *inside)))

    def is_derivative(self, terms: Mapping[tuple[str, ...], float]) -> bool:
        """Whether a sum of products, each with its coefficient, is the derivative of the GELU."""
        if not self.values.keys() >= {tensor for factors in terms for tensor in factors}:
            return False
        products = (
            math.prod(map(self.values.__getitem__, factors), start=constant(coefficient))
            for factors, coefficient in terms.items()
        )
        return _are_close(sum(products, constant(0)), _CDF + X * _PDF)


def find_gelu(m: Matcher, erf: int) -> ExactGelu | None:
    """The GELU that a node of `ERFS` is part of, None where it is of none."""
    x = m.tensor(erf, 0)
    for _ in range(MOST_STEPS):
        if found := _gelu_of(m, x, m.output(erf)):
            return found
        number = m.maker(x)
        tensors = [t for t in m.inputs(number) if m.scalar(t) is None]
        if m.op(number) not in ("Mul", "Neg", "RealDiv") or len(tensors) != 1:
            return None
        x = tensors[0]
    return None


def _gelu_of(m: Matcher, x: str, erf: str) -> ExactGelu | None:
    """The GELU of a tensor, if it is made with what the node of an error function makes."""
    values = made_of(m, x, _own)
    y = next((tensor for tensor, value in values.items() if value == X * _CDF), None)
    return None if y is None or erf not in values else ExactGelu(x, y, values)


def write_gelu(new: Emitter, x: str) -> str:
    """Adds what makes y, in the order in which TensorFlow's remapper looks for it."""
    return new.op.Mul(_write_cdf(new, x)[1], x, name="gelu")


def write_with_derivative(new: Replacement, end: int, dy: str, gelu: ExactGelu) -> None:
    """Writes a GELU and its gradient, which have cdf(x) in common, in float32 inside.

    The target dtype would round away what is left of 1 + Erf near -1. The node `end` makes the
    gradient of dy.
    """
    scaled, cdf = _write_cdf(new, gelu.x)
    new.redirect[gelu.y] = new.op.Mul(cdf, gelu.x, name="gelu")
    # That the density at 0 is part of the exponent saves a product.
    height = new.constant(math.log(_HEIGHT), name="log_height", beside=scaled)
    exponent = new.op.Sub(height, new.op.Square(scaled, name="square"), name="exponent")
    slope = new.op.Mul(gelu.x, new.op.Exp(exponent, name="pdf"), name="slope")
    derivative = new.op.AddV2(cdf, slope, name="derivative")
    new.node_lists.update((node.name, FLOAT32) for node, _, _ in new.new_nodes)
    new.replace(end, new.op.Mul(dy, derivative, name="dx"))


def _write_cdf(new: Emitter, x: str) -> tuple[str, str]:
    """Adds the nodes that make x * sqrt(0.5), and cdf(x)."""
    root, one, half = (
        new.constant(value, name=name, beside=x)
        for value, name in ((_ROOT, "root"), (1.0, "one"), (0.5, "half"))
    )
    scaled = new.op.Mul(x, root, name="scaled")
    shifted = new.op.AddV2(new.op.Erf(scaled, name="erf"), one, name="shifted")
    return scaled, new.op.Mul(shifted, half, name="cdf")


def _own(op: str, operand: Polynomial) -> Polynomial | None:
    """What the ops that GELU is told by make."""
    if op in ERFS:
        for sign in map(constant, (1, -1)):
            if _are_close(sign * operand, constant(_ROOT) * X):
                erf = sign * (_CDF + _CDF - constant(1))
                return erf if op == "Erf" else constant(1) - erf
        return None
    if op != "Exp" or not _are_close(operand, X * X * constant(Fraction(-1, 2))):
        return None
    return _PDF * constant(1 / _HEIGHT)


def _are_close(one: Polynomial, other: Polynomial) -> bool:
    """Whether two polynomials have the same monomials and nearly the same coefficients."""
    found, wanted = dict(one.terms), dict(other.terms)
    # What cancels but for the rounding of constants is left of one of them.
    size = max(map(abs, wanted.values()))
    return wanted.keys() <= found.keys() and all(
        abs(found[monomial] - wanted.get(monomial, 0)) <= _CLOSEST * size for monomial in found
    )
