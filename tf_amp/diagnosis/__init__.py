"""One batch in float32 and in mixed precision, side by side, down to the first node that is off.

In: a function or training step, one batch, and a `PrecisionConfig`.
Out: the converted nodes that lose their values, each with its Python line and its rule.
May not: change a variable of the user's; everything runs on copies.
"""
