"""Environments: what answers the policy, turn by turn, until an episode is over. One episode makes one sample.

A user's own environment is a Python class, named `module:Class` or `file.py:Class`; each episode has an object of it:

    class Guess:
        def __init__(self, attempts=3):                     # environment.parameters
            self.left = attempts

        def reset(self, answer, **row):                     # optional
            self.answer = answer

        def step(self, completion):                         # → observation, reward, done
            self.left -= 1
            right = completion.strip() == self.answer
            return "No, try again.", float(right), right or self.left == 0

`reset` and `step` receive those of these that they name, or all with **metadata. reset: prompt, messages, answer, set,
index, and the other columns of the prompt's row. step: completion (the text of the policy's turn), completion_ids,
finish_reason (stop, length), messages (the whole conversation), turn (1, 2, …).

reset may return messages {role, content} that follow the prompt; they must depend on the prompt alone, for all samples
of a group begin alike. step returns a triple: the observation, a string (a user's message) or a list of messages, None
where the episode is done; the reward of this step, whose sum over the episode is the reward `environment`; and whether
the episode is done. The class is loaded once, and each episode is a process forked off from there, without the run's
credentials: so start threads and open connections in __init__. What raises, hangs or dies costs that sample alone.

`process` holds those processes, `child` is what runs in them, `episode` the conversation between them and the policy.
"""
