"""Models on disk, converted: float32 in, the same model with low-precision products out.

In: SavedModels, frozen graphs, MetaGraphs, Keras files, and a `PrecisionConfig`.
Out: a model that plain TensorFlow loads, with the signatures, assets and objects of the original.
May not: run a graph, change the original, or leave half an output behind.
"""
