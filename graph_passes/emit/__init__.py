"""Carrying a plan out.

In: a `Plan` and the graph that it was made for.
Out: a new proto with retyped nodes and Casts, verified against the original.
May not: believe the plan, or repair; it raises `VerificationError`.
"""
