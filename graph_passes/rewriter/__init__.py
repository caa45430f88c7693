"""Finding subgraphs and replacing them.

In: a `GraphView`.
Out: what matches, a new view with the edits that passed the gate, and bodies edited in place.
May not: know a pattern by name, raise for a pattern, or trust a replacement.
"""
