"""A user's own Python, run in processes of its own: `process` is the worker's side, `child` the other one."""
