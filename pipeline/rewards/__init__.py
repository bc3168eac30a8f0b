"""Rewards: one a file. A run's reward is the weighted sum of the ones it lists (`scorer`).

A user's own reward is a Python function, named `module:function` or `file.py:function`:

    def correct(prompt, completion, answer, **metadata) -> float:
        return 1.0 if completion.strip() == answer else 0.0

prompt, completion and answer are text (answer is None where the data have none). Metadata are: `set` and `index`
of the prompt, `messages` (None where the prompt is plain text), `tokens` and `finish_reason` (stop, length) of the
completion, `max_new_tokens`, `prompt_ids` and `completion_ids`, the other columns of the prompt's row by their own
names (of a generated prompt `item`, as its generator made it, and `entry`, what its own scorer reads), and the
reward's `parameters`. A function receives those that it names, all of them if it takes **metadata; one that needs
what no prompt of the run has ends the run at its start. It runs in processes of its own without the run's
credentials, may print, and must return a finite number within the reward's timeout.

A process reward returns a pair, the number and a list of (position, reward): what else the completion is worth, and
which of `completion_ids`, counted from 0, it came with. The sample's reward is the sum of all; algorithms with token
returns (ppo, reinforce++) count each at its token, the others see the sum.
"""
