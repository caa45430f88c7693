"""Carrying a plan out.

In: a `Plan` and the graph that it was made for.
Out: a new proto with retyped nodes, Casts and ordered updates, verified against the original.
May not: believe the plan, or repair; it raises `VerificationError`.
"""
