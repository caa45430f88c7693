"""What is replaced, or kept whole, before a graph is painted.

In: a `GraphView` and the configuration.
Out: the view with its units in place, their names, near misses, and lists for single nodes.
May not: edit but through the rewriter; a unit never costs the graph or another unit.
"""
