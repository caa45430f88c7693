"""Where casts sit, and what is not worth one.

In: a coloured graph and a cost table, or the bytes of its tensors.
Out: the same colouring with vertices taken back to float32, or given to the target dtype.
May not: lower what must stay float32 for its numerics.
"""
