"""Reading what the pass decided: traces of processes, their figures, and what blocks the rest.

`trace` reads the directories that `tf_amp.hosts.dumps` writes, `jobs` puts the ranks of a
distributed training together, `figures` counts, `blockers` plans again with one thing changed;
`text` and `page`, from `columns`, are what people read. Nothing here is loaded while a program runs
in mixed precision.
"""
