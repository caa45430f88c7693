"""What XLA makes of the rewritten graphs on a GPU: exported here, run there, without TensorFlow.

Comes in: the workloads of `benchmarks/workloads.py`. Comes out: HLO and JSON, the times and memory
of a device as JSON, and a cost table made from those. `program`, `values`, `checks`, `device`,
`run`, `report`, `micro` and `micro_cases` need no TensorFlow; the others need no GPU.
"""
