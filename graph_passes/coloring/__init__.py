"""Which vertices go to the target dtype.

In: a `GraphView`, op lists, and what units say of single nodes.
Out: `Plan`: for every vertex a colour and exactly one reason.
May not: change a proto.
"""
