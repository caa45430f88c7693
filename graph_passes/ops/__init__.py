"""What an op is.

In: the op and kernel registries of the running TensorFlow, and tensors of constants.
Out: op types with the layout of their slots, node types, kernel support, the closed set of reasons.
May not: know a graph; it imports nothing of the package but itself.
"""
