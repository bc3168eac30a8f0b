"""`miles plan`: what a job needs before it has it. Memory of each process, time of a step, and the cost of the run.

The trainer's own code (Learner and all below it) trains two full micro-batches of the job's real model on tensors
without storage, in a process group without peers; nothing of it is modelled apart, so nothing can differ. Time is
arithmetic: the operations and bytes counted on the way, over speeds that the reader states. vLLM is not ours: its
memory is that of the weights and of the cache of keys and values.
"""
