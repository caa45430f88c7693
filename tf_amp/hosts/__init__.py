"""Hosts: the places where TensorFlow hands a graph over to the rewrite.

`function` covers everything that goes through the eager context (tf.function, Keras, XLA, loaded
SavedModels), `session` covers graphs that a v1 Session runs. Both call `graph_passes` and report to
the installation they were installed with.
"""
