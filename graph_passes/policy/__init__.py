"""What a caller chooses, and the data that rooms above go by.

In: the choices of a caller; the op lists and cost tables shipped as data.
Out: `PrecisionConfig`, `OpLists`, `CostTable`.
May not: read an environment or a graph.
"""
