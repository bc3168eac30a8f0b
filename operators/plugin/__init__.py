"""`kubectl miles`: RLJobs as a person wants to see them, with the user's own kubectl and permissions.

command reads the cluster through operators.kubectl and prints; the others are pure: status (one screen about one job),
trouble (what is wrong, why, what to do), pods (what a pod is doing), tables (list, events, top).
"""
