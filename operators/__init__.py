"""The control plane: an RLJob becomes children, in a cluster or as processes on this machine."""
