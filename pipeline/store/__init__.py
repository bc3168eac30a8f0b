"""What lies in a store, for people: the check before a run, what a run has written, and what of it nobody needs.

`__main__` is the command line, `speed` measures, `samples` reads rollouts, `garbage` plans and deletes.
"""
