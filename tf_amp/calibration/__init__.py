"""Rules for a model, from the values that its nodes have on sample inputs.

In: a model on disk, samples, and a `PrecisionConfig`.
Out: rules that keep float32 what the target dtype cannot hold, and what that costs.
May not: change the model, or keep more of a tensor than its maxima and counts.
"""
