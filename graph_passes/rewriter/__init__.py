"""Finding subgraphs and replacing them.

In: a `GraphView`.
Out: what matches, and a new view with the edits that passed the gate.
May not: know a pattern by name, raise for a pattern, or trust a replacement.
"""
